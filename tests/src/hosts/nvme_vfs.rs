//! Virtual functions of an NVMe controller, which are its secondary controllers, lent to a guest.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use farside_testbed::Nested;

use super::{
    Set,
    host::{Host, socket},
    play::{GUEST_RAM, IO, LONG, VM},
    scripted::Scripted,
    sharing::unbind,
    stage,
    with_programs::{start_with_fio, unpack},
};
use crate::{BOOT, SHORT, sha256, sha256_of};

/// The physical function, behind the root port, and its first virtual function.
const PF: &str = "0000:01:00.0";
const VF: &str = "0000:01:00.1";
/// The virtual functions that are lent: id, controller, and the namespace that this one alone has.
const DEVICES: [(&str, u32, u32); 2] = [("vf-0", 1, 2), ("vf-1", 2, 1)];
/// The host's own namespace.
const OWN: u32 = 3;
/// Flexible queues, of which a virtual function may have three.
const QUEUES: u32 = 12;

/// What `farside lend` gets for so many virtual functions.
fn lend(count: u32) -> String {
    format!("--name rack1 --vfs {PF}={count} --vfio vf=vfs-of:{PF}")
}

pub(super) fn nvme_vfs(set: &Set<'_>) -> Result<()> {
    let images = ["first.img", "second.img", "own.img"].map(|name| stage::image(set, name));
    let images = images.into_iter().collect::<Result<Vec<PathBuf>>>()?;
    let mut args = vec![
        "-device".to_owned(),
        "pcie-root-port,id=root-port,chassis=1,addr=5".to_owned(),
        "-device".to_owned(),
        "nvme-subsys,id=subsystem".to_owned(),
        "-device".to_owned(),
        format!(
            "nvme,id=pf,bus=root-port,subsys=subsystem,serial=farside,max_ioqpairs=16,msix_qsize=17,\
             sriov_max_vfs=4,sriov_vq_flexible={QUEUES},sriov_vi_flexible=8"
        ),
    ];
    for (n, image) in (1..).zip(&images) {
        // The host's own is not attached to the virtual functions, as one that is shared would be.
        let attached = match n {
            OWN => "shared=off",
            _ => "detached=on",
        };
        args.extend([
            "-drive".to_owned(),
            format!("if=none,id=n{n},format=raw,file={}", image.display()),
            "-device".to_owned(),
            format!("nvme-ns,bus=pf,drive=n{n},nsid={n},{attached}"),
        ]);
    }
    (set.tell)("booting the host");
    let host = Host::launch(set.testbed.host_vm("host").args(args), set.programs)?;
    let played = refusals(set, &host).and_then(|()| play(set, &host, &images));
    played.map_err(|error| error.context(host.story()))?;
    host.shutdown()
}

/// What cannot be lent is told with the remedy, and leaves the controller as it was.
fn refusals(set: &Set<'_>, host: &Host) -> Result<()> {
    (set.tell)("virtual functions that cannot be used are refused");
    host.exec_ok("modprobe nvme", SHORT)?;
    host.wait_path("/dev/nvme0", SHORT)?;
    refused(host, &lend(5), &[PF, "1 to 4", "5"])?;
    // The controller keeps all but three of the queues for itself.
    let own = QUEUES - 3;
    let release = format!(
        "nvme virt-mgmt /dev/nvme0 -c 0 -r 0 -a 1 -n 0; echo 1 >/sys/bus/pci/devices/{PF}/reset"
    );
    host.exec_ok(&release.replace("-n 0", &format!("-n {own}")), SHORT)?;
    let kept = release.replace("-n 0", &format!("-n {}", own - 1));
    let remedy = format!(
        "release 1 of the {own} of {PF} itself, which resets it and its virtual functions: `{kept}`"
    );
    let free = format!("need 4 flexible queue resources, but 3 of {QUEUES} are free");
    refused(host, &lend(2), &[PF, &free, &remedy])?;
    host.exec_ok(&format!("set -e; {release}"), SHORT)?;
    // Created by hand.
    let create = format!(
        "set -e; cd /sys/bus/pci/devices/{PF}; echo 0 >sriov_drivers_autoprobe; echo 1 >sriov_numvfs"
    );
    host.exec_ok(&create, SHORT)?;
    let words = [VF, "secondary controller 1", PF, "offline", "--vfs"];
    refused(host, &format!("--vfio disk0={VF}"), &words)?;
    let remove = format!("echo 0 >/sys/bus/pci/devices/{PF}/sriov_numvfs");
    host.exec_ok(&remove, SHORT).map(drop)
}

