//! JSON of a backend's sockets and of the commands: control requests and answers, status, lists of
//! devices.
//!
//! Input: a byte that selects the document, then its text.

use std::fmt::Debug;

use farside_backend_api::{
    BackendReport, DeviceList, Status,
    admin::{Answer, Request},
};
use serde::{Serialize, de::DeserializeOwned};

use crate::input::Input;

/// Parses the document of `input`, which then survives being written.
pub fn run(input: &[u8]) {
    let mut input = Input(input);
    match input.u8() % 5 {
        0 => parsed::<Request>(input.0),
        1 => parsed::<Answer>(input.0),
        2 => {
            if let Ok(status) = Status::from_json(input.0) {
                let text = serde_json::to_vec(&status).expect("it was parsed");
                Status::from_json(&text).expect("it was written");
            }
        }
        3 => {
            if let Ok(report) = BackendReport::from_json(input.0) {
                let text = serde_json::to_vec(&report).expect("it was parsed");
                BackendReport::from_json(&text).expect("it was written");
                for device in &report.devices {
                    assert!(report.device(&device.device).is_some());
                    let _ = device.is_closed();
                }
            }
        }
        _ => parsed::<DeviceList>(input.0),
    }
}

fn parsed<T: Debug + Serialize + DeserializeOwned>(text: &[u8]) {
    if let Ok(value) = serde_json::from_slice::<T>(text) {
        let again = serde_json::to_vec(&value).expect("it was parsed");
        let same: T = serde_json::from_slice(&again).expect("it was written");
        assert_eq!(format!("{value:?}"), format!("{same:?}"));
    }
}
