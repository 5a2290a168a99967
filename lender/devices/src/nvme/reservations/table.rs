//! Who has registered and who holds the reservation of a namespace (NVM Express 1.4, 8.8), and what each may do. Pure.

use serde::{Deserialize, Serialize};

use super::notifications::{Batch, Notification, Notifications};
use crate::nvme::status::Status;

/// Most controllers, and most registrants.
pub const MOST: usize = 32;

/// Most registrants by one controller, whose host may call itself otherwise after each reset.
const MOST_BY_ONE: usize = 4;

/// A host, to which registrations belong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Host {
    /// Of a controller whose Host Identifier is 0: it is no other controller's (5.21.1.25), and none after a reset of that.
    OfController {
        /// The controller's number.
        controller: u16,
        /// Which of its sessions, each of which begins with a reset.
        session: u32,
    },
    /// With this Host Identifier, and whether that was given as one of 128 bits.
    Named(u128, bool),
}

/// A registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registrant {
    pub host: Host,
    /// The controller by which it registered.
    pub controller: u16,
    pub key: u64,
}

/// What others may do (figure 445).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    WriteExclusive,
    ExclusiveAccess,
    WriteExclusiveRegistrantsOnly,
    ExclusiveAccessRegistrantsOnly,
    WriteExclusiveAllRegistrants,
    ExclusiveAccessAllRegistrants,
}

impl Kind {
    const ALL: [Self; 6] = [
        Self::WriteExclusive,
        Self::ExclusiveAccess,
        Self::WriteExclusiveRegistrantsOnly,
        Self::ExclusiveAccessRegistrantsOnly,
        Self::WriteExclusiveAllRegistrants,
        Self::ExclusiveAccessAllRegistrants,
    ];

    /// RTYPE.
    pub fn from_number(number: u8) -> Result<Self, Status> {
        let index = usize::from(number).checked_sub(1);
        let kind = index.and_then(|index| Self::ALL.get(index));
        kind.copied().ok_or(Status::INVALID_FIELD)
    }

    fn number(self) -> u8 {
        self as u8 + 1
    }

    /// Each registrant holds it.
    fn is_of_all(self) -> bool {
        matches!(
            self,
            Self::WriteExclusiveAllRegistrants | Self::ExclusiveAccessAllRegistrants
        )
    }

    /// Registrants may do what the holder may.
    fn includes_registrants(self) -> bool {
        !matches!(self, Self::WriteExclusive | Self::ExclusiveAccess)
    }

    /// The others may not even read.
    fn excludes_reading(self) -> bool {
        matches!(
            self,
            Self::ExclusiveAccess
                | Self::ExclusiveAccessRegistrantsOnly
                | Self::ExclusiveAccessAllRegistrants
        )
    }
}

/// What a command does to the namespace (figure 446).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    Read,
    Write,
}

/// The reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Reservation {
    kind: Kind,
    /// None if it is of all registrants.
    holder: Option<Host>,
}

/// Registrations and reservation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Table {
    generation: u32,
    /// Persist through power loss.
    persists: bool,
    reservation: Option<Reservation>,
    registrants: Vec<Registrant>,
    /// The last command of each controller that has changed something: its sequence number. Should it come again, as its
    /// process was killed or its connection cut, it has been executed.
    executed: Vec<(u16, u64)>,
    /// How often hosts were preempted whose commands were aborted.
    aborts: u64,
    /// Those hosts, each with the number of the last time. The oldest go.
    aborted: Vec<(Host, u64)>,
    /// The last number of those that have gone.
    forgotten: u64,
    /// Which a table of an earlier farside has not.
    notifications: Notifications,
}

/// Reservation Register (6.11).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Registration {
    Add {
        new: u64,
    },
    /// With the current key, unless that is to be ignored.
    Remove {
        current: Option<u64>,
    },
    Replace {
        current: Option<u64>,
        new: u64,
    },
}

