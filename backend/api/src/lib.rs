//! The interface of a backend to the commands on its host: requests at its control
//! socket ([`admin`]) and the status that it sends ([`status`]).

#![forbid(unsafe_code)]

pub mod admin;
pub mod status;

pub use status::{
    BackendReport, BarAddress, BorrowState, DeviceReport, LenderReport, Status, StatusError,
};
