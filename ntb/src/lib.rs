//! The fabric between two hosts: NTB endpoints programmed from userspace.
