//! Selects functions: one by its address, all of a kind, or the virtual functions of one.
//!
//! | text | means |
//! | --- | --- |
//! | `0000:00:04.0`, `00:04.0` | this function |
//! | `vendor=8086,device=10c9` | every endpoint with these ids (hexadecimal) |
//! | `class=0108` | every endpoint of this class: 2, 4 or 6 digits of base class, sub-class, interface |
//! | `vfs-of:0000:01:00.0` | the virtual functions of this physical one |

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::error::PciError;
use crate::function::{FunctionInfo, FunctionKind, HostPci, some_of};
use farside_pci::Bdf;

/// A filter for functions; see the module's table for the text form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Filter {
    /// One function.
    Function(Bdf),
    /// Every endpoint that has all given properties; at least one is given.
    Kind(Kind),
    /// The virtual functions of this one.
    VfsOf(Bdf),
}

/// Ids and class, as far as given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Kind {
    /// Vendor id.
    pub vendor: Option<u16>,
    /// Device id.
    pub device: Option<u16>,
    /// The first digits of the class code.
    pub class: Option<ClassPrefix>,
}

/// The first 2, 4 or 6 digits of a class code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClassPrefix {
    value: u32,
    digits: u8,
}

/// An invalid filter.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "{text:?} names no PCI functions: {why}. Write an address (0000:01:00.0), ids or a class in \
     hexadecimal (vendor=8086,device=10c9 or class=0108), or vfs-of:0000:01:00.0"
)]
pub struct FilterError {
    text: String,
    why: String,
}

impl ClassPrefix {
    fn parse(text: &str) -> Option<Self> {
        let digits = u8::try_from(text.len()).ok()?;
        matches!(digits, 2 | 4 | 6).then_some(Self {
            value: hex(text)?,
            digits,
        })
    }

    fn matches(self, class: u32) -> bool {
        (class & 0xff_ffff) >> (4 * (6 - u32::from(self.digits))) == self.value
    }
}

impl Kind {
    /// The number of given properties that a function has, and the number given.
    fn score(&self, info: &FunctionInfo) -> (usize, usize) {
        let terms = [
            self.vendor.map(|vendor| vendor == info.vendor),
            self.device.map(|device| device == info.device),
            self.class.map(|class| class.matches(info.class)),
        ];
        let named = terms.iter().flatten().count();
        let met = terms.iter().flatten().filter(|met| **met).count();
        (met, named)
    }

    fn parse(text: &str) -> Result<Self, String> {
        let mut kind = Self::default();
        for term in text.split(',') {
            let (key, value) = term
                .split_once('=')
                .ok_or_else(|| format!("{term:?} is neither an address nor key=value"))?;
            let value = value.strip_prefix("0x").unwrap_or(value);
            let id = || {
                hex(value)
                    .and_then(|id| u16::try_from(id).ok())
                    .ok_or_else(|| format!("{value:?} is no id of up to four hexadecimal digits"))
            };
            let twice = match key {
                "vendor" => kind.vendor.replace(id()?).is_some(),
                "device" => kind.device.replace(id()?).is_some(),
                "class" => {
                    let class = ClassPrefix::parse(value).ok_or_else(|| {
                        format!("{value:?} is no class of 2, 4 or 6 hexadecimal digits")
                    })?;
                    kind.class.replace(class).is_some()
                }
                _ => return Err(format!("there is no key {key:?}")),
            };
            if twice {
                return Err(format!("{key} is there twice"));
            }
        }
        Ok(kind)
    }
}

fn hex(text: &str) -> Option<u32> {
    let all_digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_hexdigit());
    all_digits
        .then(|| u32::from_str_radix(text, 16).ok())
        .flatten()
}

impl FromStr for Filter {
    type Err = FilterError;

    fn from_str(text: &str) -> Result<Self, FilterError> {
        if let Ok(bdf) = text.parse() {
            return Ok(Self::Function(bdf));
        }
        let parsed = match text.strip_prefix("vfs-of:") {
            Some(pf) => pf
                .parse()
                .map(Self::VfsOf)
                .map_err(|_| "what follows vfs-of: is no PCI address".to_owned()),
            None => Kind::parse(text).map(Self::Kind),
        };
        let short = |text: &str| text.chars().take(100).collect();
        parsed.map_err(|why| FilterError {
            text: short(text),
            why: short(&why),
        })
    }
}

impl fmt::Display for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Function(bdf) => write!(f, "{bdf}"),
            Self::VfsOf(pf) => write!(f, "vfs-of:{pf}"),
            Self::Kind(kind) => {
                let terms = [
                    kind.vendor.map(|id| format!("vendor={id:04x}")),
                    kind.device.map(|id| format!("device={id:04x}")),
                    kind.class
                        .map(|c| format!("class={:0width$x}", c.value, width = c.digits.into())),
                ];
                let terms: Vec<String> = terms.into_iter().flatten().collect();
                f.write_str(&terms.join(","))
            }
        }
    }
}

