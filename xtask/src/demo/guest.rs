//! The demo's part in the guest.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use farside_testbed::{Progress, Vm};
use serde::Deserialize;

use crate::scene::SHORT;

/// The guest's file, relative to the file system.
pub(super) const FILE: &str = "/data";
/// Its size.
pub(super) const FILE_SIZE: u64 = 256 << 20;

/// Timeout for the whole file, in an emulated guest on a loaded machine.
const LONG: Duration = Duration::from_secs(300);
/// Length of the fio run, seconds.
const FIO_SECONDS: u32 = 3;
/// The same while processes are killed.
const FIO_SECONDS_OF_KILLS: u32 = 10;
/// What the kernel logs of failed I/O.
const IO_ERRORS: &str =
    "I/O error|critical .* error|nvme.*(timeout|reset|controller is down)|EXT4-fs error";

/// The guest's facts.
#[derive(Clone, Debug, Default)]
pub(super) struct GuestFacts {
    pub(super) kernel: String,
    /// `lspci -v` of the device.
    pub(super) lspci: String,
    /// SHA-256 of the written data, computed before the write.
    pub(super) sha256_written: String,
    /// SHA-256 of the data read back.
    pub(super) sha256_read: String,
    /// Bytes read back from the disk, rather than from the page cache.
    pub(super) bytes_read_back: u64,
    pub(super) fio: Fio,
    /// Lines about failed I/O in the kernel's log.
    pub(super) io_errors: u64,
}

/// fio's figures.
#[derive(Clone, Debug, Default)]
pub(super) struct Fio {
    pub(super) read: Direction,
    pub(super) write: Direction,
}

/// One direction of an fio job, as fio's JSON has it.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct Direction {
    pub(super) iops: f64,
    pub(super) bw_bytes: f64,
    pub(super) clat_ns: Latency,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct Latency {
    pub(super) mean: f64,
    #[serde(default)]
    pub(super) max: f64,
}

/// Uses the disk, from file system to fio. With `kills`, long enough for some.
pub(super) fn use_drive(vm: &Vm, progress: &Progress, kills: bool) -> Result<GuestFacts> {
    let step = |label: &'static str, command: &str, timeout| -> Result<String> {
        let task = progress.spinner(label);
        let output = vm.exec_ok(&format!("set -e -o pipefail; {command}"), timeout)?;
        task.done();
        Ok(output)
    };
    let mut facts = GuestFacts {
        kernel: vm.kernel_release(),
        ..GuestFacts::default()
    };
    vm.wait_path("/dev/nvme0n1", SHORT)?;
    facts.lspci = step(
        "Guest: finding the disk",
        "lspci -v -s $(basename $(readlink -f /sys/block/nvme0n1/device/device))",
        SHORT,
    )?;
    step(
        "Guest: making a file system (ext4)",
        "mkfs.ext4 -q /dev/nvme0n1; modprobe ext4; mount -t ext4 /dev/nvme0n1 /mnt",
        SHORT,
    )?;
    // The checksum is of the stream, not of the file system's contents.
    facts.sha256_written = checksum(&step(
        "Guest: writing 256 MiB of random data",
        &format!(
            "dd if=/dev/urandom bs=1M count={} iflag=fullblock 2>/dev/null \
             | tee /mnt{FILE} | sha256sum; sync",
            FILE_SIZE >> 20
        ),
        LONG,
    )?)?;
    let before = bytes_read(vm)?;
    facts.sha256_read = checksum(&step(
        "Guest: reading it back from the disk",
        &format!("echo 3 > /proc/sys/vm/drop_caches; sha256sum /mnt{FILE}"),
        LONG,
    )?)?;
    facts.bytes_read_back = bytes_read(vm)? - before;
    let seconds = if kills {
        FIO_SECONDS_OF_KILLS
    } else {
        FIO_SECONDS
    };
    facts.fio = fio(&step(
        "Guest: running fio",
        &format!(
            "fio --name=demo --filename=/mnt/fio --size=64M --rw=randrw --bs=4k --iodepth=16 \
             --direct=1 --ioengine=io_uring --time_based --runtime={seconds} \
             --output-format=json"
        ),
        LONG,
    )?)?;
    step("Guest: unmounting", "umount /mnt", SHORT)?;
    let count = vm.exec_ok(&format!("dmesg | grep -c -E '{IO_ERRORS}' || true"), SHORT)?;
    facts.io_errors = count.trim().parse().context("a count of lines")?;
    Ok(facts)
}

/// Bytes read from the disk so far.
fn bytes_read(vm: &Vm) -> Result<u64> {
    let stat = vm.exec_ok("cat /sys/block/nvme0n1/stat", SHORT)?;
    // Field 3: sectors of 512 bytes, whatever the disk's block size.
    let sectors = stat.split_whitespace().nth(2);
    let sectors: u64 = sectors
        .and_then(|field| field.parse().ok())
        .with_context(|| format!("malformed block statistics: {stat}"))?;
    Ok(sectors * 512)
}

/// The checksum in a line of `sha256sum`.
fn checksum(line: &str) -> Result<String> {
    let sum = line.split_whitespace().next().unwrap_or_default();
    ensure!(
        sum.len() == 64 && sum.bytes().all(|byte| byte.is_ascii_hexdigit()),
        "no checksum: {line:?}"
    );
    Ok(sum.to_owned())
}

fn fio(output: &str) -> Result<Fio> {
    #[derive(Deserialize)]
    struct Output {
        jobs: [Job; 1],
    }
    #[derive(Deserialize)]
    struct Job {
        error: i32,
        read: Direction,
        write: Direction,
    }
    let json = output.find('{').map_or(output, |start| &output[start..]);
    let output: Output = serde_json::from_str(json).context("reading fio's JSON")?;
    let [job] = output.jobs;
    ensure!(job.error == 0, "fio reports error {}", job.error);
    Ok(Fio {
        read: job.read,
        write: job.write,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fio_output_is_read_and_its_errors_are_seen() {
        let output = |error| {
            format!(
                r#"note: something
{{"fio version": "fio-3.39", "jobs": [{{"jobname": "demo", "error": {error},
  "read": {{"iops": 10.5, "bw_bytes": 43008, "clat_ns": {{"mean": 5000.5, "N": 3}}}},
  "write": {{"iops": 9, "bw_bytes": 36864, "clat_ns": {{"mean": 1}}}}}}]}}"#
            )
        };
        let fio_result = fio(&output(0)).unwrap();
        assert_eq!(fio_result.read.iops, 10.5);
        assert_eq!(fio_result.write.bw_bytes, 36864.0);
        assert!(fio(&output(5)).unwrap_err().to_string().contains("error 5"));
        assert!(fio("").is_err());
    }

    #[test]
    fn a_checksum_is_64_hexadecimal_digits() {
        let sum = "ab".repeat(32);
        assert_eq!(checksum(&format!("{sum}  -\n")).unwrap(), sum);
        assert!(checksum("sha256sum: no such file").is_err());
        assert!(checksum("").is_err());
    }
}
