//! What live migration does to the world. QEMU that moves a guest is one call: it
//! is here or there, and goes on, or waits, without anybody.

use farside_migration::{
    Error, ErrorKind, Host, Journal, Result, Role,
    live::{Guest, Report},
};

use crate::world::{FakeHost, VM};

/// A QEMU in which no guest runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Still {
    /// It waits for a guest.
    Waiting,
    /// It has all of the guest, and has not been told to go on.
    Whole,
    /// It has sent the guest away.
    Sent,
}

fn failed<T>(why: &str) -> Result<T> {
    Err(Error::new(ErrorKind::Vm, why))
}

impl FakeHost {
    /// This host's part, while the VM is moved with its guest running.
    pub fn moves_live(&self) -> Result<Option<Role>> {
        let journal = self.journal(VM)?.filter(Journal::is_open);
        let live = journal.filter(|journal| journal.live.is_some());
        Ok(live.map(|journal| journal.role))
    }

    /// The guest goes on, and then has its devices.
    pub fn resume_guest(&self, role: Role) -> Result<()> {
        let (running, still) = self.qemu();
        match (running, still, role) {
            (true, ..) => {}
            (false, Some(Still::Whole), Role::Destination)
            | (false, Some(Still::Sent), Role::Source) => self.set_qemu(true, None)?,
            // The guest was lost with QEMU.
            (false, None, Role::Source) => self.boot()?,
            (false, still, _) => return failed(&format!("cannot go on: {still:?}")),
        }
        self.borrow_missing()
    }

    /// Ends a QEMU whose guest stands still.
    pub fn end(&self) -> Result<()> {
        match self.qemu().0 {
            true => failed("the guest runs"),
            false => self.set_qemu(false, None),
        }
    }

    pub fn wait_for_guest(&self) -> Result<String> {
        if self.qemu().0 {
            return failed("it runs there already");
        }
        self.set_qemu(false, Some(Still::Waiting))?;
        Ok(self.name())
    }

    pub fn send_to(&self, uri: &str) -> Result<Report> {
        let there = self.other(uri);
        self.once(|| {
            assert!(self.holds_nothing(), "a guest is sent with its devices");
            if self.breaks_transfers() {
                return failed("the connection broke");
            }
            assert_eq!(there.qemu(), (false, Some(Still::Waiting)));
            self.put_qemu(false, Some(Still::Sent));
            there.put_qemu(false, Some(Still::Whole));
            Ok(Report::default())
        })
    }

    pub fn where_is_it(&self) -> Guest {
        match self.qemu() {
            (true, _) => Guest::Here,
            (false, Some(Still::Sent)) => Guest::There(Report::default()),
            _ => Guest::Gone,
        }
    }
}
