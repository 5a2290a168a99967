//! The stages: hosts, and the product's daemons in them.

use std::{fs::File, path::Path, time::Instant};

use anyhow::{Context, Result, ensure};

use super::{
    Set,
    facts::{Facts, seconds},
    host::Host,
    play::{self, DEVICE, DRIVE, GUEST_RAM, NTB, Stage, VM},
};
use crate::{MIB, SHORT};

/// Addresses on their network of the hosts a and b that an NTB connects.
pub(super) const ADDRESSES: [&str; 2] = ["10.0.0.1", "10.0.0.2"];

/// Size of the NVMe namespace; its image is sparse.
const DISK: u64 = 64 * MIB;

/// QEMU's options for an NVMe device with `image`, at [`DRIVE`].
pub(super) fn drive(image: &Path) -> [String; 4] {
    [
        "-drive".to_owned(),
        format!("if=none,id=disk,format=raw,file={}", image.display()),
        "-device".to_owned(),
        "nvme,drive=disk,serial=farside,addr=4".to_owned(),
    ]
}

pub(super) fn image(set: &Set<'_>, name: &str) -> Result<std::path::PathBuf> {
    let path = set.cluster.directory().join(name);
    File::create(&path)
        .and_then(|file| file.set_len(DISK))
        .with_context(|| format!("making {}", path.display()))?;
    Ok(path)
}

pub(super) fn same_host(set: &Set<'_>) -> Result<Facts> {
    let started = Instant::now();
    let mut facts = Facts::default();
    let image = image(set, "same-host.img")?;
    (set.tell)("booting the host");
    let builder = set.testbed.host_vm("host").args(drive(&image));
    let host = Host::launch(builder, set.programs)?;
    let played = (|| {
        host.reserve_huge_pages(GUEST_RAM)?;
        let lender = host.lend(&format!("--name rack1 --vfio {DEVICE}={DRIVE}"))?;
        let backend = host.serve(VM, DEVICE, "")?;
        let stage = Stage {
            borrower: &host,
            lender: &host,
            ntb: false,
            huge_pages: true,
            image: &image,
        };
        play::guest_uses_drive(&stage, set, &mut facts)?;
        play::rogue(&stage, set, &mut facts)?;
        backend.stop()?;
        lender.stop()
    })();
    played.map_err(|error: anyhow::Error| error.context(host.story()))?;
    host.shutdown()?;
    facts.wall_s = seconds(started.elapsed());
    Ok(facts)
}

pub(super) fn two_hosts(set: &Set<'_>) -> Result<Facts> {
    let started = Instant::now();
    let mut facts = Facts::default();
    let image = image(set, "two-hosts.img")?;
    across_ntb(set, &drive(&image), |a, b| {
        let lender = b.lend(&format!(
            "--name b --listen tls:10.0.0.2:4000 --borrower host=a --vfio {DEVICE}={DRIVE} --ntb {NTB}"
        ))?;
        let files = format!(
            "set -e; cd /etc/farside; mkdir vm; echo 'ntb = true' >vm/{VM}.toml
            echo 'lenders = [\"tls:10.0.0.2:4000\"]' >host.toml
            echo 'ntb = \"{NTB}\"' >>host.toml"
        );
        a.exec_ok(&files, SHORT)?;
        let config = format!("--config /etc/farside/vm/{VM}.toml");
        let backend = a.serve(VM, DEVICE, &config)?;
        let stage = Stage {
            borrower: a,
            lender: b,
            ntb: true,
            huge_pages: false,
            image: &image,
        };
        play::guest_uses_drive(&stage, set, &mut facts)?;
        play::rogue(&stage, set, &mut facts)?;
        backend.stop()?;
        lender.stop()
    })?;
    facts.wall_s = seconds(started.elapsed());
    Ok(facts)
}

/// Plays a scene with the hosts `a` and `b`, which an NTB and a network connect; `b` has the devices
/// of `drives`.
pub(super) fn across_ntb(
    set: &Set<'_>,
    drives: &[String],
    scene: impl FnOnce(&Host, &Host) -> Result<()>,
) -> Result<()> {
    let at = |name: &str| set.cluster.directory().join(name).display().to_string();
    (set.tell)("starting the NTB between the hosts");
    let ports = [format!("A={}", at("a.sock")), format!("B={}", at("b.sock"))];
    let mut ntb = set.cluster.start(
        "the NTB",
        &["ntb", "--port", &ports[0], "--port", &ports[1]],
    )?;
    for name in ["a.sock", "b.sock"] {
        await_path(&set.cluster.directory().join(name))?;
    }
    (set.tell)("booting both hosts");
    let host = |name: &str, server: &str, mac: u8| {
        let endpoint = serde_json::json!({
            "driver": "vfio-user-pci",
            "socket": {"type": "unix", "path": at(&format!("{name}.sock"))},
            "addr": NTB.rsplit(':').next(),
            "x-msg-timeout": 120_000,
        });
        set.testbed
            .host_vm(name)
            .args(["-device".to_owned(), endpoint.to_string()])
            .args(network_card(set, server, mac))
    };
    let b = Host::launch(host("b", "on", 2).args(drives), set.programs)?;
    let a = Host::launch(host("a", "off", 1), set.programs)?;
    join(&a, &b)?;
    certify(&a, &b)?;
    let played = scene(&a, &b);
    played.map_err(|error: anyhow::Error| error.context(format!("{}{}", a.story(), b.story())))?;
    a.shutdown()?;
    b.shutdown()?;
    ntb.terminate()?;
    let ended = ntb.wait_exit(SHORT)?;
    ensure!(ended.success(), "farside ntb ended badly: {ended}");
    Ok(())
}

