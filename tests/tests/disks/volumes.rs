//! `farside volume`, with a lender that has nothing else, or none.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

use farside_backend_api::{VolumeEntry, VolumeList};
use farside_scripted_vmm::{
    nvme::{Controller, DRIVER_RAM, Opcode, Transfer},
    pattern::Pattern,
    ram::PAGE,
};
use farside_tests::{Cluster, Daemon, MIB, SHORT};

use crate::boot;

/// A cluster whose lender.toml names a directory of volumes.
struct Stage {
    cluster: Cluster,
    config: PathBuf,
}

impl Stage {
    fn new() -> Self {
        let cluster = Cluster::in_memory().unwrap();
        let etc = cluster.directory().join("etc");
        fs::create_dir(&etc).unwrap();
        let volumes = cluster.directory().join("volumes");
        let text = format!("volumes = {:?}\n", volumes.display().to_string());
        let config = cluster.file("etc/lender.toml", &text).unwrap();
        Self { cluster, config }
    }

    fn lend(&self) -> Daemon {
        let config = self.config.to_str().unwrap();
        self.cluster.lend(&["--config", config]).unwrap()
    }

    /// Runs `farside volume`, which succeeds. Returns its output.
    #[track_caller]
    fn volume(&self, args: &[&str]) -> String {
        let ended = self.cluster.run(&[&["volume"], args].concat()).unwrap();
        assert!(ended.status.success(), "{args:?}: {ended:?}");
        ended.stdout
    }

    /// Runs `farside volume`, which is refused for a reason that contains `why`.
    #[track_caller]
    fn refused(&self, args: &[&str], why: &str) {
        let ended = self.cluster.run(&[&["volume"], args].concat()).unwrap();
        assert!(!ended.status.success(), "{args:?}: {ended:?}");
        assert!(ended.stderr.contains(why), "{args:?}: {}", ended.stderr);
    }

    /// After a command was killed, the same one succeeds, unless it has done all; the lender may still be doing what
    /// that has asked for.
    fn goes_on(&self, verb: &[&str], is_done: bool) {
        let deadline = Instant::now() + SHORT;
        loop {
            let ended = self.cluster.run(&[&["volume"], verb].concat()).unwrap();
            let lent = self.list().iter().any(|volume| volume.lent);
            let as_it_should_be = lent == (verb[0] == "create");
            match (ended.status.success(), as_it_should_be) {
                (true, true) => return,
                (true, false) => panic!("{verb:?}: {ended:?}"),
                (false, true) if is_done => return,
                (false, _) => assert!(Instant::now() < deadline, "{verb:?}: {ended:?}"),
            }
        }
    }

    #[track_caller]
    fn list(&self) -> Vec<VolumeEntry> {
        let list: VolumeList = serde_json::from_str(&self.volume(&["list", "--json"])).unwrap();
        list.volumes
    }

    fn ids(&self) -> Vec<String> {
        let list = self.list().into_iter();
        list.map(|volume| volume.id.to_string()).collect()
    }

    /// The number of entries of the directory of volumes, beside those of the lender.
    fn files(&self) -> usize {
        let directory = self.cluster.directory().join("volumes");
        let names = fs::read_dir(directory)
            .unwrap()
            .map(|it| it.unwrap().file_name());
        names
            .filter(|name| name != ".lock" && name != ".socket")
            .count()
    }
}

/// The first page of a disk, from or to the VM's memory.
fn first_page(opcode: Opcode) -> Transfer {
    Transfer {
        opcode,
        offset: 0,
        bytes: PAGE,
        address: DRIVER_RAM.end,
    }
}

const MEMORY: std::ops::Range<u64> = DRIVER_RAM.end..DRIVER_RAM.end + PAGE;

