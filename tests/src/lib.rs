//! End-to-end tests with real QEMU and real guests.
