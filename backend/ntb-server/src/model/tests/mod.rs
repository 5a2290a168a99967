//! The model between two made-up hosts.

mod doorbells;
mod laws;
mod link;
mod registers;
mod window;
mod world;
