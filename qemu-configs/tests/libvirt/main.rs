//! libvirt domains: creating, editing, reverting, checking, refusing.

mod attacks;
mod common;
mod edits;
mod errors;
mod laws;
mod reads;
mod writes;
