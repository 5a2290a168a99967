//! The interface of a backend to the commands on its host: requests at its control
//! socket ([`admin`]).

#![forbid(unsafe_code)]

pub mod admin;
