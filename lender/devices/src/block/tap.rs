//! A tap interface of this host as a medium: a read is the next frame from it, a write sends one.
//!
//! Each frame has a header of [`HEADER`] bytes before it, virtio's (Virtual I/O Device 1.2, 5.1.6), which
//! the kernel reads and writes as the device and its driver do: a frame can be as long as 64 KiB, for the
//! receiver to take, or for the sender to cut.

use std::{
    collections::VecDeque,
    ffi::CString,
    fs::{File, OpenOptions},
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::OpenOptionsExt,
    },
    time::Instant,
};

use farside_medium::Condition;
use rustix::{
    buffer::spare_capacity,
    event::{PollFd, PollFlags, Timespec, epoll, poll},
    net::{AddressFamily, SocketType, socket},
};

use super::{
    Engine, Image, RawOp, Tag,
    image::{IN_USE_STEP, IN_USE_TIMEOUT},
    last_errno, raw,
};

/// Where tap interfaces are attached to.
const DEVICE: &str = "/dev/net/tun";

/// Bytes of a frame's header.
pub const HEADER: usize = 12;

/// Bytes of the longest frame, with its header: an IP packet of 64 KiB behind Ethernet's header with a VLAN tag.
pub const MAX_FRAME: usize = HEADER + 18 + (64 << 10);

/// Bytes of the medium: at its only offset, 0, there is room for a frame.
pub const TAP_SIZE: u64 = 1 << 17;

/// Most frames of former sessions that are discarded: more than an interface queues by default.
const MOST_DISCARDED: usize = 2048;

/// What the receiver of frames can do itself (`TUN_F_…` of `linux/if_tun.h`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offloads {
    /// Complete checksums.
    pub checksum: bool,
    /// Take TCP segments over IPv4 that are longer than the MTU.
    pub tcp4: bool,
    /// The same over IPv6.
    pub tcp6: bool,
    /// The same with congestion notification.
    pub ecn: bool,
}

impl Offloads {
    /// As one number, of which the kernel accepts only combinations that make sense: what is segmented has no
    /// complete checksum.
    pub(super) fn bits(self) -> u32 {
        let Self {
            checksum,
            tcp4,
            tcp6,
            ecn,
        } = self;
        [
            (checksum, libc::TUN_F_CSUM),
            (checksum && tcp4, libc::TUN_F_TSO4),
            (checksum && tcp6, libc::TUN_F_TSO6),
            (checksum && (tcp4 || tcp6) && ecn, libc::TUN_F_TSO_ECN),
        ]
        .into_iter()
        .fold(0, |bits, (set, bit)| if set { bits | bit } else { bits })
    }
}

/// Why an interface cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are what the messages name")]
pub enum TapError {
    /// No name of an interface.
    #[error("tap = {0:?}: the name of an interface has 1 to 15 characters, no space and no slash")]
    Name(String),
    /// There is none of this name.
    #[error(
        "this host has no interface {name}, or not where the lender is (packaged, it needs lender-tap.conf); make one with `ip tuntap add {name} mode tap user USER`, USER being the lender's, and `ip link set {name} up`"
    )]
    Missing { name: String },
    /// It is of another kind.
    #[error(
        "interface {name} is no tap interface, or one that was made with multi_queue; make one with `ip tuntap add NAME mode tap`"
    )]
    WrongKind { name: String },
    /// It belongs to another user.
    #[error(
        "interface {name} may not be used by this user (uid {uid}); make it with `ip tuntap add {name} mode tap user USER`"
    )]
    PermissionDenied { name: String, uid: u32 },
    /// There are no tap interfaces for this process.
    #[error(
        "cannot open {DEVICE} for interface {name}: it takes the kernel's module tun, and a user who may read and write it"
    )]
    Device { name: String, source: io::Error },
    /// Another process has attached to it.
    #[error("interface {name} is in use by another process")]
    InUse { name: String },
    /// Any other error.
    #[error("cannot use interface {name}")]
    Io { name: String, source: io::Error },
}

/// A tap interface to which this process is attached.
#[derive(Debug)]
pub struct Tap {
    /// The attachment.
    pub file: File,
    /// The interface's MTU, bytes.
    pub mtu: u16,
}

