//! Checks this crate against a real kernel and a real function: an NVMe device that
//! is bound to vfio-pci and unused. Prints a line for each check and ends with
//! `probe: all is well`.
//!
//! `vfio-probe BDF [OTHER]`: OTHER is a second function, with a BAR2 to be a
//! target of DMA. `tests/guest.rs` runs it in a VM.

use std::error::Error;
use std::fs;
use std::sync::Arc;

use farside_config_space::ConfigSpace;
use farside_fabric::memory::{SharedMemory, create_sealed};
use farside_fabric::{BorrowerDomain, FabricError, Iova, LenderPath, MemoryRange, PeerAddress};
use farside_irq_relay::{Action, IrqData, IrqEventFd, IrqIndex, IrqRange, IrqTarget, SetIrqs};
use farside_pci::Bdf;
use farside_vfio::{Api, Domain, Function, LocalPath, VfioError};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

type Outcome = Result<(), Box<dyn Error>>;

const MIB: u64 = 1 << 20;
/// NVMe's controller configuration, disabled with entry sizes set, and cleared by
/// a reset.
const CC: u64 = 0x14;
const MSI_WINDOW: u64 = 0xfee0_0000;

fn main() -> Outcome {
    let mut args = std::env::args().skip(1);
    let bdf: Bdf = args
        .next()
        .ok_or("usage: vfio-probe BDF [OTHER]")?
        .parse()?;
    let other: Option<Bdf> = args.next().map(|text| text.parse()).transpose()?;
    let api = Api::detect()?;
    println!("interface: {api}");

    refusals(api, bdf)?;
    let domain = Domain::new(api)?;
    let function = domain.open(bdf)?;
    describe(&function)?;
    registers(&function)?;
    mappings(&domain)?;
    memlock(&domain)?;
    interrupts(&function)?;
    reset(&function)?;
    bus_master(&function)?;
    if let Some(other) = other {
        peer(&domain, other)?;
    }
    let function = Arc::new(function);
    path(&function)?;
    let function = Arc::into_inner(function).ok_or("somebody keeps the function")?;
    still_held(domain, function)?;
    println!("probe: all is well");
    Ok(())
}

/// Functions that must not be opened are refused for the right reason.
fn refusals(api: Api, bdf: Bdf) -> Outcome {
    let domain = Domain::new(api)?;
    let nobody: Bdf = "ffff:00:00.0".parse()?;
    expect(domain.open(nobody), |error| {
        matches!(error, VfioError::NoFunction { .. })
    })?;
    for entry in fs::read_dir("/sys/bus/pci/drivers/virtio-pci")? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if let Ok(virtio) = name.parse::<Bdf>() {
            expect(domain.open(virtio), |error| {
                matches!(
                    error,
                    VfioError::NotBound { .. } | VfioError::NotViable { .. }
                )
            })?;
        }
    }
    let memory = SharedMemory::anonymous(4096)?;
    let slice = memory.slice(0, 4096).ok_or("no slice")?;
    expect(domain.map(Iova::new(0), &slice, true), |error| {
        matches!(error, VfioError::EmptyDomain)
    })?;
    let first = domain.open(bdf)?;
    expect(Domain::new(api)?.open(bdf), |error| {
        matches!(error, VfioError::Busy { .. })
    })?;
    drop(first);
    Ok(())
}

fn describe(function: &Function) -> Outcome {
    let description = function.description()?;
    println!("description: {}", description.summary);
    for (number, bar) in description.bars.iter().enumerate() {
        if let Some(bar) = bar {
            println!("  BAR {number}: {bar:x?}");
        }
    }
    let (intx, msi, msix) = (
        description.intx,
        description.msi_vectors,
        description.msix_vectors,
    );
    println!("  INTx {intx}, MSI {msi}, MSI-X {msix}");
    for index in [IrqIndex::Intx, IrqIndex::Msi, IrqIndex::Msix] {
        println!("  {index}: {:x?}", function.irq_info(index));
    }
    let space = ConfigSpace::new(&description)?;
    for hidden in space.hidden() {
        println!("  hidden: {hidden}");
    }
    assert!(!space.bus_master() && msix > 0);
    let bar = description.bars[0].as_ref().ok_or("no BAR 0")?;
    assert!(!bar.mappable.is_empty(), "BAR 0 is not mappable");
    let mapped: u64 = bar.mappable.iter().map(|area| area.len).sum();
    assert!(mapped < bar.size, "the MSI-X table is mapped: {bar:x?}");
    Ok(())
}

