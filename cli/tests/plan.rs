//! The output of `farside plan`, and its messages when a plan does not fit or the input is
//! invalid.

use std::process::{Command, Output};

fn plan(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_farside"))
        .arg("plan")
        .args(args)
        .output()
        .expect("the program starts")
}

fn json(args: &[&str]) -> serde_json::Value {
    let output = plan(&[args, &["--json"]].concat());
    serde_json::from_slice(&output.stdout).expect("JSON on standard output")
}

/// Runs a plan that must fit, and print all parts.
#[track_caller]
fn fits(args: &[&str], parts: &[&str]) {
    let output = plan(args);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{args:?}: {output:?}");
    assert!(output.stderr.is_empty(), "{args:?}: {output:?}");
    for part in parts {
        assert!(text.contains(part), "{args:?}: no {part:?} in: {text}");
    }
}

/// Runs a plan that must fail with one `error:` that contains all parts.
#[track_caller]
fn fails(args: &[&str], parts: &[&str]) {
    let output = plan(args);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{args:?}: {output:?}");
    assert!(text.starts_with("error: "), "{args:?}: {text}");
    assert!(!text.contains("panicked"), "{args:?}: {text}");
    for part in parts {
        assert!(text.contains(part), "{args:?}: no {part:?} in: {text}");
    }
}

#[test]
fn one_guest_is_shown_with_windows_and_room() {
    fits(
        &["--guest", "4G"],
        &[
            "0x100000000-0x17fffffff  2 GiB  16           2 GiB",
            "8 such VMs; one more exceeds bar-size",
            "32 GiB alone",
            "Fits.",
        ],
    );
}

#[test]
fn thirty_guests_are_told_which_bar_would_do() {
    let parts = [
        "2 of 30 VMs fit",
        "128 more LUT entries of 128 MiB",
        "raise bar-size to 512 GiB, or use 15 such lenders",
    ];
    fails(&["--guest", "30x16G"], &parts);
    let all = ["--guest", "30x16G", "--bar-size", "512G"];
    fits(&all, &["30 such VMs", "480 GiB"]);
}

#[test]
fn json_has_the_figures() {
    let answer = json(&["--guest", "30x16G:q35:1"]);
    assert_eq!(answer["fits"], false);
    let ntb = &answer["ntb"];
    assert_eq!(ntb["vms_that_fit"], 2);
    assert_eq!(ntb["guests"][0]["per_vm"]["lut_entries"], 128);
    assert_eq!(ntb["guests"][0]["limited_by"], "bar-size");
    assert_eq!(ntb["remedy"]["bar_size"], 512u64 << 30);
    assert_eq!(ntb["limits"]["lut-entries"], 256);
}

#[test]
fn sixty_hosts_with_thirty_devices_a_pair() {
    let cluster = ["--nodes", "60", "--devices-per-pair", "30"];
    fits(&cluster, &["1770 pairs", "1800 in the cluster", "1772"]);
    let all_at_once = [&cluster[..], &["--peers", "59"]].concat();
    let parts = ["1772 requester entries", "lend to 1 host at a time"];
    fails(&all_at_once, &parts);
    let windows = [&cluster[..], &["--guest", "4G"]].concat();
    fails(&windows, &["990 LUT entries", "raise bar-size to 256 GiB"]);
    fits(
        &[&windows[..], &["--bar-size", "256G"]].concat(),
        &["Fits."],
    );
    let answer = json(&cluster);
    assert_eq!(answer["cluster"]["one_pair"]["needed"], 32);
    assert_eq!(answer["cluster"]["all_pairs"]["fits"], false);
}

#[test]
fn vfio_has_addresses_instead_of_windows() {
    let small = ["--fabric", "vfio", "--guest", "2x4G:pc:2"];
    fits(&small, &["0xfee00000-0xfeefffff", "16 GiB: VFIO counts"]);
    let narrow = ["--fabric", "vfio", "--guest", "1T", "--iova-bits", "39"];
    fails(&narrow, &["39 bits", "0x7fffffffff", "less RAM"]);
    let reserved = ["--guest", "8G", "--reserved", "0x100000000-0x100000fff"];
    let parts = ["0x100000000-0x27fffffff", "0x100000000-0x100000fff"];
    fails(&reserved, &parts);
}