/// Reservation Acquire (6.10).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Acquire {
    Acquire,
    /// The registrants with this key. What they have in flight is aborted for good, if it is to be.
    Preempt {
        key: u64,
        aborts: bool,
    },
}

/// Reservation Release (6.12).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Release {
    Release(Kind),
    Clear,
}

/// The caller: a controller, and its host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    pub host: Host,
    pub controller: u16,
}

impl Table {
    /// Whether a host's command may be executed (figure 446).
    pub fn allows(&self, host: Host, group: Group) -> bool {
        let Some(reservation) = self.reservation else {
            return true;
        };
        let is_registrant = self.find(host).is_some();
        let includes = reservation.kind.includes_registrants() && is_registrant;
        self.holds(host)
            || includes
            || (group == Group::Read && !reservation.kind.excludes_reading())
    }

    /// Persistence through power loss.
    pub fn persists(&self) -> bool {
        self.persists
    }

    /// Whether a host has registered.
    pub fn check_registered(&self, host: Host) -> Result<(), Status> {
        let found = self.find(host);
        found.map(drop).ok_or(Status::RESERVATION_CONFLICT)
    }

    /// Sets that.
    pub fn set_persists(&mut self, persists: bool) {
        self.persists = persists;
    }

    /// Whether a controller's command of that number was executed.
    pub fn was_executed(&self, controller: u16, number: u64) -> bool {
        self.executed.contains(&(controller, number))
    }

    /// Notes that it was.
    pub fn set_executed(&mut self, controller: u16, number: u64) {
        self.forget_executed(controller);
        self.executed.push((controller, number));
    }

    fn forget_executed(&mut self, controller: u16) {
        self.executed.retain(|(other, _)| *other != controller);
    }

    /// Registers, unregisters, or replaces a key.
    pub fn register(&mut self, caller: Caller, action: Registration) -> Result<(), Status> {
        let host = caller.host;
        self.check_format(host)?;
        let found = self.find(host);
        let has = |current: Option<u64>| match (current, found) {
            (_, None) => false,
            (None, Some(_)) => true,
            (Some(key), Some(index)) => self.registrants[index].key == key,
        };
        match action {
            Registration::Add { new } => match found {
                None => self.add(caller, new)?,
                Some(index) if self.registrants[index].key == new => {}
                Some(_) => return Err(Status::RESERVATION_CONFLICT),
            },
            Registration::Remove { current } if has(current) => self.remove(|it| it.host == host),
            Registration::Replace { current, new } if has(current) => {
                let of_host = self.registrants.iter_mut().filter(|it| it.host == host);
                of_host.for_each(|it| it.key = new);
            }
            Registration::Replace { current: None, new } => self.add(caller, new)?,
            _ => return Err(Status::RESERVATION_CONFLICT),
        }
        self.changed();
        Ok(())
    }

    /// Acquires the reservation, or takes it and registrations from others.
    pub fn acquire(
        &mut self,
        caller: Caller,
        current: u64,
        (action, kind): (Acquire, Kind),
    ) -> Result<(), Status> {
        let host = caller.host;
        self.check_key(host, current)?;
        let new = Some(Reservation {
            kind,
            holder: (!kind.is_of_all()).then_some(host),
        });
        let Acquire::Preempt { key, aborts } = action else {
            return match self.reservation {
                None => {
                    self.reservation = new;
                    Ok(())
                }
                Some(held) if held.kind == kind && self.holds(host) => Ok(()),
                Some(_) => Err(Status::RESERVATION_CONFLICT),
            };
        };
        let before = self.reservation;
        let key_of_holder = before.and_then(|it| it.holder);
        let key_of_holder = key_of_holder.and_then(|holder| self.find(holder));
        let key_of_holder = key_of_holder.map(|index| self.registrants[index].key);
        let is_of_all = self.reservation.is_some_and(|it| it.kind.is_of_all());
        let takes_all = is_of_all && key == 0;
        let takes_holders = !is_of_all && key_of_holder == Some(key);
        if !takes_all && !takes_holders && !self.registrants.iter().any(|it| it.key == key) {
            return Err(Status::RESERVATION_CONFLICT);
        }
        if takes_all || takes_holders {
            self.reservation = new;
        }
        let goes = |it: &Registrant| it.host != host && (takes_all || it.key == key);
        let gone = self.registrants.iter().filter(|it| goes(it));
        let gone: Vec<_> = gone.map(|it| it.host).collect();
        if aborts {
            self.abort(&gone);
        }
        // A host that preempts its own registration, without the reservation, loses it.
        let own = !takes_all && !takes_holders && current == key;
        self.remove(|it| goes(it) || (own && it.host == host));
        for host in gone {
            let notification = Notification::RegistrationPreempted;
            self.notifications.push(host, notification);
        }
        if (takes_all || takes_holders) && before.is_some_and(|it| it.kind != kind) {
            self.notify_others(host, Notification::ReservationReleased);
        }
        self.changed();
        Ok(())
    }

