//! Two functions and a model, of which each reaches the memory of another one's BAR.

use anyhow::{Context, Result, ensure};
use farside_testbed::{IommufdModules, Nested, kernel_view::LiveMappings};

use super::{
    Set,
    facts::PeerFacts,
    host::{Host, socket},
    play::{KILL_WORKERS, LONG, VM, kill_backend},
    sharing::unbind,
    stage, start_with_fio,
};
use crate::{BOOT, MIB, SHORT, shared_ram};

/// Serial numbers of the disks, and ids of the devices: a function with a controller memory buffer, one without, and a model
/// with one.
const DISKS: [&str; 3] = ["first", "second", "model"];
/// Addresses of the functions in the host.
const FUNCTIONS: [&str; 2] = ["0000:00:04.0", "0000:00:05.0"];
/// The BAR of QEMU's NVMe device that has the buffer.
const BUFFER_BAR: usize = 2;
/// Bytes of each buffer.
const BUFFER: u64 = 16 * MIB;
const GUEST_RAM: u64 = 384 * MIB;

/// The disk, and the one whose buffer has the data of its I/O.
const TRANSFERS: [(&str, &str); 4] = [
    ("second", "first"),
    ("model", "first"),
    ("second", "model"),
    ("first", "model"),
];

/// Linux allows peer to peer between functions below AMD's host bridges since Zen (family 17h).
const ZEN: &str = "max,la57=off,erms=off,fsrm=off,family=25";

pub(super) fn peers(set: &Set<'_>, iommufd: Option<&IommufdModules>) -> Result<PeerFacts> {
    let mut args = Vec::new();
    for (name, more) in [("first", ",addr=4,cmb_size_mb=16"), ("second", ",addr=5")] {
        let image = stage::image(set, &format!("{name}.img"))?;
        args.extend([
            "-drive".to_owned(),
            format!("if=none,id={name},format=raw,file={}", image.display()),
            "-device".to_owned(),
            format!("nvme,drive={name},serial={name}{more}"),
        ]);
    }
    let mut facts = PeerFacts::default();
    (set.tell)("booting the host");
    let mut host = set.testbed.host_vm("host");
    if let Some(modules) = iommufd {
        host = host.iommufd(modules);
    }
    let host = Host::launch(host.args(args), set.programs)?;
    let played = play(set, &host, &mut facts);
    played.map_err(|error| error.context(host.story()))?;
    host.shutdown()?;
    Ok(facts)
}

