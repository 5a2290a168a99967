//! Ctrl-C and SIGTERM.

use farside_control::Wakeup;
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator::Signals,
};

/// Raises `stop` at the first signal that asks us to end.
pub(crate) fn raise_on_signal(stop: &Wakeup) -> std::io::Result<()> {
    let stop = stop.clone();
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            for signal in signals.forever() {
                let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
                log::info!("stopping at {name}");
                farside_service::stopping(&format!("stopping at {name}"));
                stop.raise();
            }
        })?;
    Ok(())
}