/// Sets the network of `a` and `b` up.
pub(super) fn join(a: &Host, b: &Host) -> Result<()> {
    set_up_network(a, ADDRESSES[0])?;
    set_up_network(b, ADDRESSES[1])?;
    reaches(a, ADDRESSES[1])
}

/// Gives a host its address.
pub(super) fn set_up_network(host: &Host, address: &str) -> Result<()> {
    let up = format!(
        "set -e; modprobe virtio_net; ip addr add {address}/24 dev eth0
        ip link set lo up; ip link set eth0 up"
    );
    host.exec_ok(&up, SHORT).map(drop)
}

/// Waits until a host reaches an address.
pub(super) fn reaches(host: &Host, address: &str) -> Result<()> {
    let ping = host.exec_ok(&format!("ping -c 1 -W 30 {address}"), SHORT);
    ping.map(drop).context("the hosts' network")
}

/// QEMU's options for the network between two hosts: its `server` starts first.
pub(super) fn network_card(set: &Set<'_>, server: &str, mac: u8) -> [String; 4] {
    let [net, port] = wire(set, "net", server, "network");
    let [device, card] = card("net", mac);
    [net, port, device, card]
}

/// QEMU's options for the network of more than two hosts: of the one that starts first and has
/// the wires to the `others`, which have a [`spoke`] each.
pub(super) fn hub(set: &Set<'_>, mac: u8, others: &[&str]) -> Vec<String> {
    let mut args = vec!["-netdev".to_owned(), "hubport,id=net,hubid=0".to_owned()];
    for name in others {
        args.extend(wire(set, name, "on", name));
        let port = format!("hubport,id=port-{name},hubid=0,netdev={name}");
        args.extend(["-netdev".to_owned(), port]);
    }
    args.extend(card("net", mac));
    args
}

/// QEMU's options for the network of the host `name`, which the [`hub`] has a wire to.
pub(super) fn spoke(set: &Set<'_>, mac: u8, name: &str) -> Vec<String> {
    [wire(set, "net", "off", name), card("net", mac)].concat()
}

fn wire(set: &Set<'_>, id: &str, server: &str, socket: &str) -> [String; 2] {
    let path = set.cluster.directory().join(format!("{socket}.sock"));
    let path = path.display();
    let wire = format!("stream,id={id},server={server},addr.type=unix,addr.path={path}");
    ["-netdev".to_owned(), wire]
}

fn card(netdev: &str, mac: u8) -> [String; 2] {
    let card = format!("virtio-net-pci,netdev={netdev},romfile=,mac=52:54:00:00:00:{mac:02x}");
    ["-device".to_owned(), card]
}

/// Gives the borrower `a` and the lender `b` certificates of one CA.
pub(super) fn certify(a: &Host, b: &Host) -> Result<()> {
    const PKI: &str = "/etc/farside/pki";
    let issue = format!(
        "set -e; farside pki init; farside pki issue b --address 10.0.0.2 --output {PKI}
        farside pki issue a"
    );
    b.exec_ok(&issue, SHORT)?;
    for file in ["ca-cert.pem", "client-cert.pem", "client-key.pem"] {
        let pem = b.exec_ok(&format!("cat {PKI}/a/{file}"), SHORT)?;
        let write = format!("umask 077; mkdir -p {PKI}; cat >{PKI}/{file} <<'END'\n{pem}\nEND");
        a.exec_ok(&write, SHORT)?;
    }
    Ok(())
}

/// Waits until a path exists.
fn await_path(path: &Path) -> Result<()> {
    let deadline = Instant::now() + SHORT;
    while !path.exists() {
        ensure!(
            Instant::now() < deadline,
            "{} is not there after {SHORT:?}",
            path.display()
        );
        std::thread::sleep(std::time::Duration::from_millis(25));
    }
    Ok(())
}