fn play(set: &Set<'_>, host: &Host, facts: &mut PeerFacts) -> Result<()> {
    host.exec_ok("truncate -s 64M /tmp/model.img", SHORT)?;
    let [first, second] = FUNCTIONS;
    let lender = host.lend(&format!(
        "--name rack1 --vfio first={first} --vfio second={second} --nvme model=/tmp/model.img,cmb=16M"
    ))?;
    let backend = host.serve(VM, "first", "--device second --device model --keeper")?;
    let buffer = host.bar(first, BUFFER_BAR)?;
    ensure!(buffer.end - buffer.start == BUFFER, "{buffer:?}");
    host.trace_iommu()?;
    // The kernel's, of all domains together, where the buffer is concerned.
    let buffer_mapped = || {
        let mapped = LiveMappings::after(&host.iommu_trace()?);
        let of_buffer = mapped.iter().filter(|it| buffer.contains(&it.paddr));
        anyhow::Ok(of_buffer.map(|it| it.len).sum::<u64>())
    };
    // The lender's, of each device.
    let mapped = || {
        let bytes = DISKS.map(|disk| Ok((disk, host.lent(disk)?.bytes_mapped)));
        bytes.into_iter().collect::<Result<_>>()
    };
    (set.tell)("starting a guest with two functions and a model");
    let devices = DISKS.map(|disk| socket(VM, disk));
    let guest = host.guest(VM).memory(GUEST_RAM).args(["-cpu", ZEN]);
    let guest = devices
        .iter()
        .fold(guest, |guest, socket| guest.vfio_user(socket));
    let guest = start_with_fio(host, guest)?;
    guest.exec_ok("modprobe nvme", LONG)?;
    let disks = Disks::find(&guest)?;
    let ram = shared_ram(guest.qmp())?;
    facts.guest_ram_bytes = ram.iter().map(|(_, len)| len).sum();
    facts.buffer_bytes = BUFFER;
    facts.buffer_bytes_mapped = buffer_mapped()?;
    facts.bytes_mapped = mapped()?;
    (set.tell)("each transfers data to and from the buffer of another one");
    for (disk, buffer) in TRANSFERS {
        disks.transfer(disk, buffer)?;
        facts.transfers.insert((disk, buffer));
    }
    (set.tell)("backend and workers are killed");
    host.exec_ok(&format!("{KILL_WORKERS}; {}", kill_backend(VM)), SHORT)?;
    for (disk, buffer) in TRANSFERS {
        disks.transfer(disk, buffer)?;
        facts.transfers_after_kills.insert((disk, buffer));
    }
    facts.buffer_bytes_after_kills = buffer_mapped()?;
    facts.bytes_after_kills = mapped()?;
    (set.tell)("the guest resets the function with the buffer");
    let reset = format!(
        "echo 1 >/sys/class/nvme/{}/device/reset",
        disks.controller("first")?
    );
    guest.exec_ok(&reset, LONG)?;
    for disk in ["second", "model"] {
        disks.transfer(disk, "first")?;
        facts.transfers_after_reset.insert((disk, "first"));
    }
    for disk in DISKS {
        facts.faults += host.lent(disk)?.fault_total;
    }
    (set.tell)("the guest releases them");
    for disk in ["second", "model", "first"] {
        unbind(&guest, disks.controller(disk)?)?;
    }
    facts.bytes_of_none = mapped()?;
    facts.buffer_bytes_of_none = buffer_mapped()?;
    let ended = guest.shutdown(SHORT)?;
    ensure!(ended.success(), "QEMU in the host: {ended}");
    for disk in DISKS {
        host.wait_returned(disk)?;
    }
    backend.stop()?;
    lender.stop()
}

/// The disks in the guest.
struct Disks<'a> {
    guest: &'a Nested<'a>,
    /// Each disk's controller.
    controllers: Vec<(&'static str, String)>,
}

impl<'a> Disks<'a> {
    fn find(guest: &'a Nested<'a>) -> Result<Self> {
        let mut controllers = Vec::new();
        for serial in DISKS {
            let find = format!(
                "for try in $(seq 600); do
                    grep -l -x -w '{serial} *' /sys/block/nvme*/device/serial && break; sleep 0.1
                done"
            );
            let found = guest.exec_ok(&find, LONG)?;
            let block = found.split('/').nth(3).context("no disk")?;
            let controller = block.strip_suffix("n1").context("no namespace")?;
            controllers.push((serial, controller.to_owned()));
        }
        Ok(Self { guest, controllers })
    }

    fn controller(&self, disk: &str) -> Result<&str> {
        let mut all = self.controllers.iter();
        let found = all.find(|(serial, _)| *serial == disk);
        found.map(|(_, name)| name.as_str()).context("no disk")
    }

    /// Writes to a disk and reads from it, with the data in the buffer of another one, where the CPU makes and checks it.
    fn transfer(&self, disk: &str, buffer: &str) -> Result<()> {
        let (disk, buffer) = (self.controller(disk)?, self.controller(buffer)?);
        let job = format!(
            "fio --output-format=terse --name=p2p --filename=/dev/{disk}n1 --direct=1 --ioengine=libaio \
             --mem=mmapshared:/sys/class/nvme/{buffer}/device/p2pmem/allocate --rw=write --bs=64k \
             --size=1M --iodepth=2 --verify=crc32c --verify_fatal=1 --do_verify=1"
        );
        self.guest
            .exec_ok(&job, 2 * BOOT)
            .with_context(|| format!("{disk} with the buffer of {buffer}"))
            .map(drop)
    }
}
