//! Writes to eventfds of a client, which must not block the writing thread for good.
//!
//! A write to an eventfd blocks while its counter is full, unless the open file description is in
//! non-blocking mode. Both are the client's to change at any time, and an eventfd has no
//! non-blocking write of its own (`RWF_NOWAIT` is not supported). So threads publish when they are
//! in such a write, and a thread of this process interrupts those that stay there. It runs only
//! while there are such writes: an idle process has no wake-ups.
#![allow(unsafe_code)]

use std::{
    io, mem, ptr,
    sync::{
        Arc, Mutex, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    thread::{self, Thread},
    time::Duration,
};

use rustix::{
    fd::AsFd,
    io::{Errno, write},
    thread::gettid,
};

/// A write that takes this long is interrupted within twice this time. Without contention a write
/// takes less than a microsecond.
const LIMIT: Duration = Duration::from_millis(500);

/// Interrupts system calls. Ignored by default, so that it never ends a process.
const SIGNAL: libc::c_int = libc::SIGURG;

/// The writes of one thread.
struct Writer {
    thread: libc::pid_t,
    /// Number of writes begun and ended: odd during one.
    count: AtomicU64,
    /// The write that was last interrupted.
    interrupted: AtomicU64,
}

thread_local! {
    static WRITER: Arc<Writer> = Watch::get().enter();
}

/// Starts the watch, which otherwise starts with the first write, for a process that cannot start
/// threads any more then.
pub fn watch_eventfds() {
    WRITER.with(|_| ());
}

/// Adds 1 to the counter of a client's eventfd.
///
/// # Errors
/// [`Errno::TIMEDOUT`] if the write blocked and was interrupted.
pub(crate) fn add_one(fd: impl AsFd) -> Result<(), Errno> {
    WRITER.with(|writer| {
        // Sequentially consistent: either the watch sees this write, or this thread sees that the
        // watch has to be woken.
        let number = writer.count.fetch_add(1, SeqCst) + 1;
        Watch::get().wake();
        let written = loop {
            match write(&fd, &1u64.to_ne_bytes()) {
                Ok(_) => break Ok(()),
                Err(Errno::INTR) if writer.interrupted.load(SeqCst) == number => {
                    break Err(Errno::TIMEDOUT);
                }
                Err(Errno::INTR) => {}
                Err(error) => break Err(error),
            }
        };
        writer.count.fetch_add(1, SeqCst);
        written
    })
}

/// Interrupts writes that block. One per process.
struct Watch {
    writers: Mutex<Vec<Weak<Writer>>>,
    /// Whether a write has begun since the watch last looked.
    busy: AtomicBool,
    /// `None` if it could not be started: then a write may block.
    thread: OnceLock<Option<Thread>>,
}

impl Watch {
    fn get() -> &'static Self {
        static WATCH: Watch = Watch {
            writers: Mutex::new(Vec::new()),
            busy: AtomicBool::new(false),
            thread: OnceLock::new(),
        };
        &WATCH
    }

    /// Adds the calling thread.
    fn enter(&'static self) -> Arc<Writer> {
        self.thread.get_or_init(|| {
            let started = handle_signal().and_then(|()| {
                let builder = thread::Builder::new().name("eventfd-watch".into());
                builder.spawn(|| self.run())
            });
            match started {
                Ok(handle) => Some(handle.thread().clone()),
                Err(error) => {
                    log::error!("a client may block a thread by its eventfd: no watch: {error}");
                    None
                }
            }
        });
        let writer = Arc::new(Writer {
            thread: gettid().as_raw_nonzero().get(),
            count: AtomicU64::new(0),
            interrupted: AtomicU64::new(0),
        });
        let mut writers = self.writers.lock().unwrap_or_else(PoisonError::into_inner);
        writers.retain(|writer| writer.strong_count() > 0);
        writers.push(Arc::downgrade(&writer));
        writer
    }

    fn wake(&self) {
        if !self.busy.load(SeqCst) {
            self.busy.store(true, SeqCst);
            if let Some(Some(thread)) = self.thread.get() {
                thread.unpark();
            }
        }
    }

    fn run(&self) -> ! {
        loop {
            while !self.busy.swap(false, SeqCst) {
                thread::park();
            }
            let writing = self.writing();
            thread::sleep(LIMIT);
            for (writer, number) in writing {
                if writer.count.load(SeqCst) == number {
                    // It may be about to block: look again.
                    self.busy.store(true, SeqCst);
                    writer.interrupted.store(number, SeqCst);
                    writer.interrupt();
                }
            }
        }
    }

    /// The threads in a write, and its number.
    fn writing(&self) -> Vec<(Arc<Writer>, u64)> {
        let writers = self.writers.lock().unwrap_or_else(PoisonError::into_inner);
        let writers = writers.iter().filter_map(Weak::upgrade);
        let numbered = writers.map(|writer| {
            let number = writer.count.load(SeqCst);
            (writer, number)
        });
        numbered.filter(|(_, number)| number % 2 == 1).collect()
    }
}

impl Writer {
    /// Interrupts a system call of the thread. If it has just left the write, another one, which
    /// is repeated.
    fn interrupt(&self) {
        let process = rustix::process::getpid().as_raw_nonzero().get();
        // SAFETY: sends a signal to a thread of this process; touches no memory. If the thread has
        // ended, this fails, or another thread of this process is interrupted.
        unsafe { libc::syscall(libc::SYS_tgkill, process, self.thread, SIGNAL) };
    }
}

/// Installs a handler that does nothing: the signal then interrupts system calls.
fn handle_signal() -> io::Result<()> {
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: sigaction is plain data, for which zeroes are a value.
    let mut action: libc::sigaction = unsafe { mem::zeroed() };
    action.sa_sigaction = nothing as *const () as usize;
    // Not SA_RESTART, which would repeat the write.
    action.sa_flags = libc::SA_ONSTACK;
    // SAFETY: `action` is fully set, and the handler does nothing.
    match unsafe { libc::sigaction(SIGNAL, &action, ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
