//! The lender protocol, with conforming peers and with peers that violate it.

mod access;
mod before_lease;
mod eventfd;
mod handover;
mod hostile;
mod lease;
mod operate;
mod peer;
mod ports;
mod quota;
mod tls;
