//! Domains that cannot start, and the hook's handling of invalid input.

use anyhow::{Result, ensure};
use farside_testbed::AgentPort;

use crate::{
    domain::{Domain, plain_xml},
    stage::Stage,
};

/// Size of the NVMe namespace.
const DRIVE: u64 = 64 << 20;

pub fn a_domain_whose_lender_is_away_does_not_start_and_says_why(stage: &Stage) -> Result<()> {
    let domain = Domain::define(stage, "web1", &["disk0"])?;
    let said = stage.fails(&["virsh", "start", "web1"])?;
    let lender = stage.lender().display().to_string();
    for word in ["domain web1", lender.as_str(), "farside lend"] {
        ensure!(said.contains(word), "no {word:?} in {said}");
    }
    stage.nothing_left_of("web1")?;

    // With a lender that lacks such a device.
    let lender = stage.cluster.lend(&["--dma-test", "dma0"])?;
    let said = stage.fails(&["virsh", "start", "web1"])?;
    for word in ["disk0", "farside devices"] {
        ensure!(said.contains(word), "no {word:?} in {said}");
    }
    stage.nothing_left_of("web1")?;
    drop(lender);

    let (_lender, _) = stage.cluster.lend_disk(DRIVE)?;
    stage.virsh(&["start", "--paused", "web1"])?;
    let borrower = stage.cluster.status()?.lent("disk0")?.borrowed_by;
    ensure!(borrower.as_deref() == Some("web1"), "{borrower:?}");
    domain.destroy()?;
    stage.nothing_left_of("web1")
}

pub fn the_hook_leaves_other_domains_alone(stage: &Stage) -> Result<()> {
    let agent = AgentPort::listen("other", stage.cluster.directory())?;
    let file = stage
        .cluster
        .file("other.xml", &plain_xml("other", &agent)?)?;
    stage.virsh(&["define", &file.display().to_string()])?;
    stage.virsh(&["start", "--paused", "other"])?;
    ensure!(!stage.path("/run/farside").exists());
    ensure!(!stage.path("/var/lib/farside").exists());
    stage.virsh(&["destroy", "other"])?;

    let noise = farside_tests::noise(7, 1 << 20);
    let foreign: [&[u8]; 5] = [
        b"",
        b"<domain><name>other</name>",
        b"<domain/>",
        b"\0\xff\xfe<",
        &noise,
    ];
    for xml in foreign {
        for (operation, sub) in [
            ("prepare", "begin"),
            ("release", "end"),
            ("restore", "begin"),
        ] {
            for name in ["other", "-x", "--help", "../../etc", "a b"] {
                let ended =
                    stage.run_with(&["/etc/libvirt/hooks/qemu", name, operation, sub, "-"], xml)?;
                ensure!(
                    ended.status.success() && ended.stdout.is_empty() && ended.stderr.is_empty(),
                    "{name} {operation}: {ended:?}"
                );
            }
        }
    }
    ensure!(!stage.path("/run/farside").exists());
    Ok(())
}

pub fn the_hook_says_what_is_wrong_with_a_domain_of_ours(stage: &Stage) -> Result<()> {
    let ours = |vm: &str, inner: &str| {
        format!(
            "<domain type='kvm'><name>{vm}</name>
             <metadata><f:vm xmlns:f='urn:farside:libvirt:1'>{inner}</f:vm></metadata>
             <memory unit='GiB'>1</memory><os><type>hvm</type></os></domain>"
        )
    };
    let device = "<f:device id='disk0' port='0'/>";
    let whole = ours("web1", device);
    let half = &whole[..whole.len() - 20];
    for (name, xml, word) in [
        ("web1", half, "not well-formed"),
        (
            "web1",
            &ours("web1", "<f:device id='disk0' port='x'/>"),
            "line 2",
        ),
        ("web2", &whole, "web1"),
        ("../x", &ours("../x", device), "VM name"),
    ] {
        let words = ["/etc/libvirt/hooks/qemu", name, "prepare", "begin", "-"];
        let ended = stage.run_with(&words, xml.as_bytes())?;
        ensure!(
            !ended.status.success() && ended.stdout.is_empty() && ended.stderr.contains(word),
            "no {word:?} in {ended:?}"
        );
    }
    // The end of a domain that never started, and of malformed XML.
    for xml in [half, &whole] {
        let words = ["/etc/libvirt/hooks/qemu", "web1", "release", "end", "-"];
        let ended = stage.run_with(&words, xml.as_bytes())?;
        ensure!(
            ended.status.success() && ended.stderr.is_empty(),
            "{ended:?}"
        );
    }
    // The state of the guest's devices is neither in a file nor transferred with it.
    for (operation, word) in [("restore", "--force-boot"), ("migrate", "farside migrate")] {
        let words = ["/etc/libvirt/hooks/qemu", "web1", operation, "begin", "-"];
        let ended = stage.run_with(&words, whole.as_bytes())?;
        ensure!(
            !ended.status.success() && ended.stdout.is_empty() && ended.stderr.contains(word),
            "no {word:?} in {ended:?}"
        );
    }

    // The hook remains after the binary is removed.
    stage.sh("rm /usr/bin/farside")?;
    for (operation, xml, refused) in [
        ("prepare", whole.as_str(), true),
        ("release", &whole, false),
        ("prepare", "<domain/>", false),
        ("prepare", "", false),
    ] {
        let words = ["/etc/libvirt/hooks/qemu", "web1", operation, "begin", "-"];
        let ended = stage.run_with(&words, xml.as_bytes())?;
        ensure!(
            ended.status.success() != refused
                && ended.stdout.is_empty()
                && ended.stderr.contains("not installed") == refused,
            "{operation} {xml}: {ended:?}"
        );
    }
    Ok(())
}
