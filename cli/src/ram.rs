//! Where a VM will have its RAM.

pub(crate) use farside_vm_config::ram_ranges;