#[test]
fn a_lenders_configuration_and_every_adapter_can_be_asked_about() {
    let config = std::env::temp_dir().join(format!("farside-plan-{}.toml", std::process::id()));
    std::fs::write(&config, "[fabric]\nbar-size = 268435456\n").expect("written");
    let path = config.display().to_string();
    fails(
        &["--guest", "1G", "--config", &path],
        &["bar-size = 256 MiB", "raise bar-size to 1 GiB"],
    );
    std::fs::remove_file(&config).expect("removed");
    for preset in &farside_planner::PRESETS {
        fits(&["--guest", "2M", "--adapter", preset.name], &[preset.name]);
        fits(&["--adapters"], &[preset.name]);
    }
    fails(
        &["--guest", "1G", "--adapter", "pxh"],
        &["\"pxh\"", "dolphin-pxh830, dolphin-as-delivered, intel"],
    );
    let (guest, other) = (["--guest", "1G"], ["--adapter", "amd", "--config", "x"]);
    fails(
        &[guest, [other[0], other[1]], [other[2], other[3]]].concat(),
        &["cannot be used with"],
    );
}

#[test]
fn a_running_lender_can_be_asked_about_its_adapter() {
    let directory =
        std::env::temp_dir().join(format!("farside-plan-lender-{}", std::process::id()));
    let fabric = farside_fabric::NtbLimits {
        bar_size: 256 << 20,
        per_vm: farside_fabric::VmShare {
            lut_entries: Some(128),
            requester_entries: Some(1),
        },
        ..Default::default()
    };
    let lender = farside_lender::Lender::start(farside_lender::config::Config {
        name: "rack1".parse().unwrap(),
        socket: directory.join("lender.sock"),
        fabric,
        device: vec![farside_lender::config::DeviceConfig {
            id: "dma0".parse().unwrap(),
            source: farside_lender::config::Model::dma_test().into(),
            borrowers: Vec::new(),
        }],
        ..Default::default()
    })
    .expect("a lender starts");
    let stop = lender.stop_handle();
    let running = std::thread::spawn(move || lender.run());
    let address = directory.join("lender.sock").display().to_string();
    fails(
        &["--guest", "1G", "--lender", &address],
        &["bar-size = 256 MiB", "raise bar-size to 1 GiB"],
    );
    fits(
        &["--guest", "64M", "--lender", &address],
        &[
            "lender rack1",
            "at most 128 for one VM",
            "at most 1 for one VM",
        ],
    );
    fails(
        &["--guest", "200M", "--lender", &address],
        &["the share of a VM is 128 (per-vm.lut-entries); raise that share to 200"],
    );
    fails(
        &["--guest", "64M:q35:2", "--lender", &address],
        &["the share of a VM is 1 (per-vm.requester-entries); raise that share to 2"],
    );
    stop.raise();
    running.join().expect("no panic").expect("a clean end");
    std::fs::remove_dir_all(&directory).expect("removed");
}

#[test]
fn what_cannot_be_is_refused_with_its_numbers() {
    fails(&[], &["--guest 30x16G", "--nodes 60"]);
    fails(&["--guest", "0"], &["0 bytes"]);
    fails(&["--guest", "0x4G"], &["0 VMs of 4 GiB"]);
    fails(&["--guest", "4G:i486"], &["\"i486\"", "q35 or pc"]);
    fails(&["--guest", "1G:q35:0"], &["0 devices"]);
    fails(&["--guest", "1000001"], &["1000001 bytes"]);
    fails(&["--guest", "9999999T"], &["9999999 TiB", "at most"]);
    fails(&["--guest", "99999999999999T"], &["2^64"]);
    fails(
        &["--guest", "4095T"],
        &["33546240 more LUT entries", "48 bits"],
    );
    fails(
        &["--guest", "1G", "--bar-size", "3G"],
        &["bar-size = 3221225472", "power of two"],
    );
    fails(
        &["--guest", "1G", "--lut-entries", "0"],
        &["lut-entries = 0"],
    );
    fails(&["--guest", "1G", "--iova-bits", "7"], &["iova-bits = 7"]);
    fails(
        &["--guest", "1G", "--reserved", "5-1"],
        &["\"5-1\"", "first and last"],
    );
    fails(&["--nodes", "1"], &["nodes = 1", "at least 2"]);
    fails(
        &["--nodes", "4", "--peers", "4"],
        &["peers = 4", "from 1 to 3"],
    );
    fails(
        &["--nodes", "4", "--fabric", "vfio"],
        &["use only one of them"],
    );
    let huge = [
        "--nodes",
        "4294967295",
        "--peers",
        "4294967294",
        "--devices-per-pair",
        "4294967295",
    ];
    fails(
        &huge,
        &["18446744060824649732 requester entries", "limit is 32"],
    );
}
