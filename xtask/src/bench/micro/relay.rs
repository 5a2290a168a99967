//! From the raising of a vector until the waiting thread runs again: by a bare write to an
//! eventfd, by the product's direct form, and by its relayed form.
//!
//! The comparison is fair by construction. One thread raises, one waits in `poll`; both are
//! the same for all three forms, and the forms alternate shot by shot. The raiser makes
//! sure each time that the waiting thread sleeps. It reads the clock right before it
//! raises, the waiting one right after it wakes. Both forms of the product go through
//! [`Vectors`], as a device's do; the relayed one also through the register channel, at
//! whose other end a third thread waits, as a backend does.

use std::{
    fs,
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use farside_bench::Section;
use farside_irq_relay::{
    Action, IrqCounts, IrqData, IrqEventFd, IrqIndex, IrqRange, IrqTarget, Relay, SetIrqs, Vectors,
};
use farside_lender_protocol::{Channel, ChannelError, registers::Event};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::{Errno, read, write},
};

use super::{
    figures::{against, at_most, series},
    round_trip::micros,
};

/// Shots of each form per turn.
const SHOTS: usize = 500;
/// Timeout of a shot.
const LOST: Duration = Duration::from_secs(10);
/// Target ratio of the direct form to a bare eventfd.
const TARGET: f64 = 1.05;

/// How the waiting thread is woken.
#[derive(Clone, Copy)]
enum Form {
    Bare,
    Direct,
    Relayed,
}

const FORMS: [Form; 3] = [Form::Bare, Form::Direct, Form::Relayed];

/// State shared by raiser and waiting thread.
#[derive(Default)]
struct Shot {
    /// Number of the shot that the waiting thread is ready for.
    ready: AtomicU32,
    /// When it was raised, nanoseconds since the measurement began.
    at: AtomicU64,
    stop: AtomicBool,
}

/// Measures in turns.
pub(super) fn measure(turns: u32) -> Result<Section> {
    let waited_for = event()?;
    let (lender, mut borrower) = Channel::pair().context("making a register channel")?;
    let mut delivering = vectors(trigger(&waited_for)?.into())?;
    let raiser = Raiser {
        bare: duplicate(&waited_for)?,
        direct: vectors(trigger(&waited_for)?.into())?,
        relay: Arc::default(),
        channel: lender,
    };
    let shot = Shot::default();
    let began = Instant::now();
    let waiting = rustix::thread::gettid().as_raw_nonzero().get();
    let mut figures = Vec::new();
    thread::scope(|scope| -> Result<()> {
        // It ends with the raiser, which closes the channel.
        scope.spawn(move || relay(&mut borrower, &mut delivering));
        let raiser = scope.spawn(|| raiser.run(&shot, began, waiting));
        for turn in 0..=turns {
            let medians = turn_of(&waited_for, &shot, began);
            match medians {
                Ok(medians) if turn > 0 => figures.push(medians),
                Ok(_) => {}
                Err(error) => {
                    shot.stop.store(true, Ordering::Release);
                    return Err(error);
                }
            }
        }
        shot.stop.store(true, Ordering::Release);
        raiser.join().expect("the raising thread panicked")
    })?;
    let of = |form: Form| figures.iter().map(move |turn| turn[form as usize]);
    let bare = "bare eventfd";
    Ok(Section {
        name: "interrupts".into(),
        title: "Interrupts".into(),
        about: format!(
            "From the moment that one thread raises a vector until another, which sleeps at the \
             eventfd, runs again: by a bare write to the eventfd, by the product's direct form, \
             and by its relayed one, through a register channel and a third thread that delivers. \
             The forms alternate, {SHOTS} times each a turn. Then through processes: from a \
             client's write to a register of a borrowed device to the interrupt that it brings."
        ),
        series: vec![
            series(bare, of(Form::Bare)),
            at_most(against(series("direct", of(Form::Direct)), bare), TARGET),
            against(series("relayed", of(Form::Relayed)), bare),
        ],
    })
}

/// Waits for all shots of a turn. Returns the median of each form, microseconds.
fn turn_of(waited_for: &OwnedFd, shot: &Shot, began: Instant) -> Result<[f64; FORMS.len()]> {
    let mut times = FORMS.map(|_| Vec::with_capacity(SHOTS));
    for _ in 0..SHOTS {
        for form in FORMS {
            shot.ready.fetch_add(1, Ordering::Release);
            let mut fds = [PollFd::new(waited_for, PollFlags::IN)];
            let lost = Timespec::try_from(LOST).context("a time limit")?;
            let ready = poll(&mut fds, Some(&lost)).context("waiting for an eventfd")?;
            let now = began.elapsed();
            ensure!(ready == 1, "an interrupt did not come within {LOST:?}");
            let mut count = [0; 8];
            read(waited_for, &mut count).context("reading an eventfd")?;
            let fired = Duration::from_nanos(shot.at.load(Ordering::Acquire));
            times[form as usize].push(now.saturating_sub(fired));
        }
    }
    Ok(times.map(|mut times| {
        times.sort_unstable();
        micros(times[times.len() / 2])
    }))
}