impl Tap {
    /// Attaches to the existing interface `name`, waiting for up to 2 s while another process is.
    ///
    /// # Errors
    /// A [`TapError`].
    pub fn open(name: &str) -> Result<Self, TapError> {
        let name_of = || name.to_owned();
        let failed = |source| TapError::Io {
            name: name_of(),
            source,
        };
        if !is_name(name) {
            return Err(TapError::Name(name_of()));
        }
        // An interface that does not exist would be created.
        let mtu = match mtu(name) {
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => {
                return Err(TapError::Missing { name: name_of() });
            }
            mtu => mtu.map_err(failed)?,
        };
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(DEVICE)
            .map_err(|source| TapError::Device {
                name: name_of(),
                source,
            })?;
        let deadline = Instant::now() + IN_USE_TIMEOUT;
        let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        while let Err(error) = attach(&file, name, flags) {
            match error.raw_os_error() {
                Some(libc::EBUSY) if Instant::now() < deadline => {
                    std::thread::sleep(IN_USE_STEP);
                }
                Some(libc::EBUSY) => return Err(TapError::InUse { name: name_of() }),
                Some(libc::EPERM) => {
                    let uid = rustix::process::geteuid().as_raw();
                    return Err(TapError::PermissionDenied {
                        name: name_of(),
                        uid,
                    });
                }
                // One with several queues would not tell that others use it, who would share its frames.
                Some(libc::EINVAL) => return Err(TapError::WrongKind { name: name_of() }),
                _ => return Err(failed(error)),
            }
        }
        set(&file, libc::TUNSETVNETHDRSZ, HEADER as i32)
            .and_then(|()| set(&file, libc::TUNSETVNETLE, 1))
            .map_err(failed)?;
        let mtu = u16::try_from(mtu).unwrap_or(u16::MAX);
        Ok(Self { file, mtu })
    }

    /// Whether `file` is attached to the interface `name` of this host.
    pub fn is_at(file: &File, name: &str) -> bool {
        let mut request = request(name);
        // SAFETY: the descriptor is open during the call, and TUNGETIFF writes to `request`, an `ifreq`.
        let found = unsafe { libc::ioctl(raw(file), libc::TUNGETIFF as libc::Ioctl, &mut request) };
        let of = request.ifr_name.map(|byte| byte as u8);
        let end = of.iter().position(|byte| *byte == 0).unwrap_or(of.len());
        found == 0 && &of[..end] == name.as_bytes()
    }
}

impl Image {
    /// The attachment to a tap interface, as the medium that a worker is given.
    pub fn of_tap(file: File) -> Self {
        Self {
            file,
            size: TAP_SIZE,
            punches_holes: false,
        }
    }
}

/// Whether an interface can have this name (`dev_valid_name` of the kernel).
fn is_name(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_graphic() && !matches!(byte, b'/' | b':' | b'%');
    (1..libc::IFNAMSIZ).contains(&name.len())
        && !matches!(name, "." | "..")
        && name.bytes().all(allowed)
}

/// A request about the interface `name`, which is a valid one.
fn request(name: &str) -> libc::ifreq {
    // SAFETY: all zeros are a valid `ifreq`, which is plain numbers and pointers.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let name = CString::new(name).unwrap_or_default();
    let bytes = name.as_bytes().iter().take(libc::IFNAMSIZ - 1);
    for (to, from) in request.ifr_name.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    request
}