/// NVMe's CAP and VS, by trap and by mapping.
fn registers(function: &Function) -> Outcome {
    let mut cap = [0; 8];
    function.bar_read(0, 0, &mut cap)?;
    let mapped = function.map_region(0, 0, 4096)?;
    let cap = u64::from_le_bytes(cap);
    assert_eq!(mapped.load_u64(0), Some(cap));
    assert_ne!(cap, 0);
    let mut version = [0; 4];
    function.bar_read(0, 8, &mut version)?;
    assert_eq!(mapped.load_u32(8), Some(u32::from_le_bytes(version)));
    assert_eq!(mapped.load_u32(2), None);
    assert_eq!(mapped.load_u32(4096), None);
    function.bar_write(0, 0x24, &0x001f_001fu32.to_le_bytes())?;
    assert_eq!(mapped.load_u32(0x24), Some(0x001f_001f));
    mapped.store_u32(0x24, 0x000f_000f).ok_or("no store")?;
    let mut queues = [0; 4];
    function.bar_read(0, 0x24, &mut queues)?;
    assert_eq!(u32::from_le_bytes(queues), 0x000f_000f);
    expect(function.bar_read(0, 3, &mut queues), |error| {
        matches!(error, VfioError::BadAccess { .. })
    })?;
    expect(function.bar_read(6, 0, &mut queues), |error| {
        matches!(error, VfioError::BadAccess { .. })
    })?;
    println!("registers: CAP {cap:#x} by trap and by mapping");
    Ok(())
}

fn mappings(domain: &Domain) -> Outcome {
    println!("usable IOVA: {:x?}", domain.iova_ranges()?);
    println!("page sizes: {:#x}", domain.page_sizes());
    let usable = domain.usable_iova()?;
    let error = usable.check(&[(Iova::new(0), 4 << 30)]).unwrap_err();
    println!("  {error}", error = farside_error_chain::Chain(&error));
    usable.check(&[(Iova::new(0), 2 << 30), (Iova::new(4 << 30), 8 << 30)])?;

    let memory = SharedMemory::anonymous((4 * MIB) as usize)?;
    let slice = |offset, len| {
        memory
            .slice(offset as usize, len as usize)
            .ok_or("no slice")
    };
    let before = domain.usage();
    assert_eq!((before.mappings, before.bytes), (0, 0));
    domain.map(Iova::new(0), &slice(0, 2 * MIB)?, true)?;
    domain.map(Iova::new(4 << 30), &slice(2 * MIB, 2 * MIB)?, false)?;
    let usage = domain.usage();
    println!("usage: {usage:?}");
    assert_eq!((usage.mappings, usage.bytes), (2, 4 * MIB));
    expect(domain.map(Iova::new(MIB), &slice(0, MIB)?, true), |error| {
        matches!(error, VfioError::Range(FabricError::Overlap { .. }))
    })?;
    expect(
        domain.map(Iova::new(MSI_WINDOW), &slice(0, 4096)?, true),
        |error| matches!(error, VfioError::Reserved { .. }),
    )?;
    expect(domain.unmap(Iova::new(0), MIB), |error| {
        matches!(error, VfioError::Range(FabricError::SplitMapping { .. }))
    })?;
    domain.unmap(Iova::new(0), 2 * MIB)?;
    expect(domain.unmap(Iova::new(0), 2 * MIB), |error| {
        matches!(error, VfioError::Range(FabricError::NotMapped { .. }))
    })?;
    domain.unmap_all()?;
    assert_eq!(domain.usage(), before);
    Ok(())
}

/// A process with too small a memlock limit gets an error with the limit.
fn memlock(domain: &Domain) -> Outcome {
    let memory = SharedMemory::anonymous(MIB as usize)?;
    let slice = memory.slice(0, MIB as usize).ok_or("no slice")?;
    let (limit, all) = (getrlimit(Resource::Memlock), capabilities(None)?);
    let set = |current, effective| -> Outcome {
        let maximum = limit.maximum;
        setrlimit(Resource::Memlock, Rlimit { current, maximum })?;
        Ok(set_capabilities(None, CapabilitySets { effective, ..all })?)
    };
    set(Some(64 << 10), all.effective - CapabilitySet::IPC_LOCK)?;
    let result = domain.map(Iova::new(0), &slice, true);
    set(limit.current, all.effective)?;
    expect(result, |error| {
        let limit = Some(64 << 10);
        matches!(error, VfioError::Memlock { limit: it, .. } if *it == limit)
    })
}

/// Software-triggered vectors signal the right eventfds.
fn interrupts(function: &Function) -> Outcome {
    let counts = function.irq_counts();
    let request = |start, count, action, data| -> Result<SetIrqs, Box<dyn Error>> {
        let range = IrqRange::new(&counts, IrqIndex::Msix as u32, start, count)?;
        Ok(SetIrqs::new(range, action, data)?)
    };
    let trigger = |start, fds: &[&IrqEventFd]| {
        let targets = fds.iter().map(|fd| Some(IrqTarget::EventFd((*fd).clone())));
        let data = IrqData::Targets(targets.collect());
        request(start, fds.len() as u32, Action::Trigger, data)
    };
    let raise = |vector| {
        let raised = request(vector, 1, Action::Trigger, IrqData::None)?;
        Ok::<_, Box<dyn Error>>(function.set_irqs(&raised)?)
    };
    let disable = request(0, 0, Action::Trigger, IrqData::None)?;
    // Twice is no error.
    function.set_irqs(&disable)?;
    let (first, second) = (IrqEventFd::new()?, IrqEventFd::new()?);
    function.set_irqs(&trigger(0, &[&first])?)?;
    // Beyond what is enabled.
    let last = u32::from(counts.count(IrqIndex::Msix)) - 1;
    function.set_irqs(&trigger(last, &[&second])?)?;
    raise(0)?;
    assert_eq!((first.take()?, second.take()?), (Some(1), None));
    raise(last)?;
    assert_eq!((first.take()?, second.take()?), (None, Some(1)));
    // Masked: kept until unmasked.
    function.set_irqs(&request(0, 1, Action::Mask, IrqData::None)?)?;
    raise(0)?;
    assert_eq!(first.take()?, None);
    function.set_irqs(&request(0, 1, Action::Unmask, IrqData::None)?)?;
    assert_eq!(first.take()?, Some(1));
    raise(0)?;
    assert_eq!(first.take()?, Some(1));
    function.set_irqs(&disable)?;
    let host = fs::read_to_string("/proc/interrupts")?;
    assert!(!host.contains("vfio-msix"), "{host}");
    println!("interrupts: MSI-X 0 and {last}");
    Ok(())
}

