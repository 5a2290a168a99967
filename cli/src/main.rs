//! Use a PCIe device that sits in another host from a VM.
fn main() {}
