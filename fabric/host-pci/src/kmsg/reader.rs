//! Follows `/dev/kmsg`.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{FileType, fstat, major, minor};
use rustix::io::{Errno, ioctl_fionbio};

use super::message::{KernelEvent, parse_message};
use super::record::Record;
use crate::error::PciError;

const KMSG: &str = "/dev/kmsg";
/// Its device numbers (Linux `Documentation/admin-guide/devices.txt`).
const KMSG_NUMBERS: (u32, u32) = (1, 11);
/// A record has up to 8 KiB, and a read with a smaller buffer fails.
const RECORD_BYTES: usize = 16 << 10;
/// Maximum number of records read per call: other sources may flood the log.
const RECORDS_A_CALL: usize = 4096;
/// The facility of the kernel itself.
const FACILITY_KERNEL: u32 = 0;

/// Reads DMA events in the kernel's log, from the moment of opening on.
///
/// Its descriptor is non-blocking and becomes readable with each new record; use it with a
/// level-triggered event loop and call [`FaultReader::next_event`] until it returns `None`.
#[derive(Debug)]
pub struct FaultReader {
    kmsg: File,
    buffer: Vec<u8>,
    /// The number that the next record should have.
    expected: Option<u64>,
    /// A record that was read together with a report of lost ones.
    pending: Option<KernelEvent>,
}

/// Standard input, if it is `/dev/kmsg`.
fn given() -> io::Result<Option<File>> {
    let input = io::stdin();
    let stat = fstat(&input)?;
    let is_log = FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice
        && (major(stat.st_rdev), minor(stat.st_rdev)) == KMSG_NUMBERS;
    is_log
        .then(|| input.as_fd().try_clone_to_owned().map(File::from))
        .transpose()
}

impl FaultReader {
    /// Opens `/dev/kmsg` at its end; takes standard input instead if that is `/dev/kmsg`, for a process
    /// that may not open it.
    ///
    /// # Errors
    /// [`PciError::KernelLog`].
    pub fn open() -> Result<Self, PciError> {
        let opened = given().and_then(|given| match given {
            Some(kmsg) => Self::at_end(kmsg),
            None => Self::open_at(Path::new(KMSG)),
        });
        opened.map_err(|source| PciError::KernelLog {
            path: KMSG.into(),
            source,
        })
    }

    fn open_at(path: &Path) -> io::Result<Self> {
        Self::at_end(File::open(path)?)
    }

    fn at_end(mut kmsg: File) -> io::Result<Self> {
        ioctl_fionbio(&kmsg, true)?;
        kmsg.seek(SeekFrom::End(0))?;
        Ok(Self::new(kmsg))
    }

    /// Reads from a non-blocking descriptor that returns one record per read.
    pub fn from_descriptor(descriptor: OwnedFd) -> Self {
        Self::new(descriptor.into())
    }

    fn new(kmsg: File) -> Self {
        Self {
            kmsg,
            buffer: vec![0; RECORD_BYTES],
            expected: None,
            pending: None,
        }
    }

    /// The next DMA event. `None` when no record is pending, or after some thousand unrelated
    /// records: wait until the descriptor is readable, and call again.
    ///
    /// # Errors
    /// The log cannot be read.
    pub fn next_event(&mut self) -> io::Result<Option<KernelEvent>> {
        if let Some(event) = self.pending.take() {
            return Ok(Some(event));
        }
        for _ in 0..RECORDS_A_CALL {
            let length = match self.kmsg.read(&mut self.buffer) {
                Ok(0) => return Ok(None),
                Ok(length) => length,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                // Records were overwritten before they were read. The next read returns the oldest
                // remaining one; its sequence number shows how many.
                Err(error) if error.raw_os_error() == Some(Errno::PIPE.raw_os_error()) => continue,
                Err(error) => return Err(error),
            };
            let bytes = self.buffer.get(..length).unwrap_or_default();
            let Some(record) = Record::parse(bytes) else {
                continue;
            };
            if let Some(event) = self.take(&record) {
                return Ok(Some(event));
            }
        }
        Ok(None)
    }

