//! Reservations at the lender's end of a connection: each operation on the medium is checked, whatever the borrower says.

use farside_medium::{Frame, HostIdentity};

use super::{
    caller_of,
    file::{FileError, ReservationFile},
    sharer::{Executed, Request, Sharer},
    table::{Caller, Group},
};
use crate::nvme::status::Status;

/// Most bytes of an encoded request.
pub const MAX_REQUEST: usize = 64;

/// A request, and its sequence number: see [`Sharer::execute`].
pub(super) fn encode(number: u64, request: Request) -> Result<Vec<u8>, Status> {
    postcard::to_allocvec(&(number, request)).map_err(|_| Status::INTERNAL_ERROR)
}

/// The part of a borrower's controller.
#[derive(Debug)]
pub struct Lent {
    sharer: Sharer,
    /// None before the borrower has said.
    host: Option<HostIdentity>,
    /// The number of the abort that the borrower has answered last; before, that of its former connection.
    answered: u64,
    /// The number of the abort after which the borrower has to be told, or has to answer.
    fence: Option<Fence>,
    /// The borrower waits for notifications, after this number.
    waits: bool,
    notified: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fence {
    Wanted(u64),
    Sent(u64),
}

impl Lent {
    /// The controller's part of what `file` has.
    ///
    /// # Errors
    /// [`FileError::Invalid`].
    pub fn new(file: ReservationFile) -> Result<Self, FileError> {
        let sharer = Sharer::new(file)?;
        Ok(Self {
            answered: sharer.settled(),
            sharer,
            host: None,
            fence: None,
            waits: false,
            notified: None,
        })
    }

    /// On whose behalf the operations are that come from now on.
    pub fn set_host(&mut self, host: HostIdentity) {
        let before = self.host.replace(host);
        // What it has is a number of the session before.
        self.waits &= before.is_some_and(|before| before.session == host.session);
        self.sharer.begin_session(host.session);
        // What comes next may have been sent long ago.
        self.look(self.answered);
    }

    fn caller(&self) -> Caller {
        caller_of(self.sharer.controller(), self.host.unwrap_or_default())
    }

    /// Looks whether what the borrower may have in flight was aborted after the abort with this number.
    fn look(&mut self, after: u64) {
        if self.host.is_none() || self.fence.is_some() {
            return;
        }
        let Some(number) = self.sharer.aborts() else {
            return;
        };
        if self.sharer.has_aborted(self.caller(), after) {
            self.fence = Some(Fence::Wanted(number));
        } else {
            self.sharer.settle(number);
        }
    }

    /// The number of a fence, to be sent.
    pub fn takes_fence(&mut self) -> Option<u64> {
        let Some(Fence::Wanted(number)) = self.fence else {
            return None;
        };
        self.fence = Some(Fence::Sent(number));
        Some(number)
    }

    /// The borrower's answer to a fence.
    pub fn fenced(&mut self, number: u64) {
        if self.fence == Some(Fence::Sent(number)) {
            self.fence = None;
            self.answered = number;
            self.sharer.settle(number);
            self.look(number);
        }
    }

    /// The borrower has the notifications up to this number, and waits for others.
    pub fn set_notified(&mut self, upto: Option<u64>) {
        (self.waits, self.notified) = (true, upto);
    }

    /// The notifications for which the borrower waits, to be sent, if there are any.
    pub fn takes_notifications(&mut self) -> Option<Frame> {
        let HostIdentity { session, .. } = self.host.filter(|_| self.waits)?;
        let host = self.caller().host;
        let batch = self.sharer.notifications(host, self.notified)?;
        self.waits = false;
        Some(Frame::Notifications {
            session,
            notifications: batch.packed(),
        })
    }

    /// See [`Sharer::take`].
    pub fn take(&mut self, in_flight: bool) -> bool {
        let taken = self.sharer.take(in_flight);
        if taken && self.sharer.unsettled().is_some() {
            self.look(self.sharer.settled());
        }
        taken
    }

    /// See [`Sharer::would_take`].
    pub fn would_take(&self, in_flight: bool) -> bool {
        self.sharer.would_take(in_flight)
    }

    /// See [`Sharer::rest`].
    pub fn rest(&mut self) {
        self.sharer.rest();
    }

