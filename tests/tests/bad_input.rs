//! Error messages for invalid input: each names the object, the value and the remedy. No
//! guest is booted.

use std::{
    fs::{self, Permissions},
    os::unix::{fs::PermissionsExt, net::UnixListener},
    path::Path,
};

use farside_tests::{BorrowState, Cluster, Ended, MIB, SHORT};

fn cluster() -> Cluster {
    Cluster::new().unwrap()
}

/// Runs a command that must fail, with one `error:` that contains all parts.
#[track_caller]
fn refused(cluster: &Cluster, args: &[&str], parts: &[&str]) -> Ended {
    let ended = cluster.run(args).unwrap();
    assert!(!ended.status.success(), "{args:?}: {ended:?}");
    assert!(ended.stderr.contains("error: "), "{args:?}: {ended:?}");
    assert!(!ended.stderr.contains("panicked"), "{args:?}: {ended:?}");
    for part in parts {
        assert!(
            ended.stderr.contains(part),
            "{args:?}: no {part:?} in: {}",
            ended.stderr
        );
    }
    ended
}

fn drive(path: &Path) -> String {
    format!("disk0={}", path.display())
}

fn lend_refused(image: &Path, parts: &[&str]) {
    let cluster = cluster();
    refused(&cluster, &["lend", "--nvme", &drive(image)], parts);
    assert_eq!(cluster.sockets().unwrap(), [] as [&Path; 0]);
}

#[test]
fn an_image_that_is_missing_is_named_with_the_way_to_make_it() {
    let cluster = cluster();
    let image = cluster.directory().join("none.img");
    let make = format!("truncate -s 10G {}", image.display());
    lend_refused(&image, &["device disk0", "no such file", &make]);
}

#[test]
fn an_image_of_a_broken_block_is_named_with_its_size() {
    let cluster = cluster();
    let image = cluster.image("odd", 1_000_000).unwrap();
    let name = image.display().to_string();
    lend_refused(
        &image,
        &[
            &name,
            "1000000 bytes",
            "not a multiple of the block size, 512",
        ],
    );
}

#[test]
fn an_image_that_cannot_be_written_is_named_with_the_key_to_set() {
    let cluster = cluster();
    let image = cluster.image("ro", MIB).unwrap();
    fs::set_permissions(&image, Permissions::from_mode(0o444)).unwrap();
    // Root can write to it nevertheless, unless the lender checks its mode.
    lend_refused(&image, &["is write-protected", "read-only = true }`"]);
    // The suggested key works.
    let text = format!(
        "[[device]]\nid = \"disk0\"\nmodel.nvme = {{ image = {:?}, read-only = true }}\n",
        image.display().to_string()
    );
    let config = cluster.file("lender.toml", &text).unwrap();
    cluster
        .lend(&["--config", &config.display().to_string()])
        .unwrap();
}

#[test]
fn an_image_that_a_lender_has_is_not_lent_twice() {
    let cluster = cluster();
    let (_lender, image) = cluster.lend_disk(MIB).unwrap();
    lend_refused(&image, &["device disk0", &image.display().to_string()]);
}

#[test]
fn a_device_that_no_lender_has_is_named_with_the_lenders_asked() {
    let cluster = cluster();
    let _lender = cluster.lend(&["--dma-test", "dma0"]).unwrap();
    let socket = cluster.directory().join("lender.sock");
    refused(
        &cluster,
        &["serve", "--vm", "a", "--device", "nope"],
        &[
            "no lender has device \"nope\"",
            &socket.display().to_string(),
            "`farside devices`",
        ],
    );
}

