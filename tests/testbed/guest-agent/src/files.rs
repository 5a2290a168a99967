//! Files in the guest: reading, writing, waiting for creation or removal.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use farside_guest_agent::MAX_OUTPUT;

/// Polling interval of [`wait`]. sysfs and devtmpfs have no event for every kind of path,
/// and a poll costs microseconds.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Writes `data` at `offset`; offset 0 truncates the file.
pub fn write(path: &str, offset: u64, data: &[u8]) -> Result<()> {
    if let Some(directory) = Path::new(path).parent() {
        fs::create_dir_all(directory)
            .with_context(|| format!("creating {}", directory.display()))?;
    }
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(offset == 0)
        .open(path)
        .with_context(|| format!("opening {path}"))?;
    file.write_all_at(data, offset)
        .with_context(|| format!("writing {path}"))
}

/// Reads up to `len` bytes at `offset`.
pub fn read(path: &str, offset: u64, len: u64) -> Result<Vec<u8>> {
    let len = usize::try_from(len).unwrap_or(usize::MAX);
    ensure!(
        len <= MAX_OUTPUT,
        "{len} bytes at once; at most {MAX_OUTPUT}"
    );
    let file = File::open(path).with_context(|| format!("opening {path}"))?;
    let mut data = vec![0; len];
    let mut done = 0;
    while done < len {
        let n = file
            .read_at(&mut data[done..], offset + done as u64)
            .with_context(|| format!("reading {path}"))?;
        if n == 0 {
            break;
        }
        done += n;
    }
    data.truncate(done);
    Ok(data)
}

/// Waits until `path` exists, or no longer exists.
pub fn wait(path: &str, present: bool, timeout: Duration) -> Result<()> {
    let deadline = Instant::now() + timeout;
    while Path::new(path).exists() != present {
        if Instant::now() >= deadline {
            let state = if present { "not there" } else { "still there" };
            bail!("{path} is {state} after {timeout:?}");
        }
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}