    /// Whether an operation may be started.
    ///
    /// # Errors
    /// The bits of the status that the borrower's command gets.
    pub fn check(&self, group: Group) -> Result<(), u16> {
        let checked = self.sharer.check(self.caller(), group);
        checked.map_err(Status::bits)?;
        match self.fence {
            Some(_) => Err(Status::ABORTED_BY_PREEMPTING.bits()),
            None => Ok(()),
        }
    }

    /// Executes an encoded request. `None`: once [`Lent::aborted`] says so.
    ///
    /// # Errors
    /// As [`Lent::check`].
    pub fn execute(&mut self, request: &[u8]) -> Result<Option<u32>, u16> {
        let caller = self.caller();
        let request = postcard::from_bytes(request).map_err(|_| Status::INVALID_FIELD);
        let executed = request.and_then(|(number, it)| self.sharer.execute(caller, number, it));
        match executed.map_err(Status::bits)? {
            Executed::Done(result) => Ok(Some(result)),
            Executed::Aborting => Ok(None),
        }
    }

    /// See [`Sharer::report`].
    ///
    /// # Errors
    /// As [`Lent::check`].
    pub fn report(&self, extended: bool) -> Result<Vec<u8>, u16> {
        self.sharer.report(extended).map_err(Status::bits)
    }

    /// See [`Sharer::aborted`].
    pub fn aborted(&mut self) -> Option<Result<u32, u16>> {
        let result = self.sharer.aborted()?;
        Some(result.map_err(Status::bits))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::nvme::{
        Config,
        reservations::table::{Acquire, Kind, Registration, Release},
    };

    fn requests() -> impl Strategy<Value = Request> {
        let kind = (1..7u8).prop_map(|number| Kind::from_number(number).unwrap());
        let key = || 0..3u64;
        let keys = || (proptest::option::of(key()), key());
        prop_oneof![
            (0..3u8, keys(), any::<Option<bool>>()).prop_map(
                |(action, (current, new), persists)| {
                    let action = match action {
                        0 => Registration::Add { new },
                        1 => Registration::Remove { current },
                        _ => Registration::Replace { current, new },
                    };
                    Request::Register { action, persists }
                }
            ),
            (key(), keys(), kind.clone(), any::<bool>()).prop_map(
                |(current, (acquires, key), kind, aborts)| Request::Acquire {
                    current,
                    action: match acquires {
                        Some(_) => Acquire::Acquire,
                        None => Acquire::Preempt { key, aborts },
                    },
                    kind,
                }
            ),
            (key(), proptest::option::of(kind)).prop_map(|(current, kind)| Request::Release {
                current,
                action: kind.map_or(Release::Clear, Release::Release),
            }),
            Just(Request::Persists),
            any::<bool>().prop_map(Request::SetPersists),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]

        /// What a borrower sends is a request, or refused; others still can read the table, and who may not write does not.
        #[test]
        fn any_request_is_executed_or_refused(
            sent in proptest::collection::vec(
                (requests(), any::<Option<[u8; MAX_REQUEST]>>(), 0..3u128, any::<bool>(), 0..3u32),
                1..40,
            ),
        ) {
            let directory = tempfile::tempdir().unwrap();
            let mut config = Config::new(directory.path().join("image"));
            config.shared = Some(directory.path().join("reservations"));
            let open = |name: &str| {
                let file = config.open_reservations().unwrap().unwrap();
                config.prepare_reservations(&file, name, [1; 16]).unwrap();
                Lent::new(config.map_reservations(file, name).unwrap()).unwrap()
            };
            let mut both = [open("first"), open("second")];
            for (number, (request, bytes, id, extended, session)) in (1..).zip(sent) {
                let [first, second] = &mut both;
                first.set_host(HostIdentity { id, extended, session });
                first.take(false);
                let encoded = encode(number, request).unwrap();
                prop_assert!(encoded.len() <= MAX_REQUEST);
                let request = bytes.as_ref().map_or(&encoded[..], |bytes| bytes);
                let waits = first.execute(request) == Ok(None);
                first.rest();
                second.take(false);
                second.rest();
                prop_assert_eq!(first.aborted(), waits.then_some(Ok(0)));
                prop_assert!(second.report(true).is_ok() || second.report(false).is_ok());
                // A host whose commands were aborted says so before it goes on.
                first.take(false);
                if let Some(number) = first.takes_fence() {
                    let refused = first.check(Group::Write);
                    prop_assert!(refused.is_err());
                    first.fenced(number);
                }
                both.reverse();
            }
        }
    }
}
