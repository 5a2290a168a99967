//! `farside migration agent`: answers the requests of another host.

use std::io::{Read, Write};

use farside_daemon::{FileLock, VmName};

use crate::{
    Accept, Arrival, Error, Host, Reply, Request, Result,
    lock::lock_vm,
    wire::{receive, send},
};

/// Serves the requests that are accepted until the input ends. The first must be Hello.
pub fn serve_agent(
    host: &dyn Host,
    accept: &Accept,
    mut input: impl Read,
    mut output: impl Write,
) -> Result<()> {
    let arrival = Arrival::new(host);
    let mut greeted = false;
    let mut locked: Option<(VmName, FileLock)> = None;
    loop {
        let request = match receive::<Request>(&mut input) {
            Ok(Some(request)) => request,
            Ok(None) => return Ok(()),
            Err(error) => {
                // The peer may be there to receive the reason, such as an invalid VM name.
                let _ = send(&mut output, &Reply::Failed(error.clone()));
                return Err(error);
            }
        };
        let reply = match (&request, greeted) {
            (Request::Hello(_), _) => {
                let reply = arrival.answer(request);
                greeted = matches!(reply, Reply::Hello { .. });
                reply
            }
            (_, false) => Reply::Failed(Error::lost("the first message must be Hello")),
            (_, true) => match accept
                .check(&request)
                .and_then(|()| take_lock(&mut locked, &request))
            {
                Ok(()) => arrival.answer(request),
                Err(error) => Reply::Failed(error),
            },
        };
        send(&mut output, &reply)?;
    }
}

fn take_lock(locked: &mut Option<(VmName, FileLock)>, request: &Request) -> Result<()> {
    let vm = match request {
        // A check needs no lock: it only reads the VM's files.
        Request::Hello(_) | Request::Check(_) => return Ok(()),
        Request::Prepare(journal) | Request::Install(journal) => &journal.vm,
        Request::Incoming { vm, .. }
        | Request::Start { vm, .. }
        | Request::Finish { vm, .. }
        | Request::StopThere { vm, .. } => vm,
    };
    if locked.as_ref().is_some_and(|(held, _)| held == vm) {
        return Ok(());
    }
    *locked = None;
    *locked = Some((vm.clone(), lock_vm(vm)?));
    Ok(())
}
