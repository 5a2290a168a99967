//! The guest's data on its borrowed disk: a chain of records, each of which begins with the
//! hash of all preceding ones.

use anyhow::{Context, Result, ensure};
use farside_testbed::Guest;

use crate::SHORT;

/// Bytes of a record.
const RECORD: usize = 4096;

const DISK: &str = "/dev/nvme0n1";

/// The expected chain.
#[derive(Default)]
pub struct Chain {
    records: usize,
    /// Hash of all records, computed in the guest after the last was written.
    hash: Option<String>,
}

impl Chain {
    /// Appends a record in the guest. It is not flushed: after a migration, written data
    /// must be on the medium without a flush by the guest.
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

    /// Reads every record in the guest, and compares.
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
        // Older records were compared when they were new, and the hash covers them now.
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

    /// The hash of all records, once there is one.
    pub fn hash(&self) -> Option<&str> {
        self.hash.as_deref()
    }

    /// Bytes of all records.
    pub fn bytes(&self) -> usize {
        self.records * RECORD
    }

    /// The number of records.
    pub fn records(&self) -> usize {
        self.records
    }
}

/// The command that prints the hash of the first `count` records.
fn hash(count: usize) -> String {
    format!("dd if={DISK} bs={RECORD} count={count} 2>/dev/null | sha256sum | head -c 64")
}

fn sh(guest: &Guest, command: &str) -> Result<String> {
    let printed = guest.exec_ok(command, SHORT).context("in the guest")?;
    Ok(printed.trim().to_owned())
}
