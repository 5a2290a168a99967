//! The interface between a backend and `farside` commands on its host: requests at the
//! control socket ([`admin`]) and the backend's status ([`status`]).

#![forbid(unsafe_code)]

pub mod admin;
pub mod status;

pub use status::{
    BackendReport, BarAddress, BorrowState, DeviceReport, LenderReport, Status, StatusError,
};
