//! The calls of a worker.

use std::{
    fmt,
    os::fd::{AsFd, OwnedFd},
};

use farside_error_chain::Chain;
use farside_lender_protocol::ChannelError;
use farside_vfio::SecondHandle;

use super::{EXIT_TIMEOUT, MESSAGES, WorkerLease};
use crate::{
    device_loop::end::SEND_TIMEOUT,
    refusals::{refused, unsupported},
    source::Available,
    worker::{Call, CallReply, Handle, Numbered, OpenWindow, printable},
};

/// The refusal of a worker that asks for windows without a requester entry, which a function's has
/// not.
const NO_ADAPTER: &str = "a device without a requester entry has no windows";

impl WorkerLease<'_> {
    /// Answers the worker's calls. Returns false when there will be no more.
    pub(super) fn serve_calls(&mut self) -> bool {
        for _ in 0..MESSAGES {
            let ((number, call), fds) = match self.worker.calls.try_receive::<Numbered<Call>>() {
                Ok(Some(received)) => received,
                Ok(None) => return true,
                Err(ChannelError::Closed) => return false,
                Err(error) => return self.violated(&Chain(&error)),
            };
            let reply = self.reply(number, call, fds);
            let sent = self.worker.calls.send(&(number, reply), &[], SEND_TIMEOUT);
            match sent {
                // It has ended, and does not wait for what it has told.
                Ok(()) | Err(ChannelError::Closed) => {}
                Err(error) => return self.violated(&Chain(&error)),
            }
        }
        true
    }

    pub(super) fn violated(&self, error: &dyn fmt::Display) -> bool {
        let (id, pid) = (&self.owner.id, self.worker.pid());
        log::error!("device {id}: ending its worker process {pid}: {error}");
        self.worker.kill();
        false
    }

    /// Serves a call once, also if the former broker has before it died. What it changes is recorded first.
    fn reply(&mut self, number: u64, call: Call, fds: Vec<OwnedFd>) -> CallReply {
        let recorded = self.record.as_ref().and_then(|it| it.lease.replied.clone());
        if let Some((_, reply)) = recorded.filter(|(last, _)| *last == number) {
            return reply;
        }
        let changes = matches!(
            call,
            Call::TakeRequester | Call::TakeWindow { .. } | Call::GiveBackWindow(_)
        );
        let reply = self.serve_call(call, fds);
        if let Some(record) = self.record.as_mut().filter(|_| changes) {
            record.lease.requester = self.requester.is_some();
            record.lease.windows.clone_from(&self.windows);
            record.lease.replied = Some((number, reply.clone()));
            record.update();
        }
        reply
    }

    pub(super) fn serve_call(&mut self, call: Call, fds: Vec<OwnedFd>) -> CallReply {
        let tables = self.device.tables();
        match call {
            Call::Opened(parts) => match <[OwnedFd; 2]>::try_from(fds) {
                // A guest has no influence on the worker yet.
                Ok(fds)
                    if self.running.is_none()
                        && !self.begun
                        && !self.stopped
                        && self.device.opened(self.lease_owner.vm()) =>
                {
                    if let Some(record) = &mut self.record {
                        let connection = self.connection.as_ref().map(AsFd::as_fd);
                        record.opened(&self.worker, connection, &parts, &fds);
                    }
                    let handle = SecondHandle::new(parts, fds);
                    self.running = Some(Handle::Function(handle));
                    CallReply::Done
                }
                _ => CallReply::Refused(unsupported("no function can be opened now")),
            },
            Call::TakeRequester if self.requester.is_some() => CallReply::Done,
            Call::TakeRequester => {
                let owner = match self.lease_owner.verified() {
                    Ok(owner) => owner,
                    Err(error) => return CallReply::Refused(error),
                };
                match tables.map(|it| it.take_requester(&self.owner.id, owner)) {
                    Some(Ok(entry)) => {
                        self.requester = Some(entry);
                        CallReply::Done
                    }
                    Some(Err(error)) => CallReply::Refused(refused(error)),
                    None => CallReply::Refused(unsupported(NO_ADAPTER)),
                }
            }
            Call::TakeWindow {
                peer_address,
                bytes,
            } => match tables.zip(self.requester) {
                Some((tables, entry)) => match tables.take_window(entry, peer_address, bytes) {
                    Ok(range) => {
                        self.windows.push(OpenWindow {
                            range,
                            peer_address,
                            bytes,
                        });
                        CallReply::Window(range)
                    }
                    Err(error) => CallReply::Refused(refused(error)),
                },
                None => CallReply::Refused(unsupported(NO_ADAPTER)),
            },
            Call::GiveBackWindow(window) => {
                let n = self.windows.iter().position(|it| it.range == window);
                if let (Some(n), Some((tables, entry))) = (n, tables.zip(self.requester)) {
                    self.windows.swap_remove(n);
                    tables.give_back_window(entry, window);
                }
                CallReply::Done
            }
            Call::Released(how) if self.is_medium() => {
                self.ended = Some(how);
                self.kill_in(EXIT_TIMEOUT);
                CallReply::Done
            }
            // Another lease may end while the next one has a chain.
            Call::Begins => {
                self.begun = true;
                CallReply::Done
            }
            Call::EndChain if self.chain.is_none() => {
                CallReply::Refused(unsupported("this lease has no chain"))
            }
            Call::EndChain => {
                self.owner.home.end_chain();
                CallReply::Done
            }
            Call::Released(how) => {
                let is_down = |it: &Handle| it.take_down().is_ok();
                // Else when the process has ended.
                match self.running.as_ref().is_none_or(is_down) {
                    true => self.release(how),
                    false => self.over = Some(how),
                }
                // A function is closed when the process has ended; a server's connection is over.
                self.running = self.running.take().filter(|it| !it.is_server());
                self.kill_in(EXIT_TIMEOUT);
                CallReply::Done
            }
            Call::Problem(problem) => {
                let problem = problem.map(|problem| printable(&problem));
                match self.problems.allow() {
                    Some(_) => {
                        self.held_problem = None;
                        self.owner.publish_problem(problem.as_deref());
                    }
                    None => self.held_problem = Some(problem),
                }
                CallReply::Done
            }
            Call::DmaFaults => CallReply::DmaFaults(self.device.report().faults.total),
            Call::Line(kind, line) => {
                self.begun = true;
                let (id, line) = (&self.owner.id, printable(&line));
                match line.starts_with(&format!("device {id}: ")) {
                    true => self.owner.home.line(kind, &line),
                    false => self.owner.home.line(kind, &format!("device {id}: {line}")),
                }
                CallReply::Done
            }
        }
    }
}
