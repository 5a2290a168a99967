//! Where log lines go, and which.

use std::io::Write;

use log::LevelFilter;

use crate::terminal::PlainLog;

const VARIABLE: &str = "FARSIDE_LOG";
const DEFAULT: &str = "info";

/// Logs to standard error what `$FARSIDE_LOG` selects.
pub(crate) fn init() {
    start(|_| {});
}

/// As [`init`], for a worker, whose lender reads a line as its level and the text.
pub(crate) fn init_worker() {
    start(|builder| {
        builder.format(|out, record| {
            let text = record.args().to_string();
            writeln!(out, "{} {}", record.level(), text.replace('\n', " "))
        });
    });
}

fn start(configure: impl FnOnce(&mut env_logger::Builder)) {
    let wanted = std::env::var(VARIABLE).unwrap_or_default();
    let invalid = invalid(&wanted);
    let filter = match (wanted.is_empty(), invalid) {
        (false, None) => wanted.as_str(),
        _ => DEFAULT,
    };
    let mut builder = env_logger::Builder::new();
    if let Ok(style) = std::env::var(env_logger::DEFAULT_WRITE_STYLE_ENV) {
        builder.parse_write_style(&style);
    }
    builder
        .parse_filters(filter)
        .format_target(false)
        // It logs errors that it also returns or that the caller checks itself.
        .filter_module("vfio_ioctls", LevelFilter::Off);
    configure(&mut builder);
    let logger = builder.build();
    log::set_max_level(logger.filter());
    log::set_boxed_logger(Box::new(PlainLog(logger))).expect("no other logger was set");
    if let Some(part) = invalid {
        log::warn!(
            "{VARIABLE}={wanted}: {part:?} is no log level, logging at {DEFAULT}: use off, error, \
             warn, info, debug or trace, or MODULE=LEVEL such as farside_backend=debug"
        );
    }
}

/// The part of a filter that selects nothing. `env_logger` takes a word that is no
/// level for a module, and turns all others off.
fn invalid(filter: &str) -> Option<&str> {
    let (levels, _regex) = filter.split_once('/').unwrap_or((filter, ""));
    levels.split(',').map(str::trim).find(|part| {
        let is_level = |word: &str| word.trim().parse::<LevelFilter>().is_ok();
        match part.split_once('=') {
            // `MODULE=` selects all of a module's levels.
            Some((_, level)) => !(level.trim().is_empty() || is_level(level)),
            None => !(part.is_empty() || is_level(part) || part.starts_with("farside")),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_that_is_no_level_does_not_turn_logs_off() {
        for good in [
            "",
            "debug",
            "OFF",
            "warn,farside_backend=debug",
            "farside_lender",
            "info/x",
            "info, farside_backend",
            " debug , farside_lender=info",
            "farside_backend=",
        ] {
            assert_eq!(invalid(good), None, "{good}");
        }
        assert_eq!(invalid("banana"), Some("banana"));
        assert_eq!(invalid("warn,banana"), Some("banana"));
        assert_eq!(
            invalid("farside_backend=loud"),
            Some("farside_backend=loud")
        );
    }
}
