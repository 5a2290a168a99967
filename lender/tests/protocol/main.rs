//! The lender protocol, with conforming peers and with peers that violate it.

mod access;
mod before_lease;
mod handover;
mod hostile;
mod lease;
mod peer;
mod ports;
