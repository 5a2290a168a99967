//! The ioctls that vfio-ioctls lacks, or whose outcome it loses.
//!
//! Numbers and structures are those of `linux/vfio.h` and `linux/iommufd.h`,
//! as vfio-bindings and iommufd-bindings have them.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::io;
use std::mem::size_of;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::slice;

use farside_fabric::Iova;
use iommufd_bindings::iommufd::{
    IOMMUFD_CMD_IOAS_IOVA_RANGES, IOMMUFD_CMD_IOAS_MAP, IOMMUFD_CMD_IOAS_MAP_FILE,
    IOMMUFD_CMD_IOAS_UNMAP, IOMMUFD_TYPE, iommu_ioas_iova_ranges, iommu_iova_range,
};
use vfio_bindings::bindings::vfio::{
    VFIO_BASE, VFIO_DEVICE_FEATURE_DMA_BUF, VFIO_DEVICE_FEATURE_GET, VFIO_DMA_MAP_FLAG_READ,
    VFIO_DMA_MAP_FLAG_WRITE, VFIO_DMA_UNMAP_FLAG_ALL, VFIO_PCI_BAR0_REGION_INDEX,
    VFIO_PCI_BAR5_REGION_INDEX, VFIO_TYPE, VFIO_TYPE1v2_IOMMU, vfio_device_info,
    vfio_iommu_type1_dma_map, vfio_iommu_type1_dma_unmap, vfio_iommu_type1_info,
    vfio_region_dma_range, vfio_region_info,
};
use vmm_sys_util::ioctl::ioctl_with_ref;
use vmm_sys_util::ioctl::ioctl_with_val;
use vmm_sys_util::ioctl::{ioctl, ioctl_with_mut_ptr, ioctl_with_mut_ref, ioctl_with_ptr};
use vmm_sys_util::ioctl_io_nr;

ioctl_io_nr!(SET_IOMMU, VFIO_TYPE.into(), VFIO_BASE + 2);
ioctl_io_nr!(SET_CONTAINER, VFIO_TYPE.into(), VFIO_BASE + 4);
ioctl_io_nr!(GET_DEVICE_FD, VFIO_TYPE.into(), VFIO_BASE + 6);
ioctl_io_nr!(GET_DEVICE_INFO, VFIO_TYPE.into(), VFIO_BASE + 7);
ioctl_io_nr!(GET_REGION_INFO, VFIO_TYPE.into(), VFIO_BASE + 8);
ioctl_io_nr!(SET_IRQS, VFIO_TYPE.into(), VFIO_BASE + 10);
ioctl_io_nr!(RESET, VFIO_TYPE.into(), VFIO_BASE + 11);
ioctl_io_nr!(GET_IOMMU_INFO, VFIO_TYPE.into(), VFIO_BASE + 12);
ioctl_io_nr!(PCI_HOT_RESET, VFIO_TYPE.into(), VFIO_BASE + 13);
ioctl_io_nr!(MAP_DMA, VFIO_TYPE.into(), VFIO_BASE + 13);
ioctl_io_nr!(UNMAP_DMA, VFIO_TYPE.into(), VFIO_BASE + 14);
ioctl_io_nr!(DEVICE_FEATURE, VFIO_TYPE.into(), VFIO_BASE + 17);
// Used through iommufd-ioctls.
ioctl_io_nr!(IOAS_MAP, IOMMUFD_TYPE.into(), IOMMUFD_CMD_IOAS_MAP);
ioctl_io_nr!(
    IOAS_MAP_FILE,
    IOMMUFD_TYPE.into(),
    IOMMUFD_CMD_IOAS_MAP_FILE
);
ioctl_io_nr!(IOAS_UNMAP, IOMMUFD_TYPE.into(), IOMMUFD_CMD_IOAS_UNMAP);
ioctl_io_nr!(
    IOVA_RANGES,
    IOMMUFD_TYPE.into(),
    IOMMUFD_CMD_IOAS_IOVA_RANGES
);

