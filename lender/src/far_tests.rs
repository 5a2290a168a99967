//! Leases of other hosts, over TCP, on a device that stands for hardware: it
//! brings its own BARs, needs no descriptors, and notes what is done to it.

mod device;
mod end;
mod host;
mod lease;
mod neighbour;
mod registers;
