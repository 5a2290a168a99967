//! Looks at a host for what would keep VMs from borrowing, and says how to mend
//! it.

#![forbid(unsafe_code)]
