//! The daemon that owns devices and lends them.
