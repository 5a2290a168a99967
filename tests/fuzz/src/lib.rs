//! The fuzz targets as functions of their input, shared by the targets and the seed
//! generator.
//!
//! ```text
//! cargo run --manifest-path tests/fuzz/Cargo.toml --example seeds
//! cargo +nightly fuzz run message_sequences
//! cargo +nightly fuzz run config_space
//! cargo +nightly fuzz run domains
//! ```

pub mod config;
pub mod domains;
pub mod input;
pub mod messages;

#[path = "../../../backend/vfio-user/tests/support/device.rs"]
mod device;
#[path = "../../../backend/config-space/src/tests/image.rs"]
mod image;
