//! Kernel command lines of guests.

use std::fs;
use std::ops::RangeInclusive;

use crate::Accel;

/// An emulated serial console is slow, so it shows only warnings and the output of
/// processes. Without `no_timer_check` Linux panics, or does without a working timer, if it
/// sees no timer interrupt within 10 jiffies of its own busy loop, which an emulated CPU on
/// a loaded host can miss.
const ALWAYS: &str = "console=ttyS0 quiet loglevel=5 panic=0 no_timer_check";

/// Disables features that cost an emulated CPU time and no test needs: this reduces the
/// time to init to three quarters.
pub(crate) const EMULATED: &str =
    "mitigations=off cryptomgr.notests nokaslr audit=0 i8042.nokbd i8042.noaux";

/// Ticks per second of Debian's kernel. With a higher HZ, its delays are longer.
const HZ: u64 = 250;

/// Plausible TSC frequencies, in kHz.
const PLAUSIBLE_TSC: RangeInclusive<u64> = 500_000..=10_000_000;

/// The kernel parameters of a guest on `accel`.
pub(crate) fn kernel_args(accel: Accel) -> String {
    let tsc = fs::read_to_string("/proc/cpuinfo")
        .ok()
        .and_then(|text| tsc_khz(&text));
    match (accel, tsc) {
        (Accel::Tcg, Some(khz)) => format!("{ALWAYS} {EMULATED} {}", timers(khz)),
        (Accel::Tcg, None) => format!("{ALWAYS} {EMULATED}"),
        (Accel::Kvm, _) => ALWAYS.to_owned(),
    }
}

/// Timers that need no calibration. An emulated guest calibrates its TSC against the PIT,
/// and on its second CPU a delay loop against the timer interrupts of the first; on a
/// loaded host these are late, in bursts or absent during calibration. Its TSC is the
/// host's, on all CPUs, so the frequency is known.
fn timers(tsc_khz: u64) -> String {
    let loops_per_jiffy = tsc_khz * 1000 / HZ;
    format!("tsc=reliable tsc_early_khz={tsc_khz} lpj={loops_per_jiffy}")
}

/// The TSC frequency of the host's kernel: `/proc/cpuinfo` shows twice the MHz as bogomips.
fn tsc_khz(cpuinfo: &str) -> Option<u64> {
    let line = cpuinfo.lines().find(|line| line.starts_with("bogomips"))?;
    let bogomips: f64 = line.split_once(':')?.1.trim().parse().ok()?;
    let khz = (bogomips * 500.0) as u64;
    PLAUSIBLE_TSC.contains(&khz).then_some(khz)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tsc_runs_at_half_of_the_bogomips() {
        let cpuinfo = "processor\t: 0\ncpu MHz\t\t: 1200.000\nbogomips\t: 4890.84\n";
        assert_eq!(tsc_khz(cpuinfo), Some(2_445_420));
        for odd in ["", "bogomips\t: x\n", "bogomips\t: 38.40\n"] {
            assert_eq!(tsc_khz(odd), None, "{odd:?}");
        }
    }

    #[test]
    fn a_second_of_the_delay_loop_is_a_second_of_the_tsc() {
        let text = timers(2_445_420);
        assert_eq!(text, "tsc=reliable tsc_early_khz=2445420 lpj=9781680");
    }

    #[test]
    fn kvm_has_a_clock_of_its_own() {
        assert_eq!(kernel_args(Accel::Kvm), ALWAYS);
    }
}