    fn take(&mut self, record: &Record) -> Option<KernelEvent> {
        let expected = self.expected.replace(record.sequence.saturating_add(1));
        // Ignore records of processes, whose text may come from a guest; the kernel marks them.
        let event = if record.facility == FACILITY_KERNEL {
            parse_message(&record.text, record.device)
        } else {
            None
        };
        match record
            .sequence
            .checked_sub(expected.unwrap_or(record.sequence))
        {
            Some(lost) if lost > 0 => {
                self.pending = event;
                Some(KernelEvent::Lost(lost))
            }
            _ => event,
        }
    }
}

impl AsFd for FaultReader {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.kmsg.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kmsg::{Access, KernelDmaFault};
    use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, send, socketpair};

    /// A log that returns one record per read, as `/dev/kmsg` does.
    fn log() -> (OwnedFd, FaultReader) {
        let (writer, reader) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::NONBLOCK | SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        (writer, FaultReader::from_descriptor(reader))
    }

    fn print(log: &OwnedFd, facility: u32, sequence: u64, text: &str) {
        let record = format!("{},{sequence},12345,-;{text}\n", facility << 3 | 3);
        send(log, record.as_bytes(), SendFlags::empty()).unwrap();
    }

    const FAULT: &str = "DMAR: [DMA Write NO_PASID] Request device [0000:00:04.0] fault addr 0x200010000 [fault reason 0x05] PTE Write access is not set";

    fn is_fault(event: Option<KernelEvent>) -> bool {
        matches!(
            event,
            Some(KernelEvent::Fault(KernelDmaFault {
                access: Access::Write,
                iova: 0x2_0001_0000,
                ..
            }))
        )
    }

    #[test]
    fn gives_faults_and_skips_the_rest() {
        let (log, mut reader) = log();
        assert_eq!(reader.next_event().unwrap(), None);
        print(&log, 0, 10, "usb 1-1: new device");
        print(&log, 0, 11, FAULT);
        print(&log, 0, 12, "dmar_fault: 29 callbacks suppressed");
        send(&log, b"no record at all", SendFlags::empty()).unwrap();
        print(&log, 0, 13, FAULT);
        assert!(is_fault(reader.next_event().unwrap()));
        assert_eq!(
            reader.next_event().unwrap(),
            Some(KernelEvent::Suppressed(29))
        );
        assert!(is_fault(reader.next_event().unwrap()));
        assert_eq!(reader.next_event().unwrap(), None);
    }

    #[test]
    fn a_program_cannot_make_a_fault_up() {
        let (log, mut reader) = log();
        print(&log, 1, 10, FAULT);
        print(&log, 3, 11, FAULT);
        assert_eq!(reader.next_event().unwrap(), None);
    }

    #[test]
    fn says_how_many_records_were_overwritten() {
        let (log, mut reader) = log();
        print(&log, 0, 10, "first");
        print(&log, 0, 15, FAULT);
        print(&log, 0, 17, "last");
        assert_eq!(reader.next_event().unwrap(), Some(KernelEvent::Lost(4)));
        assert!(is_fault(reader.next_event().unwrap()));
        assert_eq!(reader.next_event().unwrap(), Some(KernelEvent::Lost(1)));
        assert_eq!(reader.next_event().unwrap(), None);
    }

    #[test]
    fn starts_at_the_end() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let old = FAULT.replace("Write", "Read");
        io::Write::write_all(&mut file, format!("3,1,1,-;{old}\n").as_bytes()).unwrap();
        let mut reader = FaultReader::open_at(file.path()).unwrap();
        io::Write::write_all(&mut file, format!("3,2,1,-;{FAULT}\n").as_bytes()).unwrap();
        assert!(is_fault(reader.next_event().unwrap()));
        assert_eq!(reader.next_event().unwrap(), None);
    }
}
