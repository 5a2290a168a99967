//! What hosts do with a namespace that they share, by nvme-cli in a guest.

use anyhow::{Context, Result, bail};

/// A guest that has nvme-cli, by which it runs a command of its shell to a successful end, and its key.
pub struct Reserving<'a> {
    /// Runs a command.
    pub sh: &'a dyn Fn(&str) -> Result<String>,
    /// Its host identifier, and its key. One byte.
    pub key: u8,
}

/// A type of reservation (NVM Express 1.4, figure 445).
pub type Kind = u8;

/// Others may read.
pub const WRITE_EXCLUSIVE: Kind = 1;
/// Others may do nothing.
pub const EXCLUSIVE_ACCESS: Kind = 2;
/// Who has not registered may read.
pub const WRITE_EXCLUSIVE_REGISTRANTS_ONLY: Kind = 3;

/// How a reservation is acquired (figure 446, RACQA).
pub type Action = u8;

/// A type of notification (NVM Express 1.4, 5.14.1.16.1): another host has taken its registration.
pub const REGISTRATION_PREEMPTED: u8 = 1;
/// The type if there is no notification.
pub const NO_NOTIFICATION: u8 = 0;

/// If nobody has it.
pub const ACQUIRE: Action = 0;
/// It and registrations are taken from another host.
pub const PREEMPT: Action = 1;
/// The I/O of that host ends first.
pub const PREEMPT_AND_ABORT: Action = 2;

impl Reserving<'_> {
    fn nvme(&self, command: &str) -> Result<String> {
        (self.sh)(&format!("nvme {command}"))
    }

    /// Gives its controller a host identifier. Linux gives a PCIe controller none.
    ///
    /// # Errors
    /// The command fails.
    pub fn identify(&self) -> Result<()> {
        let id = format!("\\x{:02x}{}", self.key, "\\0".repeat(15));
        let set = "nvme set-feature /dev/nvme0 -f 0x81 --value=1 -l 16 -d /tmp/id";
        (self.sh)(&format!("printf '{id}' >/tmp/id && {set}")).map(drop)
    }

    /// Registers.
    ///
    /// # Errors
    /// The command fails.
    pub fn register(&self) -> Result<()> {
        let command = format!("resv-register /dev/nvme0n1 --nrkey={} --rrega=0", self.key);
        self.nvme(&command).map(drop)
    }

    /// Acquires the reservation; from the host with the key `preempted`.
    ///
    /// # Errors
    /// The command fails.
    pub fn acquire(&self, kind: Kind, action: Action, preempted: u8) -> Result<()> {
        let key = self.key;
        let command = format!(
            "resv-acquire /dev/nvme0n1 --crkey={key} --prkey={preempted} --rtype={kind} --racqa={action}"
        );
        self.nvme(&command).map(drop)
    }

    /// Releases it.
    ///
    /// # Errors
    /// The command fails.
    pub fn release(&self, kind: Kind) -> Result<()> {
        let key = self.key;
        let command = format!("resv-release /dev/nvme0n1 --crkey={key} --rtype={kind} --rrela=0");
        self.nvme(&command).map(drop)
    }

    /// The reservation's type, and the keys of the registrants.
    ///
    /// # Errors
    /// The command fails, or prints something else.
    pub fn report(&self) -> Result<(u64, Vec<u64>)> {
        let text = self.nvme("resv-report /dev/nvme0n1 --eds --output-format=json")?;
        let report: serde_json::Value = serde_json::from_str(&text)?;
        let number = |value: &serde_json::Value, of: &str| {
            value[of].as_u64().with_context(|| format!("{of}: {text}"))
        };
        let listed = report["regctlext"].as_array();
        let listed = listed.with_context(|| format!("registrants: {text}"))?;
        let keys = listed.iter().map(|it| number(it, "rkey"));
        Ok((number(&report, "rtype")?, keys.collect::<Result<_, _>>()?))
    }

    /// The type of the oldest notification about what another host did, which it takes from the log, and how many are
    /// left.
    ///
    /// # Errors
    /// The command fails, or prints something else.
    pub fn notification(&self) -> Result<(u8, u8)> {
        let log =
            self.nvme("resv-notif-log /dev/nvme0 --output-format=binary | od -A n -t u1 -v")?;
        let bytes = log.split_whitespace().map(str::parse);
        let bytes: Vec<u8> = bytes.collect::<Result<_, _>>().context("a log page")?;
        match *bytes.as_slice() {
            [_, _, _, _, _, _, _, _, kind, left, ..] => Ok((kind, left)),
            _ => bail!("a log page: {log}"),
        }
    }

    /// Whether it may read, and write.
    ///
    /// # Errors
    /// The guest does not answer.
    pub fn may(&self) -> Result<(bool, bool)> {
        let may = |copy: &str| {
            let command =
                format!("dd {copy} bs=4k count=1 2>/dev/null && echo may || echo may not");
            anyhow::Ok((self.sh)(&command)?.trim() == "may")
        };
        Ok((
            may("if=/dev/nvme0n1 of=/dev/null iflag=direct")?,
            may("if=/dev/zero of=/dev/nvme0n1 seek=8 oflag=direct")?,
        ))
    }
}
