//! Progress of long operations: bars on a terminal, a line at start and end elsewhere.

use std::borrow::Cow;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

/// The destination of progress output.
#[derive(Clone, Debug)]
pub struct Progress(Kind);

#[derive(Clone, Debug)]
enum Kind {
    Silent,
    Lines,
    Bars(MultiProgress),
}

impl Progress {
    /// Bars when standard error is a terminal, else plain lines there.
    pub fn auto() -> Self {
        if std::io::stderr().is_terminal() {
            Progress(Kind::Bars(MultiProgress::new()))
        } else {
            Self::lines()
        }
    }

    /// Plain lines on standard error.
    pub fn lines() -> Self {
        Progress(Kind::Lines)
    }

    /// Shows nothing.
    pub fn silent() -> Self {
        Progress(Kind::Silent)
    }

    /// Starts an operation of known length; see [`Task::set`].
    pub fn bar(&self, label: impl Into<Cow<'static, str>>, total: u64) -> Task {
        let style = "{spinner} {msg} [{bar:30}] {percent}% {elapsed}";
        self.task(label.into(), ProgressBar::new(total), style)
    }

    /// Starts an operation of unknown length.
    pub fn spinner(&self, label: impl Into<Cow<'static, str>>) -> Task {
        self.task(
            label.into(),
            ProgressBar::new_spinner(),
            "{spinner} {msg} {elapsed}",
        )
    }

    /// Prints a line without breaking bars.
    pub fn note(&self, text: &str) {
        match &self.0 {
            Kind::Silent => {}
            Kind::Lines => eprintln!("{text}"),
            // Ignores a terminal that has gone.
            Kind::Bars(bars) => drop(bars.println(text)),
        }
    }

    fn task(&self, label: Cow<'static, str>, bar: ProgressBar, style: &str) -> Task {
        let bar = match &self.0 {
            Kind::Silent => None,
            Kind::Lines => {
                eprintln!("{label} …");
                None
            }
            Kind::Bars(bars) => {
                let style = ProgressStyle::with_template(style).expect("a constant template");
                let bar = bars.add(bar.with_style(style).with_message(label.clone()));
                bar.enable_steady_tick(Duration::from_millis(100));
                Some(bar)
            }
        };
        Task {
            progress: self.clone(),
            label,
            bar,
            start: Instant::now(),
        }
    }
}

/// An operation in progress. Dropped without [`Task::done`], it disappears silently.
#[derive(Debug)]
pub struct Task {
    progress: Progress,
    label: Cow<'static, str>,
    bar: Option<ProgressBar>,
    start: Instant,
}

impl Task {
    /// Sets the completed part.
    pub fn set(&self, done: u64) {
        if let Some(bar) = &self.bar {
            bar.set_position(done);
        }
    }

    /// Shows the current step.
    pub fn detail(&self, text: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(format!("{} ({text})", self.label));
        }
    }

    /// Ends the operation, and prints its duration.
    pub fn done(self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        let seconds = self.start.elapsed().as_secs_f64();
        self.progress
            .note(&format!("{}: {seconds:.1} s", self.label));
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