/// The requests of ioctl(2) that a function needs once it is open, for filters of system calls.
pub fn requests() -> [u64; 12] {
    [
        GET_DEVICE_INFO(),
        GET_REGION_INFO(),
        SET_IRQS(),
        RESET(),
        GET_IOMMU_INFO(),
        MAP_DMA(),
        UNMAP_DMA(),
        IOVA_RANGES(),
        IOAS_MAP(),
        IOAS_MAP_FILE(),
        IOAS_UNMAP(),
        DEVICE_FEATURE(),
    ]
}

/// Maximum number of ranges: no IOMMU has more.
const MAX_ANSWER: usize = 1 << 20;

/// `VFIO_IOMMU_MAP_DMA`: lets devices of the container reach the `len` bytes
/// at host address `from` as IOVA `at`.
///
/// # Safety
/// Until [`unmap_dma`] has unmapped it, or the container is gone, the memory must
/// be a mapping of this process whose contents may change at any time: without
/// references into it.
pub(crate) unsafe fn map_dma(
    container: BorrowedFd<'_>,
    at: Iova,
    len: u64,
    from: *mut u8,
    writable: bool,
) -> io::Result<()> {
    let write = if writable { VFIO_DMA_MAP_FLAG_WRITE } else { 0 };
    let map = vfio_iommu_type1_dma_map {
        argsz: size_of::<vfio_iommu_type1_dma_map>() as u32,
        flags: VFIO_DMA_MAP_FLAG_READ | write,
        vaddr: from as u64,
        iova: at.get(),
        size: len,
    };
    // SAFETY: the structure is the one of this ioctl, of the size it states,
    // and is only read. The kernel checks that address and length are mapped;
    // what the devices do to the memory is the caller's promise.
    check(unsafe { ioctl_with_ref(&container, MAP_DMA(), &map) }).map(drop)
}

/// `VFIO_IOMMU_UNMAP_DMA`: unmaps all mappings inside the `len` bytes at `at`. Returns their size
/// in bytes. No DMA reaches them afterwards.
pub(crate) fn unmap_dma(container: BorrowedFd<'_>, at: Iova, len: u64) -> io::Result<u64> {
    unmap(container, 0, at, len)
}

/// `VFIO_IOMMU_UNMAP_DMA` of everything that is mapped, whichever process has mapped it
/// (Linux 6.0). No DMA reaches it afterwards.
pub(crate) fn unmap_dma_all(container: BorrowedFd<'_>) -> io::Result<()> {
    unmap(container, VFIO_DMA_UNMAP_FLAG_ALL, Iova::new(0), 0).map(drop)
}

fn unmap(container: BorrowedFd<'_>, flags: u32, at: Iova, len: u64) -> io::Result<u64> {
    let mut unmap = vfio_iommu_type1_dma_unmap {
        argsz: size_of::<vfio_iommu_type1_dma_unmap>() as u32,
        flags,
        iova: at.get(),
        size: len,
        ..Default::default()
    };
    // SAFETY: the structure is the one of this ioctl, of the size it states;
    // without the flag for dirty pages the kernel reads it and writes its `size` back, no more.
    check(unsafe { ioctl_with_mut_ref(&container, UNMAP_DMA(), &mut unmap) })?;
    Ok(unmap.size)
}

/// `VFIO_IOMMU_GET_INFO`: the answer's bytes, capabilities included.
pub(crate) fn iommu_info(container: BorrowedFd<'_>) -> io::Result<Vec<u8>> {
    const UNIT: usize = size_of::<vfio_iommu_type1_info>();
    let mut units = 1;
    loop {
        let mut info = vec![vfio_iommu_type1_info::default(); units];
        let room = units * UNIT;
        info[0].argsz = room as u32;
        // SAFETY: the pointer is to `room` bytes that are ours alone, and that
        // is the size stated: the kernel writes no more.
        check(unsafe { ioctl_with_mut_ptr(&container, GET_IOMMU_INFO(), info.as_mut_ptr()) })?;
        let needed = info[0].argsz as usize;
        if needed <= room {
            // SAFETY: the structure is integers without padding, all of them
            // initialised; a byte has no alignment. The slice lives as long as
            // `info`, which is not changed meanwhile.
            let bytes = unsafe { slice::from_raw_parts(info.as_ptr().cast::<u8>(), room) };
            return Ok(bytes.to_vec());
        }
        units = checked_units(needed, UNIT)?;
    }
}

