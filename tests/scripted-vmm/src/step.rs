//! The steps of a script and their syntax.

use std::str::FromStr;

use anyhow::{Context, Error, Result, bail, ensure};

use crate::number::parse;

/// One step. A step first performs the steps that it requires.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// `map`: maps all RAM that is not mapped (`DMA_MAP`).
    Map,
    /// `unmap low|high|all`: unmaps RAM (`DMA_UNMAP`).
    Unmap(Part),
    /// `reset`: resets the device, as a booting VM does; discards the guest's set-up.
    Reset,
    /// `place`: sizes and places BARs, enables memory space, sets up MSI-X.
    Place,
    /// `before-bme [MS]`: submits a command while bus-master enable is clear, and watches
    /// for effects for that long (200).
    BeforeBme {
        /// Duration, milliseconds.
        ms: u64,
    },
    /// `bme`: sets bus-master enable and times it.
    Bme,
    /// `driver`: enables the NVMe controller.
    Driver,
    /// `io SIZE [OFFSET]`: writes a pattern to the namespace, reads it back to other
    /// memory, compares.
    Io {
        /// Bytes.
        bytes: u64,
        /// Offset in the namespace, bytes.
        offset: u64,
    },
    /// `interrupts N`: N reads of one block, on the queues in turn; each must raise one
    /// interrupt.
    Interrupts(u64),
    /// `rogue ADDRESS [SIZE]`: makes the device write to an address outside RAM, and checks
    /// that no RAM changed.
    Rogue {
        /// Destination.
        to: Target,
        /// Bytes (one page).
        bytes: u64,
    },
    /// `irqs`: reports interrupt counts.
    Irqs,
    /// `intx`: signals an eventfd by INTx instead of MSI-X.
    Intx,
    /// `peek REGION OFFSET`: reads 4 bytes of a BAR (0 to 5) or of configuration
    /// space (7).
    Peek {
        /// The region's number.
        region: u32,
        /// Bytes from its start.
        offset: u64,
    },
    /// `poke REGION OFFSET VALUE`: writes 4 bytes.
    Poke {
        /// The region's number.
        region: u32,
        /// Bytes from its start.
        offset: u64,
        /// The value.
        value: u32,
    },
    /// `latency [N]`: times N (1000) reads of configuration space and of a BAR.
    Latency(u64),
    /// `unbind`: unbinds the guest's driver: shutdown, disable, MSI-X off, bus-master
    /// enable off.
    Unbind,
    /// `reconnect`: disconnects, and connects as another VMM.
    Reconnect,
    /// `hold [LABEL]`: prints `ready LABEL` and waits for a line of input.
    Hold(String),
    /// `quit`: ends the run.
    Quit,
}

/// A part of guest RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// From 0 on.
    Low,
    /// From 4 GiB on.
    High,
    /// Both.
    All,
}

/// An address outside RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// `hole`: directly above low RAM.
    Hole,
    /// `above`: directly above all RAM.
    Above,
    /// A number.
    Address(u64),
}

/// Syntax of a script, for help and errors.
pub const GRAMMAR: &str = "map, unmap low|high|all, reset, place, before-bme [MS], bme, driver, \
io SIZE [OFFSET], interrupts N, rogue hole|above|ADDRESS [SIZE], irqs, intx, \
peek REGION OFFSET, poke REGION OFFSET VALUE, latency [N], unbind, reconnect, hold [LABEL], quit";

impl FromStr for Step {
    type Err = Error;

    fn from_str(line: &str) -> Result<Self> {
        let words: Vec<_> = line.split_whitespace().collect();
        let (verb, arguments) = words.split_first().context("an empty step")?;
        parse_step(verb, arguments)
            .with_context(|| format!("step `{}`; steps are: {GRAMMAR}", line.trim()))
    }
}

