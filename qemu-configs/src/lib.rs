//! QEMU command lines for VMs that borrow devices.
