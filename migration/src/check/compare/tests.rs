use super::{
    super::{Level, Memory},
    *,
};

fn host(version: (u64, u64), machine: &str) -> Facts {
    Facts {
        qemu: Some(Ok(Qemu {
            binary: "qemu".into(),
            version,
            machine: machine.into(),
            machines: ["pc-q35-10.1", machine].map(String::from).into(),
        })),
        accelerator: Accelerator::Kvm,
        cpu: "Brand X".into(),
        flags: ["sse", "avx"].map(String::from).into(),
        memory: Memory {
            huge_page: None,
            free: 8 << 30,
        },
        disks: None,
        blockers: Vec::new(),
    }
}

const WANTED: Wanted = Wanted {
    live: true,
    memory: Some(4 << 30),
    host_cpu: true,
};

/// The findings that are not well.
fn against(wanted: &Wanted, there: &Facts, here: &Facts) -> Vec<(Level, String, String)> {
    let findings = compare(wanted, there, here).into_iter();
    let bad = findings.filter(|finding| finding.level != Level::Ok);
    bad.map(|finding| {
        let text = format!("{}; {}", finding.what, finding.why);
        (finding.level, finding.check, text)
    })
    .collect()
}

/// There is one, of that check, and it stops a live migration only.
fn stops_live(there: &Facts, here: &Facts, check: &str, words: &[&str]) {
    for live in [true, false] {
        let wanted = Wanted { live, ..WANTED };
        let bad = against(&wanted, there, here);
        let [(level, found, text)] = &bad[..] else {
            panic!("{bad:?}");
        };
        assert_eq!((*level == Level::Problem, found.as_str()), (live, check));
        for word in words {
            assert!(text.contains(word), "no {word:?} in {text}");
        }
    }
}

#[test]
fn equal_hosts_will_do() {
    let host = host((11, 1), "pc-q35-11.1");
    assert_eq!(against(&WANTED, &host, &host), []);
}

#[test]
fn a_running_guest_does_not_go_to_an_older_qemu_nor_to_another_machine() {
    let new = host((11, 1), "pc-q35-11.1");
    let pinned = host((11, 1), "pc-q35-10.1");
    let old = host((10, 1), "pc-q35-10.1");
    stops_live(
        &pinned,
        &old,
        "QEMU",
        &["QEMU 10.1", "QEMU 11.1", "upgrade"],
    );
    stops_live(&pinned, &new, "machine", &["pc-q35-10.1", "qemu-args"]);
    let bad = against(&WANTED, &new, &old);
    assert_eq!(bad.len(), 2, "{bad:?}");
    assert!(bad[1].2.contains("does not support"), "{bad:?}");
    let newer = against(&WANTED, &old, &pinned);
    assert!(matches!(&newer[..], [(Level::Note, ..)]), "{newer:?}");
}

#[test]
fn a_cpu_that_lacks_a_feature_is_named_with_it() {
    let there = host((11, 1), "pc-q35-11.1");
    let mut here = there.clone();
    here.flags.remove("avx");
    stops_live(&there, &here, "CPU", &["lacks", "avx", "-cpu"]);
    let named = Wanted {
        host_cpu: false,
        ..WANTED
    };
    let bad = against(&named, &there, &here);
    assert!(matches!(&bad[..], [(Level::Note, ..)]), "{bad:?}");
}

#[test]
fn kvm_and_emulation_do_not_mix() {
    let kvm = host((11, 1), "pc-q35-11.1");
    let mut tcg = kvm.clone();
    tcg.accelerator = Accelerator::Tcg;
    stops_live(&kvm, &tcg, "CPU", &["emulated", "accel"]);
    stops_live(&tcg, &kvm, "CPU", &["emulated", "accel"]);
    let mut none = kvm.clone();
    none.accelerator = Accelerator::Missing;
    let bad = against(
        &Wanted {
            live: false,
            ..WANTED
        },
        &kvm,
        &none,
    );
    assert!(matches!(&bad[..], [(Level::Problem, ..)]), "{bad:?}");
}

#[test]
fn a_host_without_room_or_qemu_says_so() {
    let there = host((11, 1), "pc-q35-11.1");
    let mut here = there.clone();
    here.memory.free = 1 << 30;
    let bad = against(&WANTED, &there, &here);
    assert!(
        bad[0].2.contains("4 GiB") && bad[0].2.contains("1 GiB"),
        "{bad:?}"
    );
    here.memory.huge_page = Some(2 << 20);
    let bad = against(&WANTED, &there, &here);
    assert!(bad[0].2.contains("write 2048 to"), "{bad:?}");
    here.memory.free = 4 << 30;
    here.qemu = Some(Err("QEMU 9.0 is too old".into()));
    let bad = against(&WANTED, &there, &here);
    assert!(
        matches!(&bad[..], [(Level::Problem, check, _)] if check == "QEMU"),
        "{bad:?}"
    );
}
