//! The interface between a backend and `farside` commands on its host: requests at the
//! control socket ([`admin`]), the backend's status ([`status`]), and the JSON documents
//! of `farside status`, `farside devices` ([`devices`]), `farside volume list` ([`volumes`]) and
//! `farside upgrade` ([`upgrade`]).

#![forbid(unsafe_code)]

pub mod admin;
pub mod devices;
pub mod status;
pub mod upgrade;
pub mod volumes;

pub use devices::{DeviceList, ListedDevice};
pub use status::{
    BackendReport, BarAddress, BorrowState, Connection, ConnectionState, DeviceReport,
    LenderReport, Status, StatusError,
};
pub use volumes::{VolumeEntry, VolumeList};