fn reset(function: &Function) -> Outcome {
    assert!(function.can_reset());
    let mapped = function.map_region(0, 0, 4096)?;
    mapped.store_u32(CC, 0x0046_0000).ok_or("no store")?;
    assert_eq!(mapped.load_u32(CC), Some(0x0046_0000));
    function.reset()?;
    assert_eq!(mapped.load_u32(CC), Some(0));
    println!("reset: registers are as after power-on");
    Ok(())
}

fn bus_master(function: &Function) -> Outcome {
    assert!(!function.bus_master()?);
    function.set_bus_master(true)?;
    assert!(function.bus_master()?);
    function.set_bus_master(false)?;
    assert!(!function.bus_master()?);
    println!("bus master: on and off");
    Ok(())
}

/// Another function's BAR as a target of DMA.
fn peer(domain: &Domain, other: Bdf) -> Outcome {
    let elsewhere = Domain::new(domain.api())?;
    let window = elsewhere.open(other)?;
    let size = window.description()?.bars[2]
        .as_ref()
        .ok_or("no BAR 2")?
        .size;
    let region = window.map_region(2, 0, size)?;
    region
        .store_u64(8, 0x1234_5678_9abc_def0)
        .ok_or("no store")?;
    assert_eq!(region.load_u32(12), Some(0x1234_5678));
    domain.map_bar(Iova::new(8 << 30), &region, 0, size / 2)?;
    domain.map_bar(Iova::new(9 << 30), &region, size / 2, size / 2)?;
    assert_eq!(domain.usage().bytes, size);
    domain.unmap_all()?;
    println!("peer: BAR 2 of {other}, {size:#x} bytes");
    Ok(())
}

fn path(function: &Arc<Function>) -> Outcome {
    let mut path = LocalPath::new(Arc::clone(function));
    path.check(&[(Iova::new(0), 2 << 30)])?;
    assert!(path.check(&[(Iova::new(0), 4 << 30)]).is_err());
    let file = create_sealed("probe", 16 * MIB)?;
    let peer_address = PeerAddress::new(1 << 40);
    path.map(peer_address, MemoryRange::whole(file, 16 * MIB))?;
    assert_eq!(path.usage().bytes_mapped, 0);
    path.open_window(Iova::new(0), peer_address, 8 * MIB)?;
    path.open_window(
        Iova::new(4 << 30),
        PeerAddress::new((1 << 40) + 8 * MIB),
        8 * MIB,
    )?;
    let usage = path.usage();
    println!("path: {usage:?}");
    assert_eq!((usage.windows, usage.bytes_mapped), (2, 16 * MIB));
    assert_eq!(path.domain().usage().bytes, 16 * MIB);
    path.set_bus_master(true)?;
    assert!(function.bus_master()?);
    path.close_window(Iova::new(0))?;
    assert_eq!(path.domain().usage().bytes, 8 * MIB);
    path.unmap_peer_all()?;
    assert_eq!(path.domain().usage().bytes, 0);
    drop(path);
    assert!(!function.bus_master()?);
    Ok(())
}

/// A descriptor that is open in another process is detected.
fn still_held(domain: Domain, function: Function) -> Outcome {
    let (api, bdf) = (domain.api(), function.bdf());
    let (kept, offset) = function.bar_file(0)?;
    println!("BAR 0 is at {offset:#x} of the descriptor");
    expect(function.close(), |error| {
        matches!(error, VfioError::Busy { .. })
    })?;
    expect(Domain::new(api)?.open(bdf), |error| {
        matches!(error, VfioError::Busy { .. })
    })?;
    drop((kept, domain));
    Domain::new(api)?.open(bdf)?.close()?;
    Ok(())
}

fn expect<T>(
    result: Result<T, VfioError>,
    is: impl Fn(&VfioError) -> bool,
) -> Result<(), Box<dyn Error>> {
    match result {
        Err(error) if is(&error) => {
            println!(
                "refused: {error}",
                error = farside_error_chain::Chain(&error)
            );
            Ok(())
        }
        Err(error) => Err(format!("refused for another reason: {error:?}").into()),
        Ok(_) => Err("not refused".into()),
    }
}
