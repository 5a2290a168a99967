//! Leases that go on over another connection.
//!
//! When the connection of a medium's lease is cut, its borrower connects anew and sends what has no
//! answer again. That is right only if nobody has changed the medium since, and if what the borrower
//! was told is done is still so. So a lease is named by a secret, its chain, which lives as long as both
//! are certain: it ends with the lease's return, with a lease of anybody else, with a flush that has failed,
//! with another medium, and with this host's system, whose cache had the writes that were not flushed.

use std::{
    sync::OnceLock,
    time::{Duration, Instant},
};

use farside_daemon::VmName;
use farside_devices::block::ImageId;
use farside_lender_protocol::{ErrorKind, KeptFor, RemoteError, Secret};
use serde::{Deserialize, Serialize};

use crate::lease_owner::LeaseOwner;

/// Names the running system where /proc is hidden, as by the packaged unit.
const BOOT_VARIABLE: &str = "FARSIDE_BOOT_ID";

const BOOT_FILE: &str = "/proc/sys/kernel/random/boot_id";

/// The lease that may go on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Chain {
    pub(crate) vm: VmName,
    pub(crate) secret: Secret,
    pub(crate) medium: ImageId,
    /// The system that has unflushed writes.
    pub(crate) boot: String,
    /// Time for which the device is kept after a cut.
    pub(crate) keep_ms: u64,
}

impl Chain {
    /// The first lease of a chain.
    pub(crate) fn start(vm: &VmName, medium: ImageId, keep: Duration) -> std::io::Result<Self> {
        Ok(Self {
            vm: vm.clone(),
            secret: Secret::random()?,
            medium,
            boot: boot()?.to_owned(),
            keep_ms: keep.as_millis() as u64,
        })
    }

    /// Checks that the chain `kept` of a device goes on with a lease of `vm`.
    pub(crate) fn check(
        kept: Option<&Self>,
        vm: &VmName,
        secret: Secret,
        medium: ImageId,
    ) -> Result<(), String> {
        let Some(kept) = kept.filter(|kept| kept.vm == *vm && kept.secret == secret) else {
            return Err("its lease has ended since: the device was returned, revoked, or borrowed anew, or a flush has failed".into());
        };
        match kept.goes_on_with(medium) {
            true => Ok(()),
            false if kept.medium != medium => Err("it has another medium now".into()),
            false => {
                Err("the lender's host has restarted: writes that were not flushed are lost".into())
            }
        }
    }

    /// Whether the medium, and the system with its cache, are those of the chain.
    pub(crate) fn goes_on_with(&self, medium: ImageId) -> bool {
        let same_system = || boot().is_ok_and(|boot| *boot == self.boot);
        self.medium == medium && (medium.is_empty() || same_system())
    }
}

/// The refusal of a lease that does not go on.
pub(crate) fn ended(id: &str, vm: &VmName, why: &str) -> RemoteError {
    RemoteError {
        kind: ErrorKind::ChainEnded,
        message: format!("device {id} cannot be used further by VM {vm}: {why}"),
    }
}

/// The number of the running system of this host.
pub(crate) fn boot_number() -> std::io::Result<[u8; 16]> {
    let number = u128::from_str_radix(boot()?, 16);
    number.map(u128::to_be_bytes).map_err(std::io::Error::other)
}

/// The running system of this host.
fn boot() -> std::io::Result<&'static str> {
    static BOOT: OnceLock<String> = OnceLock::new();
    if let Some(boot) = BOOT.get() {
        return Ok(boot);
    }
    let boot = match std::env::var(BOOT_VARIABLE) {
        Ok(text) => boot_id(BOOT_VARIABLE, &text)?,
        Err(_) => {
            let text = std::fs::read_to_string(BOOT_FILE).map_err(|error| {
                let text = format!("cannot read {BOOT_FILE}, nor {BOOT_VARIABLE}: {error}");
                std::io::Error::new(error.kind(), text)
            })?;
            boot_id(BOOT_FILE, &text)?
        }
    };
    Ok(BOOT.get_or_init(|| boot))
}

/// The 128 bits of `text`, with dashes as the kernel writes them, or without as systemd does. Anything
/// else, such as a specifier that was not expanded, would name all systems.
fn boot_id(of: &str, text: &str) -> std::io::Result<String> {
    let boot = text.trim().replace('-', "").to_ascii_lowercase();
    let is_hex = boot.len() == 32 && boot.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hex.then_some(boot).ok_or_else(|| {
        let text = format!("{of} has {text:?}, and not the 32 hexadecimal digits of a boot id");
        std::io::Error::new(std::io::ErrorKind::InvalidData, text)
    })
}

/// A device whose connection was cut.
#[derive(Clone, Debug)]
pub(crate) struct Kept {
    pub(crate) owner: LeaseOwner,
    pub(crate) since: Instant,
    pub(crate) until: Instant,
}

impl Kept {
    pub(crate) fn from_now(owner: LeaseOwner, chain: &Chain, at_most: Duration) -> Self {
        let since = Instant::now();
        Self {
            owner,
            since,
            until: since + Duration::from_millis(chain.keep_ms).min(at_most),
        }
    }

    /// For a list, unless its time is over.
    pub(crate) fn shown(&self) -> Option<KeptFor> {
        let left = self.until.checked_duration_since(Instant::now())?;
        Some(KeptFor {
            vm: self.owner.vm().clone(),
            seconds: self.since.elapsed().as_secs(),
            left: left.as_secs() + 1,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boot_id_is_the_same_in_both_forms_and_nothing_else_is_one() {
        let plain = "0c1d2e3f405162738495a6b7c8d9eaf0";
        for text in [plain, "0C1D2E3F-4051-6273-8495-a6b7c8d9eaf0\n"] {
            assert_eq!(boot_id(BOOT_FILE, text).unwrap(), plain);
        }
        for text in ["", "%b", "0", &plain[1..], &plain.replace('0', "g")] {
            let error = boot_id(BOOT_VARIABLE, text).unwrap_err().to_string();
            assert!(error.contains(BOOT_VARIABLE), "{error}");
        }
        let here = boot().unwrap();
        assert_eq!(boot_id(BOOT_FILE, here).unwrap(), here);
    }
}