    /// Notifies the registrants other than `caller`.
    fn notify_others(&mut self, caller: Host, notification: Notification) {
        let others = self.registrants.iter().filter(|it| it.host != caller);
        for it in others {
            self.notifications.push(it.host, notification);
        }
    }

    /// The notifications of a host after the one with this number.
    pub fn notifications(&self, host: Host, after: Option<u64>) -> Batch {
        self.notifications.of(host, after)
    }

    fn abort(&mut self, hosts: &[Host]) {
        self.aborts += 1;
        self.aborted.retain(|(host, _)| !hosts.contains(host));
        let number = self.aborts;
        self.aborted
            .extend(hosts.iter().map(|host| (*host, number)));
        let excess = self.aborted.len().saturating_sub(MOST);
        if let Some((_, last)) = self.aborted.drain(..excess).next_back() {
            self.forgotten = last;
        }
    }

    /// The number of the last time at which commands of hosts were aborted.
    pub fn aborts(&self) -> u64 {
        self.aborts
    }

    /// Whether commands of this host were aborted after that number.
    pub fn has_aborted(&self, host: Host, after: u64) -> bool {
        let mut hosts = self.aborted.iter();
        after < self.forgotten || hosts.any(|(it, number)| *it == host && *number > after)
    }

    /// Releases the reservation, or clears all.
    pub fn release(&mut self, host: Host, current: u64, action: Release) -> Result<(), Status> {
        self.check_key(host, current)?;
        match (action, self.reservation) {
            (Release::Clear, _) => {
                self.notify_others(host, Notification::ReservationPreempted);
                self.reservation = None;
                self.registrants.clear();
                self.changed();
            }
            (Release::Release(kind), Some(held)) if self.holds(host) => {
                if held.kind != kind {
                    return Err(Status::INVALID_FIELD);
                }
                self.reservation = None;
                if held.kind.includes_registrants() {
                    self.notify_others(host, Notification::ReservationReleased);
                }
            }
            // Nothing to release (6.12.1).
            (Release::Release(_), _) => {}
        }
        Ok(())
    }

    /// What the end of a controller's lease ends: what belongs to no named host, and the numbers of commands.
    pub fn forget_controller(&mut self, controller: u16) {
        self.forget_executed(controller);
        self.forget_unnamed(|owner, _| owner == controller);
    }

    /// What a controller's reset ends, with which this session begins.
    pub fn begin_session(&mut self, controller: u16, session: u32) {
        self.forget_unnamed(|owner, of| owner == controller && of != session);
    }

    /// Removes registrations of controllers, in these sessions, that have no Host Identifier.
    fn forget_unnamed(&mut self, goes: impl Fn(u16, u32) -> bool) {
        self.remove(|it| match it.host {
            Host::OfController {
                controller,
                session,
            } => goes(controller, session),
            Host::Named(..) => false,
        });
    }

