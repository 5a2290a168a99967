//! The sizes of disks whose image grows.

use std::{fs::File, path::Path};

use farside_lender_protocol::Described;

use super::*;
use crate::{
    fences::FenceBook,
    keeper::Keeper,
    registry::{RequestQueue, Shared},
    worker::{Program, Workers},
};

const MIB: u64 = 1 << 20;

/// A lender without devices, whose workers are never started.
fn devices() -> Devices {
    let program = Program {
        cgroup: None,
        path: "sh".into(),
        args: Vec::new(),
        keeper: None,
    };
    let (keeper, _) = Keeper::find("lender.sock".as_ref(), Some(program.clone())).unwrap();
    let workers = Workers {
        program,
        keeper: Arc::new(keeper),
    };
    let registry = Arc::new(Registry::new(FenceBook::default()));
    let adapter = Adapter::new(Default::default()).unwrap();
    let config = toml::from_str("").unwrap();
    let stop = Wakeup::new().unwrap();
    Devices::new(&config, registry, adapter, Some(workers), stop)
}

fn add(devices: &Devices, id: &str, image: &Path, file: &Path) -> Result<(), String> {
    let operator = Identity::User { uid: 0, pid: 1 };
    let table = format!("id = {id:?}\nmodel.nvme = {{ image = {image:?}, shared = {file:?} }}\n");
    let added = devices.add(&table, &operator);
    added.map_err(|error| error.message)
}

fn summary(devices: &Devices, id: &str) -> String {
    let described = devices.registry.described(&id.parse().unwrap());
    described.unwrap().description.summary.clone()
}

#[test]
fn controllers_of_a_shared_namespace_have_one_size() {
    let directory = tempfile::tempdir().unwrap();
    let [image, link, file] = ["image", "link", "reservations"].map(|it| directory.path().join(it));
    let medium = File::create(&image).unwrap();
    medium.set_len(MIB).unwrap();
    let devices = devices();
    add(&devices, "disk1", &image, &file).unwrap();
    // Without a command: the next controller is opened with all of it.
    medium.set_len(2 * MIB).unwrap();
    assert_eq!(summary(&devices, "disk1"), "farside NVMe, 1 MiB");
    std::os::unix::fs::symlink(directory.path(), &link).unwrap();
    add(&devices, "disk2", &image, &link.join("reservations")).unwrap();
    let sizes = || ["disk1", "disk2"].map(|id| summary(&devices, id));
    assert_eq!(sizes(), ["farside NVMe, 2 MiB"; 2]);
    // The next one cannot have the size of the others.
    medium.set_len(MIB).unwrap();
    let error = add(&devices, "disk3", &image, &file).unwrap_err();
    for word in ["disk1", "a disk does not shrink", "truncate -s 2097152"] {
        assert!(error.contains(word), "no {word:?} in {error}");
    }
    assert!(
        devices
            .registry
            .described(&"disk3".parse().unwrap())
            .is_err()
    );
    assert_eq!(sizes(), ["farside NVMe, 2 MiB"; 2]);
    devices.stop.raise();
    devices.join(Duration::from_secs(20));
}

#[test]
fn controllers_of_one_file_of_reservations_have_one_medium() {
    let directory = tempfile::tempdir().unwrap();
    let [image, file] = ["image", "reservations"].map(|it| directory.path().join(it));
    File::create(&image).unwrap().set_len(MIB).unwrap();
    let devices = devices();
    let ids = ["disk1", "disk2"].map(|id| {
        add(&devices, id, &image, &file).unwrap();
        let id: DeviceId = id.parse().unwrap();
        // As of a file without a birth time.
        devices
            .registry
            .set_medium(&id, farside_devices::block::ImageId::None);
        id
    });
    assert_eq!(devices.registry.on_medium_of(&ids[1]).unwrap(), ids);
    devices.stop.raise();
    devices.join(Duration::from_secs(20));
}

#[test]
fn a_resize_that_fails_in_part_names_what_has_grown() {
    let directory = tempfile::tempdir().unwrap();
    let [image, file] = ["image", "reservations"].map(|it| directory.path().join(it));
    let medium = File::create(&image).unwrap();
    medium.set_len(MIB).unwrap();
    let devices = devices();
    for id in ["disk1", "disk3"] {
        add(&devices, id, &image, &file).unwrap();
    }
    // As another device of the image, whose thread has ended.
    let (queue, _) = sync_channel(1);
    let queue = RequestQueue::new(queue, Wakeup::new().unwrap());
    let stuck: DeviceId = "disk2".parse().unwrap();
    let described = devices.registry.described(&"disk1".parse().unwrap());
    let described = Described::clone(&described.unwrap());
    let access = Access::new(&stuck, 0, Vec::new());
    let registry = &devices.registry;
    registry
        .add(&stuck, "model", described, queue, access, Generation(0))
        .unwrap();
    let size = MIB;
    let file = file.canonicalize().unwrap();
    registry.set_shared(&stuck, Shared { file, size });

    medium.set_len(2 * MIB).unwrap();
    let error = devices.resize(&stuck, &"as a test").unwrap_err();
    for part in [
        "cannot resize device disk2: the device's thread has stopped",
        "; device disk1 has grown to 2097152 bytes; device disk3 has grown to 2097152 bytes",
    ] {
        assert!(error.message.contains(part), "no {part:?} in {error}");
    }
    let sizes = ["disk1", "disk3"].map(|id| summary(&devices, id));
    assert_eq!(sizes, ["farside NVMe, 2 MiB"; 2]);
    devices.stop.raise();
    devices.join(Duration::from_secs(20));
}
