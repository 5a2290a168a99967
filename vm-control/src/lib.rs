//! Runs a VM on this host: starts and ends its backend and QEMU, plugs devices
//! in and out while it runs. Through QMP where farside or a script started QEMU,
//! through virsh where libvirt did.

#![forbid(unsafe_code)]