fn attach(file: &File, name: &str, flags: i32) -> io::Result<()> {
    let mut request = request(name);
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    // SAFETY: the descriptor is open during the call, and TUNSETIFF reads and writes `request`, an `ifreq`.
    let result = unsafe { libc::ioctl(raw(file), libc::TUNSETIFF as libc::Ioctl, &mut request) };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// TUNSETVNETHDRSZ or TUNSETVNETLE.
fn set(file: &File, what: libc::Ioctl, value: libc::c_int) -> io::Result<()> {
    // SAFETY: the descriptor is open during the call, and both requests read one int.
    match unsafe { libc::ioctl(raw(file), what, &value) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn mtu(name: &str) -> io::Result<i32> {
    // Any socket answers, and a confined lender has those of this family alone.
    let socket = socket(AddressFamily::UNIX, SocketType::DGRAM, None)?;
    let mut request = request(name);
    let file = File::from(socket);
    // SAFETY: the descriptor is open during the call, and SIOCGIFMTU writes to `request`, an `ifreq`.
    let result = unsafe { libc::ioctl(raw(&file), libc::SIOCGIFMTU as libc::Ioctl, &mut request) };
    match result {
        // SAFETY: SIOCGIFMTU has stored an int.
        0 => Ok(unsafe { request.ifr_ifru.ifru_mtu }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A read that waits for a frame.
struct Read {
    tag: Tag,
    iovecs: *const libc::iovec,
    count: u32,
}

// SAFETY: only the kernel uses the pointer, to memory that `Engine::queue`'s caller keeps valid until the
// tag is reaped or the engine is dropped.
unsafe impl Send for Read {}

pub(super) struct TapEngine {
    file: File,
    /// In order.
    reads: VecDeque<Read>,
    finished: Vec<(Tag, i32)>,
    /// Edge-triggered: frames that nobody asks for are not reported again and again.
    epoll: OwnedFd,
    never_ready: OwnedFd,
}

impl TapEngine {
    pub(super) fn start(file: File, depth: u16) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, &file, epoll::EventData::new_u64(0), flags)?;
        Ok(Self {
            file,
            reads: VecDeque::with_capacity(depth.into()),
            finished: Vec::with_capacity(depth.into()),
            epoll,
            never_ready: epoll::create(epoll::CreateFlags::CLOEXEC)?,
        })
    }

    /// Sends a frame.
    ///
    /// # Safety
    /// That of [`Engine::queue`].
    unsafe fn write(&self, iovecs: *const libc::iovec, count: u32) -> i32 {
        loop {
            // SAFETY: `count` valid vectors, by the contract of `Engine::queue`; only the kernel accesses
            // their memory, with EFAULT where it is no longer mapped.
            let sent = unsafe { libc::writev(raw(&self.file), iovecs, count as i32) };
            if sent >= 0 {
                return sent as i32;
            }
            match last_errno().abs() {
                libc::EINTR => {}
                // The host is short of memory, or of room: it loses the frame, as networks do.
                libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM => return 0,
                // No frame that could be sent: the guest's fault.
                libc::EINVAL | libc::EMSGSIZE => return -libc::EOPNOTSUPP,
                errno => return -errno,
            }
        }
    }

    fn cancel(&mut self, result: i32) {
        let reads = self.reads.drain(..);
        self.finished.extend(reads.map(|read| (read.tag, result)));
    }

    /// Sets what the receiver can do, and discards what came for a former one.
    fn set_offloads(&mut self, bits: u32, discard: bool) -> i32 {
        // SAFETY: the descriptor is open during the call; TUNSETOFFLOAD has a number as its argument.
        let result = unsafe {
            libc::ioctl(
                raw(&self.file),
                libc::TUNSETOFFLOAD,
                libc::c_ulong::from(bits),
            )
        };
        if result != 0 {
            return last_errno();
        }
        if discard {
            self.cancel(0);
            let mut first = [0; 64];
            let mut discarded = 0;
            while discarded < MOST_DISCARDED && rustix::io::read(&self.file, &mut first).is_ok() {
                discarded += 1;
            }
        }
        0
    }
}

impl Engine for TapEngine {
    unsafe fn queue(&mut self, tag: Tag, op: RawOp) {
        let result = match op {
            RawOp::Read { iovecs, count, .. } => {
                let read = Read { tag, iovecs, count };
                return self.reads.push_back(read);
            }
            // SAFETY: the caller's contract.
            RawOp::Write { iovecs, count, .. } => unsafe { self.write(iovecs, count) },
            RawOp::Sync => 0,
            RawOp::Allocate { .. } | RawOp::Reserve { .. } | RawOp::Report { .. } => {
                -libc::EOPNOTSUPP
            }
            RawOp::Offloads { bits, discard } => self.set_offloads(bits, discard),
        };
        self.finished.push((tag, result));
    }

    fn submit(&mut self) -> bool {
        true
    }

    fn reap(&mut self, done: &mut Vec<(Tag, i32)>) {
        done.append(&mut self.finished);
        while let Some(read) = self.reads.front() {
            // SAFETY: `count` valid vectors, by the contract of `Engine::queue`, whose memory is writable;
            // the kernel alone accesses it, with EFAULT where it is no longer mapped.
            let bytes = unsafe { libc::readv(raw(&self.file), read.iovecs, read.count as i32) };
            let result = match bytes {
                0.. => bytes as i32,
                _ => last_errno(),
            };
            match -result {
                libc::EINTR => continue,
                libc::EAGAIN => return,
                _ => {}
            }
            let result = match -result {
                // This frame is lost, such as one that the header cannot describe; the next one may not be.
                libc::EINVAL | libc::ENOMEM => 0,
                _ => result,
            };
            done.push((read.tag, result));
            self.reads.pop_front();
        }
    }

    fn has_finished(&mut self) -> bool {
        let mut events = Vec::with_capacity(1);
        let now = Timespec::default();
        // After an error, such as an interruption, everything is as before.
        let _ = epoll::wait(&self.epoll, spare_capacity(&mut events), Some(&now));
        !self.finished.is_empty() || (!events.is_empty() && !self.reads.is_empty())
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        // Unrequested frames would wake the owner, one after the other.
        match self.reads.is_empty() {
            true => self.never_ready.as_fd(),
            false => self.epoll.as_fd(),
        }
    }

    fn wait(&mut self) {
        // An interrupted wait is only shorter.
        let _ = poll(&mut [PollFd::new(&self.epoll, PollFlags::IN)], None);
    }

    fn condition(&self) -> Condition {
        Condition {
            size: TAP_SIZE,
            full: false,
            read_only: false,
        }
    }

    /// Frames that were sent are with the kernel.
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn is_connected(&self) -> bool {
        true
    }

    fn hurry(&mut self, now: bool) {
        if now {
            self.cancel(-libc::ECANCELED);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_kernel() {
        for (name, good) in [
            ("tap0", true),
            ("fs-abcdefghijkl", true),
            ("fs-abcdefghijklm", false),
            ("", false),
            ("..", false),
            ("a/b", false),
            ("a b", false),
            ("tap%d", false),
        ] {
            assert_eq!(is_name(name), good, "{name:?}");
        }
    }

    #[test]
    fn offloads_of_segments_need_that_of_checksums() {
        let all = Offloads {
            checksum: true,
            tcp4: true,
            tcp6: true,
            ecn: true,
        };
        assert_eq!(all.bits(), 0xf);
        let without = Offloads {
            checksum: false,
            ..all
        };
        assert_eq!(without.bits(), 0);
        let without = Offloads {
            tcp4: false,
            tcp6: false,
            ..all
        };
        assert_eq!(without.bits(), 1);
    }
}
