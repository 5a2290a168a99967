//! The model between two simulated hosts.

mod doorbells;
mod laws;
mod link;
mod registers;
mod window;
mod world;