    /// What a loss of power ends.
    pub fn lose_power(&mut self) {
        if !self.persists {
            self.reservation = None;
            self.registrants.clear();
        }
        self.forget_unnamed(|_, _| true);
    }

    /// The data structure of Reservation Report (6.13), of 64-bit or 128-bit identifiers, as are in use.
    pub fn report(&self, extended: bool) -> Result<Vec<u8>, Status> {
        self.check_format(Host::Named(0, extended))?;
        let (header, entry) = if extended { (64, 64) } else { (24, 24) };
        let mut data = vec![0; header + self.registrants.len() * entry];
        data[..4].copy_from_slice(&self.generation.to_le_bytes());
        data[4] = self.reservation.map_or(0, |it| it.kind.number());
        data[5..7].copy_from_slice(&(self.registrants.len() as u16).to_le_bytes());
        data[9] = self.persists.into();
        let entries = data[header..].chunks_exact_mut(entry);
        for (raw, it) in entries.zip(&self.registrants) {
            raw[..2].copy_from_slice(&it.controller.to_le_bytes());
            raw[2] = self.holds(it.host).into();
            let id = match it.host {
                Host::OfController { .. } => 0,
                Host::Named(id, _) => id,
            };
            let (id, key) = (id.to_le_bytes(), it.key.to_le_bytes());
            if extended {
                raw[8..16].copy_from_slice(&key);
                raw[16..32].copy_from_slice(&id);
            } else {
                raw[8..16].copy_from_slice(&id[..8]);
                raw[16..24].copy_from_slice(&key);
            }
        }
        Ok(data)
    }

    /// Identifiers are of 64 bits or of 128 bits, of all hosts.
    fn check_format(&self, host: Host) -> Result<(), Status> {
        let format = |host: Host| match host {
            Host::OfController { .. } => None,
            Host::Named(_, extended) => Some(extended),
        };
        let others = self.registrants.iter().filter_map(|it| format(it.host));
        let expected = format(host);
        match expected.is_some_and(|expected| others.into_iter().any(|it| it != expected)) {
            true => Err(Status::HOST_IDENTIFIER_INCONSISTENT),
            false => Ok(()),
        }
    }

    fn find(&self, host: Host) -> Option<usize> {
        self.registrants.iter().position(|it| it.host == host)
    }

    fn holds(&self, host: Host) -> bool {
        self.reservation.is_some_and(|it| match it.holder {
            Some(holder) => holder == host,
            None => self.find(host).is_some(),
        })
    }

    fn check_key(&self, host: Host, current: u64) -> Result<(), Status> {
        let found = self.find(host).map(|index| self.registrants[index].key);
        match found == Some(current) {
            true => Ok(()),
            false => Err(Status::RESERVATION_CONFLICT),
        }
    }

    fn add(&mut self, caller: Caller, key: u64) -> Result<(), Status> {
        let by_one = |it: &&Registrant| it.controller == caller.controller;
        let of_controller = self.registrants.iter().filter(by_one).count();
        if self.registrants.len() >= MOST || of_controller >= MOST_BY_ONE {
            return Err(Status::INTERNAL_ERROR);
        }
        self.registrants.push(Registrant {
            host: caller.host,
            controller: caller.controller,
            key,
        });
        Ok(())
    }

    /// Removes registrations, and the reservation with its holder, or the last of all that hold it.
    fn remove(&mut self, goes: impl Fn(&Registrant) -> bool) {
        self.registrants.retain(|it| !goes(it));
        let Some(Reservation { kind, holder }) = self.reservation else {
            return;
        };
        match holder {
            None if self.registrants.is_empty() => self.reservation = None,
            Some(holder) if self.find(holder).is_none() => {
                self.reservation = None;
                if kind.includes_registrants() {
                    self.notify_others(holder, Notification::ReservationReleased);
                }
            }
            _ => {}
        }
    }

    fn changed(&mut self) {
        self.generation = self.generation.wrapping_add(1);
    }
}

#[cfg(test)]
mod tests;
