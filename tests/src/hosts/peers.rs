//! Two functions and a model, of which each reaches the memory of another one's BAR: of one host, or of two lenders at another
//! one, through an NTB and over a network.

use anyhow::{Context, Result, ensure};
use farside_testbed::{IommufdModules, Nested, kernel_view::LiveMappings};

use super::{
    Set,
    facts::{NtbPeerFacts, PeerFacts},
    host::{Host, socket},
    network::controller,
    play::{KILL_WORKERS, LONG, NTB, VM, kill_backend},
    sharing::unbind,
    stage,
    with_programs::{start_with, unpack},
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
/// Of a guest whose RAM each device may have windows of its own onto, as the firmware remaps it: twice 128 of the NTB's 512 LUT
/// entries.
const NTB_GUEST_RAM: u64 = 256 * MIB;

/// Where the guest moves the buffer: above all that it has.
const ELSEWHERE: u64 = 32 << 30;
/// Programs in the guest.
const PROGRAMS: [&str; 2] = ["/usr/bin/fio", "/usr/bin/setpci"];

/// Bytes of each transfer.
const TRANSFER: u64 = MIB;
/// The same beyond an NTB, where the guest's CPU waits for a round trip for each word that it checks.
const NTB_TRANSFER: u64 = 256 << 10;

/// Loads the NVMe driver.
const DRIVER: &str = "modprobe nvme";
/// The same with queues in RAM: Linux has submission queues in a controller memory buffer, and their doorbells in RAM, which the NTB
/// model does not keep in order (`docs/ntb-model.md`).
const NTB_DRIVER: &str = "modprobe nvme use_cmb_sqes=0";

/// The disk, and the one whose buffer has the data of its I/O.
const TRANSFERS: [(&str, &str); 4] = [
    ("second", "first"),
    ("model", "first"),
    ("second", "model"),
    ("first", "model"),
];

/// Of those, the ones across an NTB: the model, which is here, does not reach the function's buffer beyond it.
const NTB_TRANSFERS: [(&str, &str); 3] =
    [("second", "first"), ("second", "model"), ("first", "model")];

/// QEMU's options for the functions.
fn functions(set: &Set<'_>) -> Result<Vec<String>> {
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
    Ok(args)
}

pub(super) fn peers(set: &Set<'_>, iommufd: Option<&IommufdModules>) -> Result<PeerFacts> {
    let args = functions(set)?;
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
    let buffer_mapped = buffer_mapped(host)?;
    // The lender's, of each device.
    let mapped = || {
        let bytes = DISKS.map(|disk| Ok((disk, host.lent(disk)?.bytes_mapped)));
        bytes.into_iter().collect::<Result<_>>()
    };
    let guest = guest_with_all(set, host, GUEST_RAM)?;
    guest.exec_ok(DRIVER, LONG)?;
    let disks = Disks::find(&guest, TRANSFER)?;
    let ram = shared_ram(guest.qmp())?;
    facts.guest_ram_bytes = ram.iter().map(|(_, len)| len).sum();
    facts.buffer_bytes = BUFFER;
    facts.buffer_bytes_mapped = buffer_mapped(GUEST_RAM)?;
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
    facts.buffer_bytes_after_kills = buffer_mapped(GUEST_RAM)?;
    facts.bytes_after_kills = mapped()?;
    (set.tell)("the guest resets the function with the buffer");
    disks.reset("first")?;
    for disk in ["second", "model"] {
        disks.transfer(disk, "first")?;
        facts.transfers_after_reset.insert((disk, "first"));
    }
    for disk in DISKS {
        facts.faults += host.lent(disk)?.fault_total;
    }
    (set.tell)("the guest moves that buffer while a disk transfers data to it");
    let load = guest.exec_start(&disks.load("second", "first")?, BOOT)?;
    disks.wait_written("second")?;
    let home = disks.place_buffer("first", ELSEWHERE)?;
    facts.buffer_bytes_elsewhere = buffer_mapped(ELSEWHERE)?;
    facts.buffer_bytes_with_elsewhere = buffer_mapped(GUEST_RAM)?;
    facts.faults_at_home = host.wait_faults_in_status("second", 1)?;
    disks.place_buffer("first", home)?;
    let output = load.wait()?;
    ensure!(output.success(), "{output}");
    for disk in ["second", "model"] {
        disks.transfer(disk, "first")?;
        facts.transfers_after_move.insert((disk, "first"));
    }
    (set.tell)("the guest reboots");
    guest.reboot(BOOT)?;
    unpack(&guest, &PROGRAMS)?;
    guest.exec_ok(DRIVER, LONG)?;
    let disks = Disks::find(&guest, TRANSFER)?;
    for (disk, buffer) in TRANSFERS {
        disks.transfer(disk, buffer)?;
        facts.transfers_after_reboot.insert((disk, buffer));
    }
    facts.bytes_after_reboot = mapped()?;
    (set.tell)("the guest releases them");
    for disk in ["second", "model", "first"] {
        unbind(&guest, disks.controller(disk)?)?;
    }
    facts.bytes_of_none = mapped()?;
    facts.buffer_bytes_of_none = buffer_mapped(GUEST_RAM)?;
    let ended = guest.shutdown(SHORT)?;
    ensure!(ended.success(), "QEMU in the host: {ended}");
    for disk in DISKS {
        host.wait_returned(disk)?;
    }
    backend.stop()?;
    lender.stop()
}

/// Starts a guest in `host` with all three.
fn guest_with_all<'a>(set: &Set<'_>, host: &'a Host, ram: u64) -> Result<Nested<'a>> {
    (set.tell)("starting a guest with two functions and a model");
    let devices = DISKS.map(|disk| socket(VM, disk));
    let guest = host.guest(VM).memory(ram).zen();
    let guest = devices
        .iter()
        .fold(guest, |guest, socket| guest.vfio_user(socket));
    start_with(host, guest, &PROGRAMS)
}

/// How many bytes of the first function's buffer are mapped in the domains of `host` from an address on, such as the end of the guest's
/// RAM, above which it has BARs: by the kernel's trace from now on. For an NTB, the buffer is mapped at peer addresses, from the lowest.
fn buffer_mapped(host: &Host) -> Result<impl Fn(u64) -> Result<u64>> {
    let buffer = host.bar(FUNCTIONS[0], BUFFER_BAR)?;
    ensure!(buffer.end - buffer.start == BUFFER, "{buffer:?}");
    host.trace_iommu()?;
    Ok(move |from| {
        let mapped = LiveMappings::after(&host.iommu_trace()?);
        let at_bar = mapped.iter().filter(|it| it.iova >= from);
        let of_buffer = at_bar.filter(|it| buffer.contains(&it.paddr));
        Ok(of_buffer.map(|it| it.len).sum())
    })
}

/// The same across two hosts: a lender of `b` has the functions, which the guest in `a` reaches through an NTB, and another
/// one the model's image, over a network.
pub(super) fn peers_through_ntb(set: &Set<'_>) -> Result<NtbPeerFacts> {
    let mut facts = NtbPeerFacts::default();
    let drives = functions(set)?;
    stage::across_ntb(set, &drives, |a, b| play_through_ntb(set, a, b, &mut facts))?;
    Ok(facts)
}

fn play_through_ntb(set: &Set<'_>, a: &Host, b: &Host, facts: &mut NtbPeerFacts) -> Result<()> {
    let [first, second] = FUNCTIONS;
    b.exec_ok("truncate -s 64M /tmp/model.img", SHORT)?;
    let lender = b.lend(&format!(
        "--name b --listen tls:10.0.0.2:4000 --borrower host=a --ntb {NTB} --vfio first={first} --vfio second={second}"
    ))?;
    let other_lender = b.lend_another(
        "--name b2 --listen tls:10.0.0.2:4001 --borrower host=a --nvme model=/tmp/model.img,cmb=16M",
    )?;
    let args = format!(
        "--device second --device model --lender tls:10.0.0.2:4000 --lender tls:10.0.0.2:4001 --ntb {NTB}"
    );
    let backend = a.serve(VM, "first", &args)?;
    let buffer_mapped = buffer_mapped(b)?;
    let guest = guest_with_all(set, a, NTB_GUEST_RAM)?;
    guest.exec_ok(NTB_DRIVER, LONG)?;
    let disks = Disks::find(&guest, NTB_TRANSFER)?;
    facts.buffer_bytes = BUFFER;
    facts.buffer_bytes_mapped = buffer_mapped(NTB_GUEST_RAM)?;
    (set.tell)("each transfers data to and from the buffer of another one");
    for (disk, buffer) in NTB_TRANSFERS {
        disks.transfer(disk, buffer)?;
        facts.transfers.insert((disk, buffer));
    }
    (set.tell)("the guest resets the function with the buffer");
    disks.reset("first")?;
    disks.transfer("second", "first")?;
    facts.transfers_after_reset.insert(("second", "first"));
    for disk in ["first", "second"] {
        facts.faults += b.lent(disk)?.fault_total;
    }
    facts.faults += controller(a, VM, "model")?.faults.total;
    (set.tell)("the guest releases them");
    unbind(&guest, disks.controller("second")?)?;
    facts.buffer_bytes_of_none = buffer_mapped(NTB_GUEST_RAM)?;
    let ended = guest.shutdown(SHORT)?;
    ensure!(ended.success(), "QEMU in the borrower: {ended}");
    for disk in ["first", "second"] {
        b.wait_returned(disk)?;
    }
    backend.stop()?;
    other_lender.stop()?;
    lender.stop()
}

/// The disks in the guest.
struct Disks<'a> {
    guest: &'a Nested<'a>,
    /// Each disk's controller.
    controllers: Vec<(&'static str, String)>,
    /// Bytes of each transfer.
    transfer: u64,
}

impl<'a> Disks<'a> {
    fn find(guest: &'a Nested<'a>, transfer: u64) -> Result<Self> {
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
        Ok(Self {
            guest,
            controllers,
            transfer,
        })
    }

    fn controller(&self, disk: &str) -> Result<&str> {
        let mut all = self.controllers.iter();
        let found = all.find(|(serial, _)| *serial == disk);
        found.map(|(_, name)| name.as_str()).context("no disk")
    }

    /// Resets the function of a disk, as Linux does for its user.
    fn reset(&self, disk: &str) -> Result<()> {
        let controller = self.controller(disk)?;
        let reset = format!("echo 1 >/sys/class/nvme/{controller}/device/reset");
        self.guest.exec_ok(&reset, LONG).map(drop)
    }

    /// Writes to a disk and reads from it, with the data in the buffer of another one, where the CPU makes and checks it.
    fn transfer(&self, disk: &str, buffer: &str) -> Result<()> {
        let job = format!(
            "{} --size={} --iodepth=2 --verify=crc32c --verify_fatal=1 --do_verify=1",
            self.writes(disk, buffer)?,
            self.transfer
        );
        self.guest
            .exec_ok(&job, 2 * BOOT)
            .with_context(|| format!("{disk} with the buffer of {buffer}"))
            .map(drop)
    }

    /// A command that writes to a disk for a while, with whatever is in the buffer of another one.
    fn load(&self, disk: &str, buffer: &str) -> Result<String> {
        let writes = self.writes(disk, buffer)?;
        Ok(format!(
            "{writes} --size=16M --iodepth=2 --time_based --runtime=20 --zero_buffers"
        ))
    }

    fn writes(&self, disk: &str, buffer: &str) -> Result<String> {
        let (disk, buffer) = (self.controller(disk)?, self.controller(buffer)?);
        Ok(format!(
            "fio --output-format=terse --name=p2p --filename=/dev/{disk}n1 --direct=1 --ioengine=libaio \
             --mem=mmapshared:/sys/class/nvme/{buffer}/device/p2pmem/allocate --rw=write --bs=64k"
        ))
    }

    /// Waits until a disk writes.
    fn wait_written(&self, disk: &str) -> Result<()> {
        let wait = format!(
            "written() {{ set -- $(cat /sys/block/{}n1/stat); echo $5; }}
             before=$(written)
             for try in $(seq 600); do [ $(written) -gt $before ] && exit; sleep 0.1; done; exit 1",
            self.controller(disk)?
        );
        self.guest.exec_ok(&wait, LONG).map(drop)
    }

    /// Has the guest place the 64-bit BAR with the buffer at this address; returns the former one. The lowest four bits are not written.
    fn place_buffer(&self, disk: &str, at: u64) -> Result<u64> {
        let (high, low) = (at >> 32, at as u32);
        let place = format!(
            "function=$(readlink -f /sys/class/nvme/{}/device); function=${{function##*/}}
             setpci -s $function BASE_ADDRESS_3.l BASE_ADDRESS_2.l
             setpci -s $function BASE_ADDRESS_3.l={high:08x} BASE_ADDRESS_2.l={low:08x}",
            self.controller(disk)?
        );
        let before = self.guest.exec_ok(&place, LONG)?;
        let digits: String = before.split_whitespace().collect();
        let before =
            u64::from_str_radix(&digits, 16).with_context(|| format!("a BAR: {before}"))?;
        Ok(before & !0xf)
    }
}