#[test]
fn a_lender_that_does_not_run_is_named_by_every_verb_that_needs_it() {
    let cluster = cluster();
    let socket = cluster.directory().join("lender.sock");
    let path = socket.display().to_string();
    let verbs: [&[&str]; 3] = [
        &["serve", "--vm", "a", "--device", "dma0"],
        &["devices"],
        &["status", "--lender", &path],
    ];
    for verb in verbs {
        refused(
            &cluster,
            verb,
            &[
                "cannot reach the lender at",
                &path,
                "is `farside lend` running?",
            ],
        );
    }
    // A stale socket without a listener.
    drop(UnixListener::bind(&socket).unwrap());
    for verb in verbs {
        refused(&cluster, verb, &[&path, "is `farside lend` running?"]);
    }
}

#[test]
fn a_vm_without_a_backend_is_named_with_the_way_to_start_one() {
    let cluster = cluster();
    refused(
        &cluster,
        &["status", "--vm", "web1"],
        &["no backend runs for VM web1"],
    );
    refused(
        &cluster,
        &["qemu", "--vm", "web1"],
        &[
            "no backend runs for VM web1",
            "`farside serve --vm web1 --device ID`",
        ],
    );
}

#[test]
fn sockets_that_dead_processes_left_are_replaced() {
    let cluster = cluster();
    let mut lender = cluster.lend(&["--dma-test", "dma0"]).unwrap();
    let mut backend = cluster.serve("a", &["dma0"]).start().unwrap();
    let before = cluster.sockets().unwrap();
    backend.kill().unwrap();
    lender.kill().unwrap();
    // The lender's; the backend's: control, status, and one for its device.
    assert_eq!(before.len(), 4, "{before:?}");
    assert_eq!(cluster.sockets().unwrap(), before, "SIGKILL leaves them");
    let lender = cluster.lend(&["--dma-test", "dma0"]).unwrap();
    lender.wait_log("stale socket", SHORT).unwrap();
    let _backend = cluster.serve("a", &["dma0"]).start().unwrap();
    let borrow = cluster.status().unwrap().borrow("a", "dma0").unwrap();
    assert_eq!(borrow.state, BorrowState::Unleased);
}

#[test]
fn sigterm_unlinks_every_socket() {
    let cluster = cluster();
    let mut lender = cluster.lend(&["--dma-test", "dma0"]).unwrap();
    let mut backend = cluster.serve("a", &["dma0"]).start().unwrap();
    for daemon in [&mut backend, &mut lender] {
        daemon.terminate().unwrap();
        let status = daemon.wait_exit(SHORT).unwrap();
        assert!(status.success(), "{status}");
    }
    assert_eq!(cluster.sockets().unwrap(), [] as [&Path; 0]);
}

#[test]
fn a_second_lender_or_backend_in_the_same_place_is_refused() {
    let cluster = cluster();
    let mut lender = cluster.lend(&["--dma-test", "dma0"]).unwrap();
    let mut backend = cluster.serve("a", &["dma0"]).start().unwrap();
    let socket = cluster
        .directory()
        .join("lender.sock")
        .display()
        .to_string();
    refused(
        &cluster,
        &["lend", "--dma-test", "dma1"],
        &["another process listens at", &socket],
    );
    refused(
        &cluster,
        &["serve", "--vm", "a", "--device", "dma0"],
        &["VM a has a backend already", "choose another --vm"],
    );
    // Neither has affected the first.
    assert!(lender.is_running().unwrap() && backend.is_running().unwrap());
    cluster.status().unwrap().borrow("a", "dma0").unwrap();
}

#[test]
fn unknown_keys_are_named_with_those_there_are() {
    let cluster = cluster();
    let cases = [
        ("lend", "naem = \"x\"\n", "unknown field `naem`", "`name`"),
        (
            "serve",
            "devics = []\n",
            "unknown field `devics`",
            "`devices`",
        ),
        (
            "qemu",
            "memroy = \"1G\"\n",
            "unknown field `memroy`",
            "`memory`",
        ),
        (
            "lend",
            "[[device]]\nid = \"d\"\nmodel.nvme = { image = \"x\", blocksize = 1 }\n",
            "unknown field `blocksize`",
            "`block-size`",
        ),
        (
            "lend",
            "[fabric]\nbar = 1\n",
            "unknown field `bar`",
            "`lut-entries`",
        ),
    ];
    for (verb, text, unknown, known) in cases {
        let path = cluster.file("config.toml", text).unwrap();
        let path = path.display().to_string();
        refused(
            &cluster,
            &[verb, "--config", &path],
            &[&path, unknown, known],
        );
    }
}

