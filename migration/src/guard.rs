//! Whether a VM may run on a host now.

use farside_daemon::VmName;

use crate::{Error, Journal, Result, Role, Step, Store};

/// Refuses a VM that moved away or is being moved. For `farside start` and for backends:
/// whatever starts a VM by its name.
///
/// This prevents mistakes only: a VM that is started all the same is refused its devices by
/// the lender.
pub fn may_run(store: &dyn Store, vm: &VmName) -> Result<()> {
    let journal = store.journal(vm)?.filter(Journal::is_open);
    if let Some(journal) = &journal {
        let Journal {
            step,
            source,
            destination,
            id,
            ..
        } = journal;
        let allowed = match journal.role {
            Role::Source => matches!(step, Step::Prepare | Step::StartAgain),
            Role::Destination => matches!(step, Step::Start | Step::Finish),
        };
        if allowed {
            return Ok(());
        }
        let there = match journal.role {
            Role::Source => String::new(),
            Role::Destination => format!(" on {source}"),
        };
        return Err(Error::refused(format!(
            "VM {vm} is on its way from {source} to {destination} (migration {id}, {step}): go on with `farside migration resume {vm}`{there}, or take it back with `farside migration resume {vm} --back`{there}"
        )));
    }
    match store.moved_marker(vm)? {
        Some(marker) => Err(Error::refused(format!(
            "VM {vm} has moved to {} (migration {}): start it there; `farside migration forget {vm}` makes room for another VM of that name here",
            marker.to, marker.migration
        ))),
        None => Ok(()),
    }
}
