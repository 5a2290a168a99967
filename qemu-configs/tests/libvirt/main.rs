//! Domains of libvirt: written, changed, changed back, checked, refused.

mod attacks;
mod common;
mod edits;
mod errors;
mod laws;
mod reads;
mod writes;