fn parse_step(verb: &str, arguments: &[&str]) -> Result<Step> {
    let number = |n: usize, default: Option<u64>| match (arguments.get(n), default) {
        (Some(word), _) => parse(word),
        (None, Some(default)) => Ok(default),
        (None, None) => bail!("`{verb}` needs a number"),
    };
    let (step, most) = match verb {
        "map" => (Step::Map, 0),
        "unmap" => (Step::Unmap(part(arguments.first())?), 1),
        "reset" => (Step::Reset, 0),
        "place" => (Step::Place, 0),
        "before-bme" => {
            let ms = number(0, Some(200))?;
            (Step::BeforeBme { ms }, 1)
        }
        "bme" => (Step::Bme, 0),
        "driver" => (Step::Driver, 0),
        "io" => {
            let (bytes, offset) = (number(0, None)?, number(1, Some(0))?);
            (Step::Io { bytes, offset }, 2)
        }
        "interrupts" => (Step::Interrupts(number(0, None)?), 1),
        "rogue" => {
            let to = match arguments.first() {
                Some(&"hole") => Target::Hole,
                Some(&"above") => Target::Above,
                _ => Target::Address(number(0, None)?),
            };
            let bytes = number(1, Some(crate::ram::PAGE))?;
            (Step::Rogue { to, bytes }, 2)
        }
        "irqs" => (Step::Irqs, 0),
        "intx" => (Step::Intx, 0),
        "peek" | "poke" => {
            let region = number(0, None)?.try_into().context("a region's number")?;
            let offset = number(1, None)?;
            if verb == "peek" {
                (Step::Peek { region, offset }, 2)
            } else {
                let value = number(2, None)?.try_into().context("4 bytes")?;
                let poke = Step::Poke {
                    region,
                    offset,
                    value,
                };
                (poke, 3)
            }
        }
        "latency" => (Step::Latency(number(0, Some(1000))?), 1),
        "unbind" => (Step::Unbind, 0),
        "reconnect" => (Step::Reconnect, 0),
        "hold" => (Step::Hold(arguments.join(" ")), usize::MAX),
        "quit" => (Step::Quit, 0),
        _ => bail!("there is no `{verb}`"),
    };
    ensure!(
        arguments.len() <= most,
        "`{verb}` takes no more than {most} arguments"
    );
    Ok(step)
}

fn part(word: Option<&&str>) -> Result<Part> {
    match word {
        Some(&"low") => Ok(Part::Low),
        Some(&"high") => Ok(Part::High),
        Some(&"all") => Ok(Part::All),
        _ => bail!("`unmap` needs low, high or all"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_become_steps() {
        let io = |bytes, offset| Step::Io { bytes, offset };
        let rogue = |to, bytes| Step::Rogue { to, bytes };
        for (line, step) in [
            ("map", Step::Map),
            ("unmap high", Step::Unmap(Part::High)),
            ("io 8M", io(8 << 20, 0)),
            (" io  64K 1M ", io(64 << 10, 1 << 20)),
            ("rogue hole", rogue(Target::Hole, 4096)),
            (
                "rogue 0xfee00000 8K",
                rogue(Target::Address(0xfee0_0000), 8192),
            ),
            (
                "peek 7 0x4",
                Step::Peek {
                    region: 7,
                    offset: 4,
                },
            ),
            (
                "poke 0 0x60 0xffffffff",
                Step::Poke {
                    region: 0,
                    offset: 0x60,
                    value: u32::MAX,
                },
            ),
            ("before-bme", Step::BeforeBme { ms: 200 }),
            ("hold after bme", Step::Hold("after bme".into())),
        ] {
            assert_eq!(line.parse::<Step>().unwrap(), step, "{line}");
        }
    }

    #[test]
    fn bad_steps_are_named_with_what_would_do() {
        for line in [
            "",
            "io",
            "io x",
            "io 1 2 3",
            "jump",
            "unmap",
            "unmap top",
            "map 3",
            "poke 0 0x60",
            "poke 0 0x60 0x100000000",
        ] {
            let error = format!("{:#}", line.parse::<Step>().unwrap_err());
            assert!(line.is_empty() || error.contains(line), "{error}");
            assert!(line.is_empty() || error.contains("reconnect"), "{error}");
        }
    }
}
