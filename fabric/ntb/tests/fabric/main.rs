//! The driver and the DMA paths of a borrow, on the NTB model: a device's writes at one
//! host reach memory of the other.

mod adapter;
mod borrow;
mod driver;
mod function;
mod leaks;
mod messages;
mod world;
