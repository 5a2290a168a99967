//! Ctrl-C and SIGTERM.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use farside_daemon::Wakeup;
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1},
    iterator::Signals,
};

/// A SIGHUP and the SIGTERM that follows it so soon are one request: a systemd
/// session sends both when it ends.
const SAME_REQUEST: Duration = Duration::from_secs(1);

/// Raises `stop` at each termination signal ([`Requests`]), after `announce` was called with the
/// signal's name.
pub(crate) fn raise_on_signal(stop: &Wakeup, announce: fn(&str)) -> std::io::Result<()> {
    Termination::catch()?.raise(stop, announce)
}

/// The termination signals, caught from now on.
pub(crate) struct Termination(Signals);

impl Termination {
    pub(crate) fn catch() -> std::io::Result<Self> {
        Signals::new([SIGINT, SIGTERM, SIGHUP]).map(Self)
    }

    /// As [`raise_on_signal`], also for signals since [`Termination::catch`].
    pub(crate) fn raise(
        mut self,
        stop: &Wakeup,
        announce: impl Fn(&str) + Send + 'static,
    ) -> std::io::Result<()> {
        let stop = stop.clone();
        std::thread::Builder::new()
            .name("signals".into())
            .spawn(move || {
                let mut requests = Requests::default();
                for signal in self.0.forever() {
                    let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
                    if requests.is_new(signal, Instant::now()) {
                        announce(name);
                        stop.raise();
                    } else {
                        log::info!("{name} ignored: it repeats a request to stop");
                    }
                }
            })?;
        Ok(())
    }
}

/// Ends the process at SIGUSR1, as if it was killed: the next one goes on where it was.
pub(crate) fn exit_on_upgrade() -> std::io::Result<()> {
    let mut signals = Signals::new([SIGUSR1])?;
    std::thread::Builder::new()
        .name("upgrade".into())
        .spawn(move || {
            if signals.forever().next().is_some() {
                stopping("SIGUSR1, for the next lender to go on");
                std::process::exit(0);
            }
        })?;
    Ok(())
}

/// Ignores the termination signals, which the service manager and the terminal send to all processes
/// of a daemon alike: its main process ends the others in order.
pub(crate) fn ignore() -> std::io::Result<()> {
    let ignored = Arc::default();
    for signal in [SIGHUP, SIGINT, SIGTERM, SIGUSR1] {
        signal_hook::flag::register(signal, Arc::clone(&ignored))?;
    }
    Ok(())
}

/// The signals so far, of which some repeat an earlier one: a terminal that is
/// closed sends SIGHUP from the kernel and from the shell.
#[derive(Default)]
struct Requests {
    last: Option<(i32, Instant)>,
}

impl Requests {
    /// Whether this signal is a separate request.
    fn is_new(&mut self, signal: i32, at: Instant) -> bool {
        let repeats = match self.last {
            None => false,
            Some(_) if signal == SIGHUP => return false,
            Some((last, then)) => {
                last == SIGHUP && signal == SIGTERM && at.duration_since(then) < SAME_REQUEST
            }
        };
        self.last = Some((signal, at));
        !repeats
    }
}

/// Logs that the first signal ends the process, and notifies the service manager.
pub(crate) fn stopping(signal: &str) {
    log::info!("stopping at {signal}");
    farside_daemon::stopping(&format!("stopping at {signal}"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_that_comes_with_another_is_no_second_request() {
        let (soon, late) = (SAME_REQUEST / 2, SAME_REQUEST * 2);
        for (first, then, second, expected) in [
            (SIGHUP, soon, SIGHUP, false),
            (SIGHUP, late, SIGHUP, false),
            (SIGTERM, soon, SIGHUP, false),
            (SIGINT, late, SIGHUP, false),
            (SIGHUP, soon, SIGTERM, false),
            (SIGHUP, late, SIGTERM, true),
            (SIGHUP, soon, SIGINT, true),
            (SIGTERM, soon, SIGTERM, true),
            (SIGINT, soon, SIGINT, true),
        ] {
            let mut requests = Requests::default();
            let start = Instant::now();
            assert!(requests.is_new(first, start));
            let is_new = requests.is_new(second, start + then);
            assert_eq!(is_new, expected, "{first}, {second} after {then:?}");
            // A SIGTERM or SIGINT after these two always counts.
            assert!(requests.is_new(SIGINT, start + late));
        }
    }
}
