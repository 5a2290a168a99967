//! Finds a device among several lenders.

use std::thread;

use farside_daemon::DeviceId;
use farside_error_chain::Chain;

use crate::{Address, CallError, ErrorKind, Instance};

/// Lenders that are asked at the same time, each by a thread; fewer than the orders that a backend's
/// helper process takes.
pub const MAX_ASKED: usize = 16;

/// An error of [`find_device`].
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are what the messages name")]
pub enum FindError {
    /// All lenders answered.
    #[error(
        "no lender has device {device:?} (asked: {asked}); `farside devices` lists what can be borrowed"
    )]
    Unknown { device: DeviceId, asked: String },
    /// Which of the two devices is meant cannot be known.
    #[error(
        "device {device} is at two lenders, {first} and {second}: rename it at one of them, or remove one of them from the lenders"
    )]
    Twice {
        device: DeviceId,
        first: Address,
        second: Address,
    },
    /// No lender that answered has the device, and one of them did not answer.
    #[error(transparent)]
    Lender(CallError),
}

/// Asks all `lenders` for `device`, several at a time, by `look`, which fails with
/// [`ErrorKind::UnknownDevice`] where the device is not. A lender may be known at several addresses: one
/// [`Instance`] is one lender, at the first of them. Waits for all of them; a lender that does not
/// answer is logged if there are others.
///
/// # Errors
/// A [`FindError`].
pub fn find_device<T: Send>(
    device: &DeviceId,
    lenders: &[Address],
    look: impl Fn(&Address) -> Result<(Instance, T), CallError> + Sync,
) -> Result<(Address, T), FindError> {
    let answers = lenders
        .chunks(MAX_ASKED)
        .flat_map(|lenders| ask(lenders, &look));
    let mut found: Option<(Address, Instance, T)> = None;
    let mut failed = Vec::new();
    for (lender, answer) in answers {
        match (answer, &found) {
            // Named twice, or by two addresses.
            (Ok((other, _)), Some((_, instance, _))) if other == *instance => {}
            (Ok(_), Some((first, ..))) => {
                return Err(FindError::Twice {
                    device: device.clone(),
                    first: first.clone(),
                    second: lender.clone(),
                });
            }
            (Ok((instance, answer)), None) => found = Some((lender.clone(), instance, answer)),
            (Err(CallError::Refused(error)), _) if error.kind == ErrorKind::UnknownDevice => {}
            (Err(error), _) => failed.push(error),
        }
    }
    // With one lender, its error is what is returned.
    if lenders.len() > 1 {
        for error in &failed {
            log::warn!("looking for device {device}: {}", Chain(error));
        }
    }
    match (found, failed.into_iter().next()) {
        (Some((lender, _, answer)), _) => Ok((lender, answer)),
        (None, Some(error)) => Err(FindError::Lender(error)),
        (None, None) => Err(FindError::Unknown {
            device: device.clone(),
            asked: match lenders {
                [] => "none: this host knows none".to_owned(),
                some => some
                    .iter()
                    .map(Address::to_string)
                    .collect::<Vec<_>>()
                    .join(", "),
            },
        }),
    }
}

fn ask<'a, T: Send>(
    lenders: &'a [Address],
    look: &(impl Fn(&Address) -> Result<T, CallError> + Sync),
) -> Vec<(&'a Address, Result<T, CallError>)> {
    thread::scope(|scope| {
        let started = lenders.iter().map(|lender| {
            let asking = thread::Builder::new().name("find".into());
            (lender, asking.spawn_scoped(scope, move || look(lender)))
        });
        // All of them, before the first is waited for.
        let started: Vec<_> = started.collect();
        let answers = started.into_iter().map(|(lender, asking)| {
            let answer = match asking {
                Ok(asking) => asking
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                Err(source) => Err(CallError::Unreachable {
                    address: lender.clone(),
                    source,
                }),
            };
            (lender, answer)
        });
        answers.collect()
    })
}

#[cfg(test)]
mod tests {
    use std::{io, time::Duration};

    use super::*;
    use crate::RemoteError;

    /// The instance of a lender's name.
    fn instance(name: &str) -> Instance {
        let digits: String = name.bytes().map(|byte| format!("{byte:02x}")).collect();
        Instance::try_from(format!("{digits:0>32}")).unwrap()
    }

    fn find(lenders: &[&str]) -> Result<(Address, String), FindError> {
        let lenders: Vec<Address> = lenders.iter().map(|at| at.parse().unwrap()).collect();
        find_device(&"disk0".parse().unwrap(), &lenders, |lender| {
            match lender.to_string() {
                at if at.starts_with("/has") => {
                    let run = at.split('@').nth(1).unwrap_or(&at);
                    Ok((instance(run), at))
                }
                at if at.starts_with("/late") => Err(CallError::Late(Duration::from_secs(4))),
                at if at.starts_with("/gone") => Err(CallError::Unreachable {
                    address: lender.clone(),
                    source: io::ErrorKind::NotFound.into(),
                }),
                _ => Err(CallError::Refused(RemoteError {
                    kind: ErrorKind::UnknownDevice,
                    message: "no device disk0".into(),
                })),
            }
        })
    }

    #[test]
    fn a_device_is_at_one_lender() {
        for lenders in [
            &["/has"][..],
            &["/none", "/has"],
            &["/late", "/has", "/gone"],
            &["/has", "/none", "/has"],
        ] {
            let (lender, found) = find(lenders).unwrap();
            assert_eq!(
                (lender.to_string().as_str(), found.as_str()),
                ("/has", "/has")
            );
        }
    }

    #[test]
    fn a_lender_at_two_addresses_is_one() {
        let (lender, _) = find(&["/none", "/has@b", "/has-too@b"]).unwrap();
        assert_eq!(lender.to_string(), "/has@b");
        find(&["/has@b", "/has-too@c"]).unwrap_err();
    }

    #[test]
    fn no_lender_at_all_is_named_as_such() {
        let error = find(&[]).unwrap_err().to_string();
        assert!(error.contains("(asked: none: this host"), "{error}");
    }

    #[test]
    fn any_number_of_lenders_is_asked() {
        let mut lenders = vec!["/none"; 5 * MAX_ASKED];
        lenders.push("/has");
        assert_eq!(find(&lenders).unwrap().1, "/has");
    }

    #[test]
    fn a_device_at_two_lenders_is_refused_by_their_names() {
        let error = find(&["/has-a", "/none", "/has-b"])
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("device disk0 is at two lenders, /has-a and /has-b: "),
            "{error}"
        );
    }

    #[test]
    fn a_lender_that_does_not_answer_may_have_the_device() {
        let error = find(&["/none", "/late", "/gone"]).unwrap_err();
        assert!(
            matches!(error, FindError::Lender(CallError::Late(_))),
            "{error}"
        );
        let error = find(&["/none", "/none-b"]).unwrap_err().to_string();
        assert!(error.contains("(asked: /none, /none-b)"), "{error}");
    }
}
