//! Leases of other hosts, over TCP, with a device in the role of hardware: it has BARs,
//! needs no descriptors, and records all calls.

mod device;
mod end;
mod host;
mod idle;
mod lease;
mod neighbour;
mod registers;
mod tls;
