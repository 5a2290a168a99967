//! Live migration in the simulated world. QEMU's transfer of a guest is one call: the guest
//! is on one host or the other, and continues, or waits, by itself.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use farside_daemon::VmName;
use farside_migration::{
    Error, ErrorKind, LiveRunner, Result, Store,
    live::{Guest, Report},
};

use crate::world::{FakeHost, VM};

/// A QEMU whose guest does not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Still {
    /// Waits for an incoming migration.
    Waiting,
    /// Has received the whole guest, and was not told to continue.
    Whole,
    /// Has sent the guest away.
    Sent,
}

fn failed<T>(why: &str) -> Result<T> {
    Err(Error::new(ErrorKind::Vm, why))
}

impl FakeHost {
    fn assert_live(&self) {
        let configured = self.configuration(&VM).unwrap().is_some();
        assert!(configured, "nothing to run by on {}", self.name);
        self.assert_strategy(true);
    }
}

impl LiveRunner for FakeHost {
    fn release_devices(&self, _vm: &VmName, _limit: Duration) -> Result<()> {
        self.assert_live();
        self.once(|| match self.is_deaf() {
            true => failed("the guest does not release its devices"),
            false => {
                self.return_devices();
                Ok(())
            }
        })
    }

    fn incoming(&self, _vm: &VmName, _address: IpAddr) -> Result<u16> {
        self.assert_live();
        if self.qemu().0 {
            return failed("it runs there already");
        }
        self.set_qemu(false, Some(Still::Waiting))?;
        Ok(self.port())
    }

    fn send(&self, _vm: &VmName, to: SocketAddr) -> Result<Report> {
        self.assert_live();
        let there = self.at_port(to.port());
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

    fn query_transfer(&self, _vm: &VmName, _cancel: bool) -> Result<Guest> {
        self.assert_strategy(true);
        self.once(|| {
            Ok(match self.qemu() {
                (true, _) => Guest::Here,
                (false, Some(Still::Sent)) => Guest::There(Report::default()),
                _ => Guest::Gone,
            })
        })
    }

    fn resume_here(&self, vm: &VmName) -> Result<()> {
        // As `farside serve` does.
        farside_migration::may_run(self, vm)?;
        self.assert_live();
        match self.qemu() {
            (true, _) => {}
            (false, Some(Still::Sent)) => self.set_qemu(true, None)?,
            // The guest was lost with its QEMU.
            (false, None) => self.boot()?,
            (false, still) => return failed(&format!("cannot resume: {still:?}")),
        }
        self.borrow_missing()
    }

    fn resume_received(&self, vm: &VmName) -> Result<()> {
        farside_migration::may_run(self, vm)?;
        self.assert_live();
        match self.qemu() {
            (true, _) => {}
            (false, Some(Still::Whole)) => self.set_qemu(true, None)?,
            (false, still) => return failed(&format!("cannot resume: {still:?}")),
        }
        self.borrow_missing()
    }

    fn end_paused(&self, _vm: &VmName) -> Result<()> {
        self.assert_live();
        match self.qemu().0 {
            true => failed("the guest runs"),
            false => self.set_qemu(false, None),
        }
    }
}
