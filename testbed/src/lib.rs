//! Real QEMU, a real guest kernel and a small guest userland, for tests and demos.