/// The thread in the device's role.
struct Raiser {
    bare: OwnedFd,
    direct: Vectors,
    relay: Arc<Relay>,
    channel: Channel,
}

impl Raiser {
    fn run(mut self, shot: &Shot, began: Instant, waiting: i32) -> Result<()> {
        let mut relayed = vectors(Arc::clone(&self.relay).into())?;
        let mut number = 0;
        loop {
            for form in FORMS {
                number += 1;
                while shot.ready.load(Ordering::Acquire) < number || !sleeps(waiting)? {
                    if shot.stop.load(Ordering::Acquire) {
                        return Ok(());
                    }
                    thread::yield_now();
                }
                let now = began.elapsed().as_nanos();
                shot.at.store(now as u64, Ordering::Release);
                match form {
                    Form::Bare => {
                        write(&self.bare, &1u64.to_ne_bytes()).context("writing an eventfd")?;
                    }
                    Form::Direct => self.direct.raise(0),
                    Form::Relayed => {
                        relayed.raise(0);
                        let channel = &mut self.channel;
                        let mut sent = Ok(true);
                        self.relay.drain(|event| {
                            sent = channel.try_send(&Event::Interrupt(event), &[]);
                        });
                        ensure!(sent?, "the register channel is full");
                    }
                }
            }
        }
    }
}

/// The backend's part: receives relayed interrupts and delivers them, until the channel
/// closes.
fn relay(channel: &mut Channel, vectors: &mut Vectors) {
    loop {
        match channel.try_receive::<Event>() {
            Ok(Some((Event::Interrupt(event), _))) => vectors.deliver(event),
            Ok(Some((Event::Data { .. } | Event::Release { .. }, _))) => {}
            Ok(None) => {
                let mut fds = [PollFd::new(&*channel, PollFlags::IN)];
                match poll(&mut fds, None) {
                    Ok(_) | Err(Errno::INTR) => {}
                    Err(_) => return,
                }
            }
            Err(ChannelError::Closed) => return,
            Err(error) => {
                log::error!("the register channel: {error}");
                return;
            }
        }
    }
}

/// Vectors, one of which is assigned to `target`.
fn vectors(target: IrqTarget) -> Result<Vectors> {
    let counts = IrqCounts::new().with_msix(1)?;
    let range = IrqRange::new(&counts, IrqIndex::Msix as u32, 0, 1)?;
    let mut vectors = Vectors::new(counts);
    let to_target = IrqData::Targets(vec![Some(target)]);
    vectors.apply(SetIrqs::new(range, Action::Trigger, to_target)?)?;
    Ok(vectors)
}

/// An eventfd with QEMU's flags.
fn event() -> Result<OwnedFd> {
    let event = IrqEventFd::new().context("making an eventfd")?;
    Ok(event.as_fd().try_clone_to_owned()?)
}

fn duplicate(fd: &OwnedFd) -> Result<OwnedFd> {
    fd.try_clone().context("duplicating an eventfd")
}

/// The same eventfd, as the product takes one from a client.
fn trigger(fd: &OwnedFd) -> Result<IrqEventFd> {
    Ok(duplicate(fd)?.try_into()?)
}

/// Whether a thread of this process sleeps in the kernel.
fn sleeps(thread: i32) -> Result<bool> {
    let path = format!("/proc/self/task/{thread}/stat");
    let stat = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    // "TID (NAME) STATE …", where the name may be anything.
    let state = stat
        .rsplit_once(") ")
        .map(|(_, rest)| rest.starts_with('S'));
    state.with_context(|| format!("{path} is malformed: {stat:?}"))
}

#[cfg(test)]
mod tests {
    use farside_bench::Data;

    use super::*;

    #[test]
    fn every_form_arrives() {
        let section = measure(1).unwrap();
        assert_eq!(section.series.len(), FORMS.len());
        for series in &section.series {
            let Data::Repeats(figures) = &series.data else {
                panic!("not one figure a turn: {series:?}");
            };
            assert!(figures.iter().all(|figure| *figure > 0.0), "{series:?}");
        }
    }

    #[test]
    fn a_thread_that_runs_does_not_sleep() {
        let own = rustix::thread::gettid().as_raw_nonzero().get();
        assert!(!sleeps(own).unwrap());
    }
}