impl TryFrom<String> for Filter {
    type Error = FilterError;

    fn try_from(text: String) -> Result<Self, FilterError> {
        text.parse()
    }
}

impl From<Filter> for String {
    fn from(filter: Filter) -> Self {
        filter.to_string()
    }
}

impl HostPci {
    /// The functions that a filter selects, in order; never empty.
    ///
    /// # Errors
    /// [`PciError::NothingMatches`] or [`PciError::NoFunction`], which name what
    /// comes close; sysfs cannot be read.
    pub fn select(&self, filter: &Filter) -> Result<Vec<FunctionInfo>, PciError> {
        let nothing = |near: String| {
            Err(PciError::NothingMatches {
                filter: filter.to_string(),
                near,
            })
        };
        match filter {
            Filter::Function(bdf) => Ok(vec![self.function(bdf)?]),
            Filter::VfsOf(pf) => {
                let info = self.function(pf)?;
                let vfs = self.vfs(pf)?;
                if vfs.is_empty() {
                    return nothing(match (info.sriov, info.physfn) {
                        (Some(sriov), _) => format!(
                            "{info} has none of its {} virtual functions; have them created first (--vfs)",
                            sriov.total
                        ),
                        (None, Some(parent)) => {
                            format!("{info} is itself a virtual function, of {parent}")
                        }
                        (None, None) => format!("{info} has no SR-IOV capability"),
                    });
                }
                vfs.iter().map(|vf| self.function(vf)).collect()
            }
            Filter::Kind(kind) => {
                let mut all = self.functions()?;
                all.retain(|info| info.kind == FunctionKind::Endpoint);
                let is_met = |info: &FunctionInfo| {
                    let (met, named) = kind.score(info);
                    met == named
                };
                if !all.iter().any(is_met) {
                    return nothing(near(&all, kind));
                }
                all.retain(is_met);
                Ok(all)
            }
        }
    }
}

/// The endpoints that come closest.
fn near(endpoints: &[FunctionInfo], kind: &Kind) -> String {
    if endpoints.is_empty() {
        return "it has no endpoints at all".into();
    }
    let closest: Vec<&FunctionInfo> = endpoints
        .iter()
        .filter(|info| kind.score(info).0 > 0)
        .collect();
    if closest.is_empty() {
        format!("it has {}", some_of(endpoints))
    } else {
        format!("close are {}", some_of(&closest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn reads_every_form_and_prints_it_back() {
        for text in [
            "0000:00:04.0",
            "vendor=8086,device=10c9",
            "device=10c9",
            "class=0108",
            "class=01",
            "class=010802",
            "vendor=1b36,class=0108",
            "vfs-of:0000:01:00.0",
        ] {
            let filter: Filter = text.parse().unwrap();
            assert_eq!(filter.to_string(), text);
        }
        assert_eq!(
            "00:04.0".parse::<Filter>().unwrap().to_string(),
            "0000:00:04.0"
        );
        assert_eq!(
            "vendor=0x8086".parse::<Filter>().unwrap().to_string(),
            "vendor=8086"
        );
    }

    #[test]
    fn refuses_what_is_no_filter_with_the_reason() {
        for (text, why) in [
            ("", "neither an address"),
            ("vendor=8086,", "neither an address"),
            ("vendor=", "no id"),
            ("vendor=18086", "no id"),
            ("vendor=+086", "no id"),
            ("class=1", "no class"),
            ("class=01080", "no class"),
            ("colour=red", "no key"),
            ("vendor=8086,vendor=1022", "twice"),
            ("vfs-of:eth0", "no PCI address"),
            ("0000:00:44.0", "neither an address"),
        ] {
            let error = text.parse::<Filter>().expect_err(text).to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn a_class_matches_by_its_first_digits() {
        let class = |text| ClassPrefix::parse(text).unwrap();
        assert!(class("01").matches(0x01_0802));
        assert!(class("0108").matches(0x01_0802));
        assert!(class("010802").matches(0x01_0802));
        assert!(!class("0106").matches(0x01_0802));
        assert!(!class("08").matches(0x01_0802));
        assert!(!class("00").matches(0x01_0802));
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text: String) {
            if let Ok(filter) = text.parse::<Filter>() {
                prop_assert_eq!(filter.to_string().parse(), Ok(filter));
            }
        }

        #[test]
        fn near_misses_do_not_panic(text in "(vendor|device|class|vfs-of)[=:,0-9a-fx.]{0,20}") {
            if let Ok(filter) = text.parse::<Filter>() {
                prop_assert_eq!(filter.to_string().parse(), Ok(filter));
            }
        }
    }
}
