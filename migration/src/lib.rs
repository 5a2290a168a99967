//! Moves a VM to another host, with the devices that it borrows.

#![forbid(unsafe_code)]
