//! The control protocol, spoken to a lender by backends that know it and by
//! some that break its rules.

mod before_lease;
mod handover;
mod hostile;
mod lease;
mod peer;
mod ports;