/// `farside lend` fails with these words, and changes neither drivers, functions nor controllers.
fn refused(host: &Host, args: &str, words: &[&str]) -> Result<()> {
    let look = || {
        let all = format!(
            "cd /sys/bus/pci/devices; readlink */driver; cat {PF}/sriov_numvfs
            nvme list-secondary /dev/nvme0; nvme primary-ctrl-caps /dev/nvme0"
        );
        host.exec_ok(&all, SHORT)
    };
    let before = look()?;
    let output = host.exec(&format!("farside lend {args}"), SHORT)?;
    ensure!(output.code == Some(1), "farside lend {args}: {output}");
    for word in words {
        ensure!(output.stderr.contains(word), "no {word:?} in: {output}");
    }
    let after = look()?;
    ensure!(before == after, "before:\n{before}\nafter:\n{after}");
    Ok(())
}

fn play(set: &Set<'_>, host: &Host, images: &[PathBuf]) -> Result<()> {
    let lender = host.lend(&lend(2))?;
    for (_, controller, namespace) in DEVICES {
        let attach = format!("nvme attach-ns /dev/nvme0 -n {namespace} -c {controller}");
        host.exec_ok(&attach, SHORT)?;
    }
    let [(first, ..), (second, ..)] = DEVICES;
    let backend = host.serve(VM, first, &format!("--device {second}"))?;
    (set.tell)("starting a guest with two virtual functions");
    let guest = host.guest(VM).memory(GUEST_RAM);
    let guest = DEVICES.iter().fold(guest, |guest, (device, ..)| {
        guest.vfio_user(&socket(VM, device))
    });
    let guest = start_with_fio(host, guest)?;
    guest.exec_ok("modprobe nvme", LONG)?;
    (set.tell)("the guest writes to both");
    fio(&guest, "")?;
    for (device, ..) in DEVICES {
        let lent = host.lent(device)?;
        ensure!(lent.bus_master && lent.fault_total == 0, "{lent:?}");
    }
    let written = sums(&guest)?;
    ensure!(written[0] != written[1], "one namespace: {written:?}");
    (set.tell)("the guest releases one of them, and takes it again");
    let disks = || guest.exec_ok("ls /dev/nvme*n*", SHORT);
    ensure!(disks()?.lines().count() == 2, "{}", disks()?);
    unbind(&guest, "nvme1")?;
    ensure!(disks()?.lines().count() == 1, "{}", disks()?);
    let bind = "cd /sys/bus/pci/devices; for device in *; do
            [ $(cat $device/class) != 0x010802 ] || [ -e $device/driver ] || echo $device
        done >/sys/bus/pci/drivers/nvme/bind";
    guest.exec_ok(bind, LONG)?;
    fio(&guest, "--verify_only")?;
    (set.tell)("the guest reboots");
    guest.reboot(BOOT)?;
    unpack(&guest, &["/usr/bin/fio"])?;
    guest.exec_ok("modprobe nvme", LONG)?;
    fio(&guest, "--verify_only")?;
    let ended = guest.shutdown(SHORT)?;
    ensure!(ended.success(), "QEMU in the host: {ended}");
    let has = |namespace: u32| sha256_of(&images[namespace as usize - 1], 0, IO);
    for ((device, _, namespace), sum) in DEVICES.iter().zip(written) {
        host.wait_returned(device)?;
        let has = has(*namespace)?;
        ensure!(has == sum, "{device}: {has}, not {sum}");
    }
    let own = has(OWN)?;
    ensure!(
        own == sha256(&vec![0; IO as usize]),
        "the host's own: {own}"
    );
    backend.stop()?;
    (set.tell)("another VM has one of them");
    let backend = host.serve("other", second, "")?;
    let mut vmm = Scripted::start(host, &socket("other", second), "--ram 64M --low 32M")?;
    vmm.step("place")?;
    vmm.step("bme")?;
    vmm.step("io 1M")?;
    vmm.quit()?;
    host.wait_returned(second)?;
    backend.stop()?;
    lender.stop()?;
    let online = "nvme list-secondary /dev/nvme0 | grep -c Online";
    (set.tell)(
        "the host resets its controller while they are lent, and the lender is started again",
    );
    let lender = host.lend(&lend(2))?;
    let reset = format!("echo 1 >/sys/class/nvme/nvme0/reset_controller; {online}; true");
    let after = host.exec_ok(&reset, SHORT)?;
    ensure!(after == "0\n", "online after a reset: {after}");
    lender.stop()?;
    let lender = host.lend(&lend(2))?;
    let again = host.exec_ok(online, SHORT)?;
    ensure!(again == "2\n", "online again: {again}");
    lender.stop()?;
    let left = format!(
        "cat /sys/bus/pci/devices/{PF}/sriov_numvfs; {online}
        set -- /dev/nvme0n*; dd if=$1 of=/dev/null bs=1M count=1 iflag=direct 2>/dev/null && echo read"
    );
    let left = host.exec_ok(&left, SHORT)?;
    ensure!(left == "0\n0\nread\n", "left: {left}");
    Ok(())
}

