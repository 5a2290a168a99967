//! The fuzz targets as functions of their input. `tests/corpus.rs` runs all of them on the committed
//! corpus, `libfuzzer/` on what libFuzzer makes of it, and `tests/simulation.rs` the targets `leases`
//! and `migrations` on random input.
//!
//! Invariants are assertions: a panic is a finding. Modules that their crates do not publish are
//! compiled here from the same files.

#![forbid(unsafe_code)]

mod admin;
mod backend;
mod config_files;
mod config_space;
mod description;
mod domains;
mod etcd;
mod input;
mod irqs;
mod leases;
mod lender_messages;
mod lender_stream;
mod medium;
mod messages;
mod migrations;
mod nvme_driver;
mod qmp;
mod register_tokens;
mod virtio_driver;

/// A target: its name, and the function.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: [Target; 18] = [
    ("admin", admin::run),
    ("backend", backend::run),
    ("config_files", config_files::run),
    ("config_space", config_space::run),
    ("description", description::run),
    ("domains", domains::run),
    ("etcd", etcd::run),
    ("irqs", irqs::run),
    ("leases", leases::run),
    ("lender_messages", lender_messages::run),
    ("lender_stream", lender_stream::run),
    ("medium", medium::run),
    ("message_sequences", messages::run),
    ("migrations", migrations::run),
    ("nvme", nvme_driver::run),
    ("qmp", qmp::run),
    ("register_tokens", register_tokens::run),
    ("virtio", virtio_driver::run),
];

/// Runs the target `name` on `input`.
pub fn run(name: &str, input: &[u8]) {
    let target = TARGETS.iter().find(|(target, _)| *target == name);
    target.expect("a target of the list").1(input);
}

/// The lender's record of leases, and the requests that change it.
#[path = "../../../lender/src"]
#[allow(dead_code, reason = "the lender uses the rest")]
mod lender {
    pub(crate) mod access;
    pub(crate) mod chains;
    pub(crate) mod fences;
    pub(crate) mod lease_owner;
    pub(crate) mod refusals;
    pub(crate) mod registry;
    pub(crate) mod requests;
    pub(crate) mod source;
    pub(crate) mod state_file;
    pub(crate) mod tokens;
}
use lender::{
    access, chains, fences, lease_owner, refusals, registry, requests, source, state_file, tokens,
};

/// A lender, a backend and a client, from the backend's tests.
#[path = "../../../backend/tests/borrow"]
#[allow(dead_code, reason = "those tests use the rest")]
mod borrow {
    pub(crate) mod guest;
    pub(crate) mod host;
    pub(crate) mod vmm;
}
use borrow::{guest, host, vmm};

/// Two hosts and a lender that consist of their state, from the tests of migration.
#[path = "../../../migration/tests/crashes"]
#[allow(dead_code, reason = "those tests use the rest")]
mod crashes {
    pub(crate) mod live_world;
    pub(crate) mod world;
}
use crashes::{live_world, world};

/// A guest's memory and drivers, from the tests of the models.
#[path = "../../../lender/devices/src/test_bus.rs"]
#[allow(dead_code, reason = "those tests use the rest")]
mod test_bus;
#[path = "../../../lender/devices/src/nvme/tests"]
#[allow(dead_code, reason = "those tests use the rest")]
mod nvme_tests {
    pub(crate) mod crash;
    pub(crate) mod entries;
    pub(crate) mod world;

    /// Media that fail and controllers that are killed, which the targets do not have.
    pub(crate) mod failing {
        impl super::world::Driver {
            pub(crate) fn restart(&mut self) {
                unreachable!("no target kills a controller");
            }
        }

        pub(crate) enum Faults {}

        pub(crate) enum Watch {}
    }
}
/// A virtio-blk driver, from the tests of the model.
#[path = "../../../lender/devices/src/virtio/tests"]
#[allow(dead_code, reason = "those tests use the rest")]
mod virtio_tests {
    use super::nvme_tests::{crash, failing};

    pub(crate) mod world;

    impl world::Model for crate::virtio::VirtioBlk {
        type World = world::Disk;

        fn restart(_: &mut world::Driver) {
            unreachable!("no target kills a device");
        }
    }
}
use farside_devices::{Bus, Device, Dma, Interrupts, block, nvme, virtio};

#[path = "../../../backend/vfio-user/tests/support/device.rs"]
#[allow(dead_code, reason = "those tests use the rest")]
mod device;
#[path = "../../../backend/config-space/src/tests/image.rs"]
#[allow(dead_code, reason = "those tests use the rest")]
mod image;
