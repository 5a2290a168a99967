//! What the guest writes to its borrowed drive: a chain of records, each of which
//! begins with the hash of all before it.

use anyhow::{Context, Result, ensure};
use farside_testbed::Guest;

use crate::SHORT;

/// Bytes of a record.
const RECORD: usize = 4096;

const DISK: &str = "/dev/nvme0n1";

/// The chain as it should be.
#[derive(Default)]
pub struct Chain {
    records: usize,
    /// Of all records, as the guest saw them when it had written the last.
    hash: Option<String>,
}

impl Chain {
    /// Has the guest add a record. It is not flushed: what has been written is on
    /// the medium when the VM has moved, whether or not the guest asks for that.
    pub fn grow(&mut self, guest: &Guest) -> Result<()> {
        let count = self.records;
        sh(
            guest,
            &format!(
                "h=$({}); (printf %s \"$h\"; head -c {} /dev/urandom) >/tmp/record && \
                 dd if=/tmp/record of={DISK} bs={RECORD} seek={count} oflag=direct 2>/tmp/dd || \
                 (cat /tmp/dd >&2; false)",
                hash(count),
                RECORD - 64,
            ),
        )?;
        self.records += 1;
        self.hash = Some(sh(guest, &hash(self.records))?);
        Ok(())
    }

    /// Has the guest read every record, and compare.
    pub fn verify(&self, guest: &Guest) -> Result<()> {
        let Some(expected) = &self.hash else {
            return Ok(());
        };
        let found = sh(guest, &hash(self.records))?;
        ensure!(
            found == *expected,
            "{} records have hash {found}, not {expected}",
            self.records
        );
        // The older links were looked at when they were new, and are part of what was
        // hashed now.
        let last = self.records - 1;
        let link = sh(
            guest,
            &format!("dd if={DISK} bs={RECORD} skip={last} count=1 2>/dev/null | head -c 64"),
        )?;
        let before = sh(guest, &hash(last))?;
        ensure!(
            link == before,
            "record {last} begins with {link}, and what is before it has hash {before}"
        );
        Ok(())
    }

    /// How many records there are.
    pub fn records(&self) -> usize {
        self.records
    }
}

/// The command that prints the hash of the first records.
fn hash(count: usize) -> String {
    format!("dd if={DISK} bs={RECORD} count={count} 2>/dev/null | sha256sum | head -c 64")
}

fn sh(guest: &Guest, command: &str) -> Result<String> {
    let printed = guest.exec_ok(command, SHORT).context("in the guest")?;
    Ok(printed.trim().to_owned())
}