#[test]
fn a_volume_is_created_borrowed_grown_and_deleted_while_its_lender_runs() {
    let stage = Stage::new();
    let lender = stage.lend();
    assert_eq!(stage.ids(), [""; 0]);
    let said = stage.volume(&["create", "disk7", "64M", "--iops", "5000"]);
    assert_eq!(said, "disk7 is created and lent: 64 MiB\n");

    let backend = stage.cluster.serve("web1", &["disk7"]).start().unwrap();
    let mut machine = boot(&stage.cluster, "web1", "disk7").unwrap();
    let mut controller = Controller::bring_up(&mut machine, 1, 1).unwrap();
    assert_eq!(controller.identity().bytes(), 64 * MIB);
    machine.ram.fill(MEMORY, &mut Pattern::new(7)).unwrap();
    let written = machine.ram.snapshot(MEMORY).unwrap();
    controller
        .transfer(&mut machine, &first_page(Opcode::Write))
        .unwrap();
    controller.flush(&mut machine).unwrap();

    let [volume] = &stage.list()[..] else {
        panic!("not one volume");
    };
    assert_eq!(volume.borrowed_by.as_deref(), Some("web1"));
    assert_eq!((volume.model.as_str(), volume.lent), ("nvme", true));
    // Thin: what was written, in the file system's units.
    assert!((PAGE..MIB).contains(&volume.used_bytes), "{volume:?}");
    stage.refused(&["delete", "disk7"], "VM web1");
    stage.refused(&["resize", "disk7", "32M"], "does not shrink to 32 MiB");
    let said = stage.volume(&["resize", "disk7", "128M"]);
    assert_eq!(said, "disk7 has 128 MiB (was 64 MiB)\n");
    machine.device.close();
    drop(backend);
    stage.cluster.wait_free("disk7").unwrap();

    // The next lender has it as well, with its data and its size.
    drop(lender);
    assert!(!stage.list()[0].lent);
    let _lender = stage.lend();
    let backend = stage.cluster.serve("web2", &["disk7"]).start().unwrap();
    let mut machine = boot(&stage.cluster, "web2", "disk7").unwrap();
    let mut controller = Controller::bring_up(&mut machine, 1, 1).unwrap();
    assert_eq!(controller.identity().bytes(), 128 * MIB);
    controller
        .transfer(&mut machine, &first_page(Opcode::Read))
        .unwrap();
    let changed = machine.ram.changed_since(&[written], &(0..0)).unwrap();
    assert_eq!(changed, 0, "bytes that are not what was written");
    machine.device.close();
    drop(backend);
    stage.cluster.wait_free("disk7").unwrap();

    stage.volume(&["delete", "disk7"]);
    assert_eq!((stage.ids().len(), stage.files()), (0, 0));
    let devices = stage.cluster.run(&["devices"]).unwrap();
    assert!(!devices.stdout.contains("disk7"), "{devices:?}");
}

#[test]
fn without_a_lender_volumes_are_created_for_the_next_one() {
    let stage = Stage::new();
    stage.refused(
        &["create", "a", "1M"],
        "which the lender makes when it starts",
    );
    drop(stage.lend());
    stage.volume(&["create", "a", "1M", "--model", "virtio-blk"]);
    stage.volume(&["create", "b", "1M"]);
    stage.volume(&["resize", "b", "2M"]);
    let table = stage.volume(&["list"]);
    assert!(
        table.contains("virtio-blk") && table.contains("no lender runs"),
        "{table}"
    );
    let lender = stage.lend();
    let devices = stage.cluster.run(&["devices"]).unwrap().stdout;
    let has = |what: &str| devices.lines().any(|line| line.contains(what));
    assert!(
        has("farside virtio-blk, 1 MiB") && has("farside NVMe, 2 MiB"),
        "{devices}"
    );
    drop(lender);
    stage.volume(&["delete", "a"]);
    assert_eq!(stage.ids(), ["b"]);
}

#[test]
fn what_a_lender_refuses_leaves_no_volume() {
    let stage = Stage::new();
    let _lender = stage.lend();
    stage.volume(&["create", "a", "1M"]);
    let added = ["lend", "--add", "--dma-test", "dma0"];
    assert!(stage.cluster.run(&added).unwrap().status.success());
    for (args, why) in [
        (&["create", "a", "1M"][..], "has a device a: choose"),
        (&["create", "dma0", "1M"], "has a device dma0: choose"),
        (&["create", "b", "1000T"], "choose a smaller size"),
        (&["create", "b", "1000"], "multiple of 4 KiB"),
        (&["create", "b", "1M", "--iops", "5"], "at least 100"),
        (
            &["create", "b", "1M", "--borrower", "user=nobody"],
            "does not admit user nobody",
        ),
        (&["create", "../b", "1M"], "device id"),
        (&["resize", "b", "1M"], "there is no volume b"),
        (&["resize", "a", "1000T"], "choose a smaller size"),
        (&["delete", "dma0"], "there is no volume dma0"),
        (
            &["list", "--config", "missing.toml"],
            "cannot read missing.toml",
        ),
        (&["list", "--config", "/dev/null"], "add `volumes = "),
    ] {
        stage.refused(args, why);
        assert_eq!(
            (stage.ids(), stage.files()),
            (vec!["a".to_owned()], 1),
            "{args:?}"
        );
    }
}

#[test]
fn a_volume_that_cannot_be_lent_does_not_keep_a_lender_from_starting() {
    let stage = Stage::new();
    drop(stage.lend());
    for id in ["good", "taken", "protected", "broken", "low"] {
        stage.volume(&["create", id, "1M"]);
    }
    let at = |file: &str| stage.cluster.directory().join("volumes").join(file);
    fs::set_permissions(at("protected/image"), Permissions::from_mode(0o400)).unwrap();
    fs::write(at("broken/device.toml"), "model.nvm = {}").unwrap();
    fs::write(
        at("low/device.toml"),
        "model.nvme = { limits = { iops = 1 } }",
    )
    .unwrap();
    let config = stage.config.to_str().unwrap();
    let args = ["--config", config, "--dma-test", "taken"];
    let lender = stage.cluster.lend(&args).unwrap();
    let log = lender.log();
    for reason in [
        "volume taken is not lent: lender.toml has a device of that id",
        "volume protected is not lent: ",
        "volume broken is not lent: ",
        "volume low is not lent: ",
    ] {
        assert!(log.contains(reason), "{reason}: {log}");
    }
    let devices = stage.cluster.run(&["devices"]).unwrap().stdout;
    let lines: Vec<_> = devices
        .lines()
        .skip(1)
        .map(|line| line.split(' ').next())
        .collect();
    assert_eq!(lines, [Some("good"), Some("taken")], "{devices}");
    let ended = stage.cluster.run(&["volume", "list"]).unwrap();
    assert!(
        !ended.status.success()
            && ended.stdout.contains("good")
            && ended.stderr.contains("broken/device.toml is invalid"),
        "{ended:?}"
    );
    for id in ["broken", "taken"] {
        stage.volume(&["delete", id]);
    }
    let devices = stage.cluster.run(&["devices"]).unwrap().stdout;
    assert!(devices.contains("taken"), "{devices}");
}