/// `IOMMU_IOAS_IOVA_RANGES`: the usable IOVA of an I/O address space, as
/// (first, last), and what mappings must be aligned to, bytes.
pub(crate) fn ioas_ranges(
    iommufd: BorrowedFd<'_>,
    ioas_id: u32,
) -> io::Result<(Vec<(u64, u64)>, u64)> {
    let mut room = 8;
    loop {
        let mut ranges = vec![iommu_iova_range::default(); room];
        let mut query = iommu_ioas_iova_ranges {
            size: size_of::<iommu_ioas_iova_ranges>() as u32,
            ioas_id,
            num_iovas: room as u32,
            allowed_iovas: ranges.as_mut_ptr() as u64,
            ..Default::default()
        };
        // SAFETY: the structure is the one of this ioctl, of the size it
        // states; `allowed_iovas` points to `num_iovas` ranges that are ours
        // alone and outlive the call.
        let result = check(unsafe { ioctl_with_mut_ref(&iommufd, IOVA_RANGES(), &mut query) });
        match result {
            Ok(_) => {
                ranges.truncate(query.num_iovas as usize);
                let ranges = ranges.iter().map(|range| (range.start, range.last));
                return Ok((ranges.collect(), query.out_iova_alignment));
            }
            Err(error)
                if error.raw_os_error() == Some(libc::EMSGSIZE)
                    && query.num_iovas as usize > room =>
            {
                room = checked_units(query.num_iovas as usize, 1)?;
            }
            Err(error) => return Err(error),
        }
    }
}

/// `VFIO_DEVICE_GET_INFO`: the device's flags.
pub(crate) fn device_flags(device: BorrowedFd<'_>) -> io::Result<u32> {
    let mut info = vfio_device_info {
        argsz: size_of::<vfio_device_info>() as u32,
        ..Default::default()
    };
    // SAFETY: the structure is the one of this ioctl, of the size it states.
    check(unsafe { ioctl_with_mut_ref(&device, GET_DEVICE_INFO(), &mut info) })?;
    Ok(info.flags)
}

/// `VFIO_DEVICE_GET_REGION_INFO`: where a region is in the device's descriptor, bytes.
fn region(device: BorrowedFd<'_>, index: u32) -> io::Result<Range<u64>> {
    let mut info = vfio_region_info {
        argsz: size_of::<vfio_region_info>() as u32,
        index,
        ..Default::default()
    };
    // SAFETY: the structure is the one of this ioctl, of the size it states.
    check(unsafe { ioctl_with_mut_ref(&device, GET_REGION_INFO(), &mut info) })?;
    Ok(info.offset..info.offset.saturating_add(info.size))
}

/// `struct vfio_device_feature` with a `struct vfio_device_feature_dma_buf` of one range.
#[repr(C)]
struct DmaBufFeature {
    argsz: u32,
    flags: u32,
    region_index: u32,
    open_flags: u32,
    dma_buf_flags: u32,
    nr_ranges: u32,
    range: vfio_region_dma_range,
}

/// `VFIO_DEVICE_FEATURE_DMA_BUF`: a dma-buf of the `len` bytes at `at` of a function's descriptor, of one BAR.
pub(crate) fn export(device: BorrowedFd<'_>, at: u64, len: u64) -> io::Result<OwnedFd> {
    let mut found = None;
    for index in VFIO_PCI_BAR0_REGION_INDEX..=VFIO_PCI_BAR5_REGION_INDEX {
        let region = region(device, index)?;
        if region.contains(&at) {
            found = Some((index, at - region.start));
        }
    }
    let (region_index, offset) = found.ok_or(io::ErrorKind::InvalidInput)?;
    let request = DmaBufFeature {
        argsz: size_of::<DmaBufFeature>() as u32,
        flags: VFIO_DEVICE_FEATURE_GET | VFIO_DEVICE_FEATURE_DMA_BUF,
        region_index,
        open_flags: (libc::O_RDWR | libc::O_CLOEXEC) as u32,
        dma_buf_flags: 0,
        nr_ranges: 1,
        range: vfio_region_dma_range {
            offset,
            length: len,
        },
    };
    // SAFETY: the structure is the one of this ioctl, of the size it states, and is only read.
    match check(unsafe { ioctl_with_ref(&device, DEVICE_FEATURE(), &request) }) {
        // SAFETY: the result is a new descriptor, which nothing else owns.
        Ok(buffer) => Ok(unsafe { OwnedFd::from_raw_fd(buffer) }),
        Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "this kernel cannot export a BAR as a dma-buf (Linux 6.19 with \
             CONFIG_VFIO_PCI_DMABUF can); use the type1 interface",
        )),
        Err(error) => Err(error),
    }
}

