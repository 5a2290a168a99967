//! A process in the guest that counts, and writes each number to the guest's own disk:
//! number N to sector N, flushed before the next one.

use std::{fs::File, io::Read, path::Path};

use anyhow::{Context, Result, ensure};
use farside_testbed::Vm;
use farside_tests::SHORT;

/// The guest's own disk.
pub const DISK: &str = "/dev/vda";

const SECTOR: usize = 512;

const PROGRAM: &str = "/run/count.sh";

const TEXT: &str = "n=0
while [ ! -e /run/stop ]; do
    n=$((n + 1))
    printf %020d $n | dd of=/dev/vda bs=512 seek=$n conv=notrunc,sync,fsync 2>/run/dd || exit 1
    echo $n >/run/number.new && mv /run/number.new /run/number
done
";

/// The process at its start.
pub struct Counter {
    /// Process id and start time, in the guest's clock ticks.
    process: String,
    /// The guest's boot id.
    boot: String,
    /// The last number seen.
    last: u64,
}

impl Counter {
    /// Starts it.
    pub fn start(guest: &Vm) -> Result<Self> {
        guest.write_file(PROGRAM, TEXT.as_bytes())?;
        let command = format!("sh {PROGRAM} </dev/null >/dev/null 2>&1 & echo $! >/run/pid");
        guest.exec_ok(&command, SHORT)?;
        guest.wait_path("/run/number", SHORT)?;
        let mut counter = Self {
            process: process(guest)?,
            boot: boot(guest)?,
            last: 0,
        };
        counter.goes_on(guest)?;
        Ok(counter)
    }

    /// Checks that the same process runs in the same guest, and keeps counting. Returns the
    /// number.
    pub fn goes_on(&mut self, guest: &Vm) -> Result<u64> {
        let (boot, process) = (boot(guest)?, process(guest)?);
        ensure!(
            boot == self.boot,
            "the guest has booted: {boot}, {}",
            self.boot
        );
        ensure!(
            process == self.process,
            "another process: {process}, {}",
            self.process
        );
        let first = number(guest)?;
        ensure!(
            first >= self.last,
            "it was at {}, and is at {first}",
            self.last
        );
        // It continues to write meanwhile.
        let command = format!("while [ $(cat /run/number) -le {first} ]; do :; done");
        guest
            .exec_ok(&command, SHORT)
            .context("it does not count on")?;
        self.last = number(guest)?;
        Ok(self.last)
    }

    /// Stops it, and checks the disk's contents from outside the guest.
    pub fn stop(mut self, guest: &Vm, image: &Path) -> Result<u64> {
        self.goes_on(guest)?;
        guest.exec_ok(
            "touch /run/stop; while [ -e /proc/$(cat /run/pid) ]; do :; done",
            SHORT,
        )?;
        let last = number(guest)?;
        let mut bytes = Vec::new();
        File::open(image)?.read_to_end(&mut bytes)?;
        let mut sectors = bytes.chunks(SECTOR).skip(1);
        for expected in 1..=last {
            let sector = sectors.next().context("the disk is too small")?;
            let text = String::from_utf8_lossy(&sector[..20]);
            ensure!(
                text.parse() == Ok(expected),
                "sector {expected} of {last} has {text:?}"
            );
        }
        ensure!(sectors.all(|sector| sector.iter().all(|byte| *byte == 0)));
        Ok(last)
    }
}

fn number(guest: &Vm) -> Result<u64> {
    let text = guest.exec_ok("cat /run/number", SHORT)?;
    text.trim().parse().with_context(|| text.clone())
}

fn process(guest: &Vm) -> Result<String> {
    // Field 22 of `stat`; the name of a shell has no blanks.
    let command = "pid=$(cat /run/pid); echo $pid $(cut -d ' ' -f 22 /proc/$pid/stat)";
    let text = guest.exec_ok(command, SHORT).context("it has ended")?;
    ensure!(text.split_whitespace().count() == 2, "it has ended: {text}");
    Ok(text.trim().to_owned())
}

fn boot(guest: &Vm) -> Result<String> {
    guest.exec_ok("cat /proc/sys/kernel/random/boot_id", SHORT)
}
