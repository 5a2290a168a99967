//! A VM's description in TOML, for `farside serve` and `farside qemu`.
//!
//! ```toml
//! name = "web1"
//! devices = ["disk0"]
//! memory = "4 GiB"
//! cpus = 2
//! ```

use std::path::Path;

use anyhow::Context;
use farside_backend::Interrupts;
use farside_control::Address;
use farside_fabric::pin::PinPolicy;
use farside_host_pci::Bdf;
use serde::Deserialize;

use crate::{
    args::{AccelArg, HugePagesArg, MachineArg},
    text::parse_size,
};

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub(crate) struct VmFile {
    /// The VM's name.
    pub(crate) name: Option<String>,
    /// Ids of the devices it borrows, in the order of its root ports.
    pub(crate) devices: Vec<String>,
    /// Where the lenders are.
    pub(crate) lenders: Vec<Address>,
    /// This host's NTB endpoint.
    pub(crate) ntb: Option<Bdf>,
    /// `direct` or `relayed`.
    pub(crate) interrupts: Option<Interrupts>,
    /// `require` or `prefer`.
    pub(crate) pin: Option<PinPolicy>,
    /// Seconds.
    pub(crate) open_timeout: Option<u64>,
    /// Guest RAM.
    #[serde(deserialize_with = "size")]
    pub(crate) memory: Option<u64>,
    pub(crate) cpus: Option<u32>,
    pub(crate) machine: Option<MachineArg>,
    pub(crate) accel: Option<AccelArg>,
    pub(crate) hugepages: Option<HugePagesArg>,
}

impl VmFile {
    /// The file at `path`, or nothing at all.
    pub(crate) fn load(path: Option<&Path>) -> anyhow::Result<Self> {
        let Some(path) = path else {
            return Ok(Self::default());
        };
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        toml::from_str(&text).with_context(|| format!("in {}", path.display()))
    }
}

fn size<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    let text = String::deserialize(deserializer)?;
    parse_size(&text)
        .map(Some)
        .map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_keys_are_errors() {
        let error = toml::from_str::<VmFile>("memroy = \"4G\"").unwrap_err();
        assert!(error.to_string().contains("memroy"), "{error}");
    }

    #[test]
    fn the_example_parses() {
        let text = "name = \"web1\"\ndevices = [\"disk0\"]\nmemory = \"4 GiB\"\ncpus = 2";
        let file: VmFile = toml::from_str(text).unwrap();
        assert_eq!(file.memory, Some(4 << 30));
    }
}