/// `VFIO_DEVICE_RESET`.
pub(crate) fn reset(device: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: this ioctl takes no argument and touches no memory of ours.
    check(unsafe { ioctl(&device, RESET()) }).map(drop)
}

/// `VFIO_GROUP_SET_CONTAINER` and `VFIO_SET_IOMMU`: puts a group into a new container.
pub(crate) fn set_container(group: BorrowedFd<'_>, container: BorrowedFd<'_>) -> io::Result<()> {
    let number = container.as_raw_fd();
    // SAFETY: this ioctl reads an int, the container's descriptor, which is open for the call.
    check(unsafe { ioctl_with_ref(&group, SET_CONTAINER(), &number) })?;
    // SAFETY: this ioctl takes a number, and touches no memory of ours.
    check(unsafe { ioctl_with_val(&container, SET_IOMMU(), VFIO_TYPE1v2_IOMMU.into()) }).map(drop)
}

/// `VFIO_GROUP_GET_DEVICE_FD`: opens a function of a group by its address.
pub(crate) fn device_of_group(group: BorrowedFd<'_>, address: &CStr) -> io::Result<OwnedFd> {
    // SAFETY: this ioctl reads a string, which ends with a zero byte and lives for the call.
    let number = check(unsafe { ioctl_with_ptr(&group, GET_DEVICE_FD(), address.as_ptr()) })?;
    // SAFETY: the kernel has just opened it for us, and nothing else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// `VFIO_DEVICE_PCI_HOT_RESET`: resets all functions on the device's bus, which are in `groups`; with none, in the device's
/// iommufd.
pub(crate) fn hot_reset(device: BorrowedFd<'_>, groups: &[BorrowedFd<'_>]) -> io::Result<()> {
    const HEADER: usize = 3 * size_of::<u32>();
    let len = HEADER + groups.len() * size_of::<i32>();
    let mut request = vec![len as u32, 0, groups.len() as u32];
    request.extend(groups.iter().map(|group| group.as_raw_fd() as u32));
    // SAFETY: the pointer is to a `vfio_pci_hot_reset`: three words, the first of which is the size of it all, and the
    // descriptors that the third one announces, which are open for the call. It is only read.
    check(unsafe { ioctl_with_ptr(&device, PCI_HOT_RESET(), request.as_ptr()) }).map(drop)
}

/// The arguments of `VFIO_DEVICE_SET_IRQS`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IrqSet<'a> {
    /// `VFIO_IRQ_SET_ACTION_*`, one of them.
    pub(crate) action: u32,
    /// Number of the index.
    pub(crate) index: u32,
    /// First vector.
    pub(crate) start: u32,
    /// The data for each vector.
    pub(crate) data: IrqSetData<'a>,
}

/// The data of [`IrqSet`], which determines the number of vectors.
#[derive(Clone, Copy, Debug)]
pub(crate) enum IrqSetData<'a> {
    /// The same for this number of vectors; 0 with the trigger action: disable all.
    All(u32),
    /// The eventfd of each; `None` disconnects it.
    EventFds(&'a [Option<BorrowedFd<'a>>]),
    /// Selects vectors.
    Chosen(&'a [bool]),
}

