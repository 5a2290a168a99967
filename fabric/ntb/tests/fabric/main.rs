//! The driver and the paths of a borrow on the model of our NTB: what a device
//! writes at one host lands in memory of the other.

mod adapter;
mod borrow;
mod driver;
mod function;
mod leaks;
mod world;
