//! The device threads, and their end.

use std::{
    convert::Infallible,
    io,
    sync::mpsc::{self, Receiver, RecvTimeoutError, Sender},
    thread::{Builder, JoinHandle},
    time::Duration,
};

use crate::device_loop::Stopped;

/// The threads of a lender's devices.
pub(super) struct Threads {
    threads: Vec<JoinHandle<Stopped>>,
    /// Each thread has a clone until it ends; nothing is sent.
    running: Sender<Infallible>,
    all_ended: Receiver<Infallible>,
}

impl Default for Threads {
    fn default() -> Self {
        let (running, all_ended) = mpsc::channel();
        Self {
            threads: Vec::new(),
            running,
            all_ended,
        }
    }
}

impl Threads {
    pub(super) fn start(
        &mut self,
        name: String,
        run: impl FnOnce() -> Stopped + Send + 'static,
    ) -> io::Result<()> {
        let running = self.running.clone();
        let thread = Builder::new().name(name).spawn(move || {
            let stopped = run();
            drop(running);
            stopped
        })?;
        self.threads.push(thread);
        Ok(())
    }

    /// Forgets the threads that have ended: their devices are closed.
    pub(super) fn reap(&mut self) {
        for thread in self.threads.extract_if(.., |thread| thread.is_finished()) {
            let name = thread.thread().name().unwrap_or_default().to_owned();
            if thread.join().is_err() {
                log::error!("thread {name} has panicked");
            }
        }
    }

    /// Waits for the threads to end, up to `timeout`. A medium that hangs may hold one up for
    /// longer: it keeps its device until the process exits.
    pub(super) fn join(self, timeout: Duration) -> Stopped {
        drop(self.running);
        // Fails with `Disconnected` when the last thread ends.
        let timed_out = self.all_ended.recv_timeout(timeout) == Err(RecvTimeoutError::Timeout);
        let mut all = Stopped::Closed;
        for thread in self.threads {
            let name = thread.thread().name().unwrap_or_default().to_owned();
            if timed_out && !thread.is_finished() {
                log::error!(
                    "thread {name} has not ended within {timeout:?}: its device stays as it is until the process has exited"
                );
                all = Stopped::Unclosed;
                continue;
            }
            match thread.join() {
                Ok(Stopped::Closed) => {}
                Ok(Stopped::Unclosed) => all = Stopped::Unclosed,
                // It has dropped its device.
                Err(_) => log::error!("thread {name} has panicked"),
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_thread_that_hangs_is_left_behind() {
        let mut threads = Threads::default();
        let (release, hang) = mpsc::channel::<()>();
        let hung = move || {
            let _ = hang.recv();
            Stopped::Closed
        };
        threads.start("hangs".into(), hung).unwrap();
        threads.start("ends".into(), || Stopped::Closed).unwrap();
        let began = Instant::now();
        let timeout = Duration::from_millis(100);
        assert_eq!(threads.join(timeout), Stopped::Unclosed);
        assert!(began.elapsed() >= timeout);
        drop(release);
    }

    #[test]
    fn threads_that_end_are_not_waited_for() {
        let mut threads = Threads::default();
        threads.start("panics".into(), || panic!("meant")).unwrap();
        threads.start("ends".into(), || Stopped::Closed).unwrap();
        assert_eq!(threads.join(LONG), Stopped::Closed);
        let mut threads = Threads::default();
        threads.start("open".into(), || Stopped::Unclosed).unwrap();
        assert_eq!(threads.join(LONG), Stopped::Unclosed);
    }
}
