//! A borrow with what each of its states has.

use farside_lender_protocol::{CallError, ChannelError, Client};
use farside_ntb::BarWindow;

use crate::borrow::{
    State,
    path::{OpenPath, OpenReport},
};

/// See [`crate::borrow`].
#[derive(Default)]
pub(super) enum Borrow {
    #[default]
    Unleased,
    Leased(Lease),
    Ready(Lease, OpenPath),
    /// What the lender may still reach is pinned and mapped.
    Closing(Lease, OpenPath),
    Lost,
}

/// A lease: the connection to the lender, and what ends with it.
pub(super) struct Lease {
    pub(super) client: Client,
    /// The VM's way to the device's BARs, where that leads through an NTB.
    pub(super) bar_window: Option<BarWindow>,
    /// What the lender's LUT entries translate, once a window has shown it.
    pub(super) page_window: Option<u64>,
}

impl Borrow {
    /// Of the states without a lease, the one that `state` is.
    pub(super) fn without_lease(state: State) -> Self {
        match state {
            State::Unleased => Self::Unleased,
            _ => Self::Lost,
        }
    }

    pub(super) fn state(&self) -> State {
        match self {
            Self::Unleased => State::Unleased,
            Self::Leased(_) => State::Leased,
            Self::Ready(..) => State::Ready,
            Self::Closing(..) => State::Closing,
            Self::Lost => State::Lost,
        }
    }

    pub(super) fn lease(&mut self) -> Result<&mut Lease, CallError> {
        match self {
            Self::Leased(lease) | Self::Ready(lease, _) | Self::Closing(lease, _) => Ok(lease),
            Self::Unleased | Self::Lost => Err(no_lease()),
        }
    }

    /// The connection to the lender, and what is open.
    pub(super) fn path(&mut self) -> Result<(&mut Client, &mut OpenPath), CallError> {
        match self {
            Self::Ready(lease, path) | Self::Closing(lease, path) => Ok((&mut lease.client, path)),
            Self::Unleased | Self::Leased(_) | Self::Lost => Err(no_lease()),
        }
    }

    /// What is open.
    pub(super) fn report(&self) -> OpenReport {
        match self {
            Self::Ready(_, path) | Self::Closing(_, path) => path.report(),
            Self::Unleased | Self::Leased(_) | Self::Lost => OpenReport::default(),
        }
    }

    /// The lease, and what is open under it.
    pub(super) fn into_parts(self) -> Option<(Lease, Option<OpenPath>)> {
        match self {
            Self::Leased(lease) => Some((lease, None)),
            Self::Ready(lease, path) | Self::Closing(lease, path) => Some((lease, Some(path))),
            Self::Unleased | Self::Lost => None,
        }
    }
}

fn no_lease() -> CallError {
    CallError::Lost(ChannelError::Closed)
}