/// Its worker outlives the lender. A lender that left the volume out would end the lease.
#[test]
fn a_lender_does_not_start_without_a_volume_that_a_vm_has() {
    let stage = Stage::new();
    let mut lender = stage.lend();
    stage.volume(&["create", "a", "1M"]);
    let _backend = stage.cluster.serve("web1", &["a"]).start().unwrap();
    let mut machine = boot(&stage.cluster, "web1", "a").unwrap();
    let mut controller = Controller::bring_up(&mut machine, 1, 1).unwrap();
    let table = stage.cluster.directory().join("volumes/a/device.toml");
    let good = fs::read(&table).unwrap();
    fs::write(&table, "model.nvm = {}").unwrap();
    lender.kill().unwrap();
    let config = stage.config.to_str().unwrap();
    let args = ["lend", "--name", "rack1", "--config", config];
    let mut refused = stage.cluster.start("a lender", &args).unwrap();
    let status = refused.wait_exit(SHORT).unwrap();
    let log = refused.log();
    assert!(
        !status.success() && log.contains("a/device.toml is invalid"),
        "{log}"
    );

    fs::write(&table, good).unwrap();
    let _lender = stage.lend();
    controller
        .transfer(&mut machine, &first_page(Opcode::Write))
        .unwrap();
    assert_eq!(stage.list()[0].borrowed_by.as_deref(), Some("web1"));
    machine.device.close();
}

/// A killed command leaves a complete volume or none, and the same command goes on from there.
#[test]
fn a_killed_command_leaves_a_volume_or_none() {
    let stage = Stage::new();
    let mut lender = stage.lend();
    // Of a verb, the kills that it was done before, and the others.
    let (mut create, mut delete) = ([0; 2], [0; 2]);
    const MOST: Duration = Duration::from_millis(8);
    let mut step = Duration::from_micros(250);
    // A slow machine needs longer to start a command.
    while [create, delete].as_flattened().contains(&0) && step < MOST {
        step *= 2;
        for round in 0..40 {
            for (verb, done) in [
                (&["create", "a", "1M"][..], &mut create),
                (&["delete", "a"], &mut delete),
            ] {
                let mut command = stage
                    .cluster
                    .farside(&[&["volume"], verb].concat())
                    .unwrap();
                let command = command.stdout(Stdio::null()).stderr(Stdio::null());
                let mut child = command.spawn().unwrap();
                thread::sleep(step * round);
                child.kill().unwrap();
                child.wait().unwrap();
                let is_done = stage.ids().is_empty() == (verb[0] == "delete");
                done[usize::from(is_done)] += 1;
                stage.goes_on(verb, is_done);
                if round % 10 == 9 {
                    // The next lender reads whole volumes.
                    lender.kill_all().unwrap();
                    lender = stage.lend();
                }
            }
        }
    }
    assert!(
        ![create, delete].as_flattened().contains(&0),
        "{create:?}, {delete:?}"
    );
    assert_eq!(stage.files(), 0);
}

#[test]
fn commands_at_once_wait_for_each_other() {
    let stage = Stage::new();
    let _lender = stage.lend();
    thread::scope(|scope| {
        for n in 0..8 {
            let stage = &stage;
            scope.spawn(move || stage.volume(&["create", &format!("disk{n}"), "1M"]));
        }
    });
    let list = stage.list();
    assert!(
        list.len() == 8 && list.iter().all(|volume| volume.lent),
        "{list:?}"
    );
}

/// With the directory of one lender and the socket of another.
#[test]
fn a_device_of_the_same_id_is_left_alone() {
    let (one, other) = (Stage::new(), Stage::new());
    let _lenders = (one.lend(), other.lend());
    one.volume(&["create", "a", "1M"]);
    other.volume(&["create", "a", "1M"]);
    let socket = one.cluster.directory().join("lender.sock");
    let socket = socket.to_str().unwrap();
    for args in [
        &["delete", "a"][..],
        &["resize", "a", "2M"],
        &["create", "b", "1M"],
        &["list"],
    ] {
        let args = [args, &["--socket", socket]].concat();
        other.refused(&args, "are those of the lender at");
    }
    assert!(one.list()[0].lent);
    assert_eq!(other.list()[0].size_bytes, MIB);
}