/// `VFIO_DEVICE_SET_IRQS`.
pub(crate) fn set_irqs(device: BorrowedFd<'_>, set: IrqSet<'_>) -> io::Result<()> {
    let request = irq_set_words(set);
    // SAFETY: the pointer is to a `vfio_irq_set`: five words (the first of
    // which is the size of it all, no more than `request` has) and the data
    // that flags and count announce. It is only read. The descriptors in it
    // are borrowed for the call; the kernel takes references of its own.
    check(unsafe { ioctl_with_ptr(&device, SET_IRQS(), request.as_ptr()) }).map(drop)
}

/// The request as the kernel reads it.
fn irq_set_words(set: IrqSet<'_>) -> Vec<u32> {
    use vfio_bindings::bindings::vfio::{
        VFIO_IRQ_SET_DATA_BOOL, VFIO_IRQ_SET_DATA_EVENTFD, VFIO_IRQ_SET_DATA_NONE,
    };
    let (kind, count, len, words): (u32, usize, usize, Vec<u32>) = match set.data {
        IrqSetData::All(count) => (VFIO_IRQ_SET_DATA_NONE, count as usize, 0, Vec::new()),
        IrqSetData::EventFds(fds) => {
            let word = |fd: &Option<BorrowedFd<'_>>| fd.map_or(-1, |fd| fd.as_raw_fd()) as u32;
            let words: Vec<u32> = fds.iter().map(word).collect();
            (VFIO_IRQ_SET_DATA_EVENTFD, fds.len(), 4 * fds.len(), words)
        }
        IrqSetData::Chosen(chosen) => {
            let word = |part: &[bool]| {
                let mut bytes = [0; 4];
                for (byte, &chosen) in bytes.iter_mut().zip(part) {
                    *byte = chosen.into();
                }
                u32::from_ne_bytes(bytes)
            };
            let words: Vec<u32> = chosen.chunks(4).map(word).collect();
            (VFIO_IRQ_SET_DATA_BOOL, chosen.len(), chosen.len(), words)
        }
    };
    const HEADER: usize = 5 * size_of::<u32>();
    let mut request = vec![
        (HEADER + len) as u32,
        kind | set.action,
        set.index,
        set.start,
        count as u32,
    ];
    request.extend(words);
    request
}

/// The descriptor of something that does not lend it in a safe way.
pub(crate) fn borrow(of: &impl AsRawFd) -> BorrowedFd<'_> {
    // SAFETY: the descriptor belongs to `of` (all callers give owners of one),
    // which keeps it open for as long as it lives, and the result borrows it
    // for no longer.
    unsafe { BorrowedFd::borrow_raw(of.as_raw_fd()) }
}

/// How many units of that size hold `needed` bytes.
fn checked_units(needed: usize, unit: usize) -> io::Result<usize> {
    if needed > MAX_ANSWER {
        let text = format!("the kernel wants to answer with {needed} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    Ok(needed.div_ceil(unit))
}

fn check(result: i32) -> io::Result<i32> {
    match result {
        0.. => Ok(result),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn requests_are_laid_out_as_vfio_irq_set() {
        let set = |action, data| {
            irq_set_words(IrqSet {
                action,
                index: 2,
                start: 3,
                data,
            })
        };
        // argsz, flags, index, start, count.
        assert_eq!(set(32, IrqSetData::All(0)), [20, 33, 2, 3, 0]);
        assert_eq!(set(16, IrqSetData::All(1)), [20, 17, 2, 3, 1]);
        let file = std::fs::File::open("/dev/null").unwrap();
        let number = file.as_raw_fd() as u32;
        let fds = [Some(file.as_fd()), None];
        assert_eq!(
            set(32, IrqSetData::EventFds(&fds)),
            [28, 36, 2, 3, 2, number, u32::MAX]
        );
        let chosen = [true, false, true, true, true];
        let words = set(32, IrqSetData::Chosen(&chosen));
        assert_eq!(words[..5], [25, 34, 2, 3, 5]);
        assert_eq!(words[5].to_ne_bytes(), [1, 0, 1, 1]);
        assert_eq!(words[6].to_ne_bytes(), [1, 0, 0, 0]);
    }

    #[test]
    fn an_answer_without_end_is_refused() {
        assert_eq!(checked_units(25, 24).unwrap(), 2);
        assert!(checked_units(MAX_ANSWER + 1, 24).is_err());
    }
}