#[test]
fn limits_that_no_adapter_has_are_refused() {
    let cluster = cluster();
    let text = "[fabric]\nbar-size = 5\n[[device]]\nid = \"d\"\nmodel.dma-test = {}\n";
    let path = cluster.file("lender.toml", text).unwrap();
    refused(
        &cluster,
        &["lend", "--config", &path.display().to_string()],
        &["bar-size = 5", "power of two"],
    );
}

#[test]
fn ids_and_names_that_are_no_file_names_are_refused() {
    let cluster = cluster();
    refused(
        &cluster,
        &["lend", "--dma-test", "../up"],
        &["device id \"../up\"", "letters, digits"],
    );
    refused(
        &cluster,
        &["lend", "--dma-test", "d", "--dma-test", "d"],
        &["device id \"d\" is used twice"],
    );
    let _lender = cluster.lend(&["--dma-test", "dma0"]).unwrap();
    refused(
        &cluster,
        &["serve", "--vm", "../../up", "--device", "dma0"],
        &["../../up"],
    );
    assert!(!cluster.directory().join("../up").exists());
    refused(
        &cluster,
        &["serve", "--vm", "a", "--device", "dma0", "--device", "dma0"],
        &["device dma0 is named twice"],
    );
    refused(&cluster, &["serve", "--vm", "a"], &["--device ID"]);
    refused(&cluster, &["serve", "--device", "dma0"], &["--vm NAME"]);
}

/// An executable that pretends to be QEMU.
fn fake_qemu(cluster: &Cluster, script: &str) -> String {
    let path = cluster
        .file("qemu", &format!("#!/bin/sh\n{script}\n"))
        .unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
    path.display().to_string()
}

fn run_qemu(path: &str) -> Vec<&str> {
    vec![
        "qemu", "--vm", "a", "--device", "dma0", "--run", "--qemu", path,
    ]
}

#[test]
fn a_qemu_too_old_is_told_which_version_is_needed() {
    let cluster = cluster();
    let path = fake_qemu(&cluster, "echo QEMU emulator version 9.2.0 '(Debian)'");
    refused(
        &cluster,
        &run_qemu(&path),
        &[&path, "is QEMU 9.2", "need QEMU 10.1 or newer"],
    );
}

#[test]
fn a_qemu_that_lacks_the_device_or_is_none_is_named() {
    let cluster = cluster();
    let script =
        "case $1 in --version) echo QEMU emulator version 11.0.0;; *) echo name e1000;; esac";
    let path = fake_qemu(&cluster, script);
    refused(
        &cluster,
        &run_qemu(&path),
        &[&path, "built without the device vfio-user-pci"],
    );
    let path = fake_qemu(&cluster, "echo bash 5.2");
    refused(&cluster, &run_qemu(&path), &[&path, "bash 5.2"]);
    refused(&cluster, &run_qemu("/no/qemu"), &["/no/qemu", "QEMU 10.1"]);
}

#[test]
fn start_refuses_before_anything_is_started() {
    let cluster = cluster();
    let path = fake_qemu(&cluster, "echo QEMU emulator version 10.0.0");
    let start = |text: &str, parts: &[&str]| {
        let text = format!("devices = [\"dma0\"]\n{text}\n");
        cluster.describe("web1", &text).unwrap();
        refused(&cluster, &["start", "web1"], parts);
        assert_eq!(cluster.vm_log("web1", "backend"), "");
        assert_eq!(cluster.sockets().unwrap(), [] as [&Path; 0]);
    };
    start(
        &format!("qemu = \"{path}\""),
        &["VM web1 cannot start", &path, "is QEMU 10.0", "10.1"],
    );
    start(
        "memory = \"1024 TiB\"",
        &["VM web1 cannot start", "of guest RAM do not fit"],
    );
}