/// The guest's disks, by [`DEVICES`], once it has them. Both are namespaces of one subsystem, which Linux numbers as it
/// finds them.
fn disks(guest: &Nested<'_>) -> Result<Vec<String>> {
    let disk = |(.., namespace): &(&str, u32, u32)| {
        let find = format!(
            "for try in $(seq 600); do
                for disk in /sys/block/nvme*; do
                    [ \"$(cat $disk/nsid)\" != {namespace} ] || [ ! -b /dev/${{disk##*/}} ] ||
                        {{ echo /dev/${{disk##*/}}; exit; }}
                done; sleep 0.1
            done; exit 1"
        );
        let disk = guest.exec_ok(&find, LONG);
        let disk = disk.with_context(|| format!("namespace {namespace}"))?;
        Ok(disk.trim().to_owned())
    };
    DEVICES.iter().map(disk).collect()
}

/// Runs fio on both disks at once, which writes and verifies, or only verifies.
fn fio(guest: &Nested<'_>, mode: &str) -> Result<()> {
    let jobs: String = disks(guest)?
        .iter()
        .zip(DEVICES)
        .map(|(disk, (device, ..))| format!(" --name={device} --filename={disk}"))
        .collect();
    let run = format!(
        "cd /tmp; fio --rw=write --bs=16k --size={IO} --direct=1 --ioengine=libaio --iodepth=8 --verify=crc32c \
        --verify_fatal=1 --verify_state_save=0 {mode}{jobs}"
    );
    guest.exec_ok(&run, LONG).map(drop)
}

/// The checksums of what the disks have.
fn sums(guest: &Nested<'_>) -> Result<Vec<String>> {
    let sum = |disk: String| {
        let read = format!(
            "dd if={disk} bs=256k count={} iflag=direct 2>/dev/null | sha256sum",
            IO / (256 << 10)
        );
        let sum = guest.exec_ok(&read, LONG)?;
        Ok(sum.trim_end_matches(['-', ' ', '\n']).to_owned())
    };
    disks(guest)?.into_iter().map(sum).collect()
}
