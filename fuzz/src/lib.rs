//! What the fuzz targets do, as functions of their input: the targets call
//! them, and the seeds are written for them.
//!
//! ```text
//! cargo run --manifest-path fuzz/Cargo.toml --example seeds
//! cargo +nightly fuzz run message_sequences
//! cargo +nightly fuzz run config_space
//! ```

pub mod config;
pub mod input;
pub mod messages;

#[path = "../../backend/tests/support/device.rs"]
mod device;
#[path = "../../backend/src/config_space/tests/image.rs"]
mod image;