#[test]
fn qemu_checks_names_and_groups_as_the_backend_does() {
    let cluster = cluster();
    for name in ["a b", ""] {
        let ended = refused(
            &cluster,
            &["qemu", "--vm", name],
            &["VM name", "use 1 to 48"],
        );
        assert!(!ended.stderr.contains("farside serve"), "{ended:?}");
    }
    let text = "devices = [\"dma0\"]\nsocket-group = \"nosuch\"\n";
    cluster.describe("web1", text).unwrap();
    refused(
        &cluster,
        &["qemu", "--vm", "web1"],
        &["socket group \"nosuch\"", "no such group"],
    );
}

#[test]
fn status_of_a_host_where_nothing_runs_fails_and_names_each_cause_once() {
    let cluster = cluster();
    let ended = refused(
        &cluster,
        &["status"],
        &["neither a backend nor a lender runs"],
    );
    assert_eq!(ended.stderr.matches("No such file").count(), 1, "{ended:?}");
    let socket = cluster
        .directory()
        .join("lender.sock")
        .display()
        .to_string();
    let ended = refused(
        &cluster,
        &["status", "--lender", &socket],
        &[
            "cannot reach the lender at",
            "`farside lend`",
            "No such file",
        ],
    );
    assert_eq!(ended.stderr.matches("No such file").count(), 1, "{ended:?}");
}

#[test]
fn a_socket_that_cannot_be_made_is_named_with_the_way_to_choose_another() {
    let cluster = cluster();
    // A file cannot contain a directory.
    let file = cluster.file("file", "").unwrap();
    let socket = file.join("x/lender.sock").display().to_string();
    refused(
        &cluster,
        &["lend", "--dma-test", "dma0", "--socket", &socket],
        &[
            "cannot use directory",
            "--socket",
            "/file is not a directory",
        ],
    );
}

#[test]
fn a_log_filter_that_is_none_is_named() {
    let cluster = cluster();
    let mut command = cluster.farside(&["status"]).unwrap();
    let output = command.env("FARSIDE_LOG", "banana").output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("\"banana\" is no log level"), "{stderr}");
}

#[test]
fn a_device_that_nobody_serves_is_named_before_qemu_starts() {
    let cluster = cluster();
    let script = "case $1 in --version) echo QEMU emulator version 11.0.0;; *) echo name '\"vfio-user-pci\"';; esac";
    let path = fake_qemu(&cluster, script);
    refused(
        &cluster,
        &run_qemu(&path),
        &[
            "nobody serves device dma0 to VM a",
            "farside serve --vm a --device dma0",
        ],
    );
}

#[test]
fn arguments_that_make_guest_ram_private_are_refused() {
    let cluster = cluster();
    refused(
        &cluster,
        &[
            "qemu",
            "--vm",
            "a",
            "--device",
            "dma0",
            "--",
            "-machine",
            "q35,memory-backend=own",
            "-object",
            "memory-backend-ram,id=own,size=2G",
        ],
        &["\"own\"", "share=on"],
    );
}

#[test]
fn sizes_and_images_that_are_none_are_explained() {
    let cluster = cluster();
    refused(
        &cluster,
        &["qemu", "--vm", "a", "--device", "dma0", "--memory", "5x"],
        &["\"5x\" is not a size", "512M"],
    );
    refused(&cluster, &["lend", "--nvme", "disk0"], &["disk0=/"]);
    refused(
        &cluster,
        &["qemu", "--vm", "a", "--device", "dma0", "--boot", "disk9"],
        &["cannot boot from disk9", "dma0"],
    );
}
