//! A borrow with the resources of each state.

use farside_lender_protocol::{CallError, ChannelError, Client, Secret};
use farside_ntb::BarWindow;

use super::work::resume::Away;
use crate::borrow::{
    State,
    network::Remote,
    path::{OpenPath, OpenReport},
};
use crate::records::Recorded;

/// See [`crate::borrow`].
#[derive(Default)]
pub(super) enum Borrow {
    #[default]
    Unleased,
    Leased(Lease),
    Ready(Lease, OpenPath),
    /// Memory that the lender may still reach stays pinned and mapped.
    Closing(Lease, OpenPath),
    /// The lease goes on, and has no process.
    Away(Box<Away>),
    Lost,
}

/// A lease: the connection to the lender, and the resources that end with it.
pub(super) struct Lease {
    pub(super) client: Recorded,
    /// The right to go on when the device's process has ended.
    pub(super) chain: Option<Secret>,
    /// The controller, if the medium is borrowed over the network. After the connection.
    pub(super) _remote: Option<Remote>,
    /// The NTB window onto the device's BARs, if the device is on a peer host.
    pub(super) bar_window: Option<BarWindow>,
    /// The size of the lender's LUT entries, once a window has shown it.
    pub(super) page_window: Option<u64>,
}

impl Borrow {
    /// Converts `state`, which must be one without a lease.
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
            Self::Away(away) => away.state(),
            Self::Lost => State::Lost,
        }
    }

    pub(super) fn lease(&mut self) -> Result<&mut Lease, CallError> {
        match self {
            Self::Leased(lease) | Self::Ready(lease, _) | Self::Closing(lease, _) => Ok(lease),
            Self::Unleased | Self::Away(_) | Self::Lost => Err(no_lease()),
        }
    }

    /// The connection to the lender, and the open path.
    pub(super) fn path(&mut self) -> Result<(&mut Client, &mut OpenPath), CallError> {
        match self {
            Self::Ready(lease, path) | Self::Closing(lease, path) => Ok((&mut lease.client, path)),
            Self::Unleased | Self::Leased(_) | Self::Away(_) | Self::Lost => Err(no_lease()),
        }
    }

    /// Reports the memory behind the open path.
    pub(super) fn report(&self) -> OpenReport {
        match self {
            Self::Ready(_, path) | Self::Closing(_, path) => path.report(),
            Self::Away(away) => away.path().map(OpenPath::report).unwrap_or_default(),
            Self::Unleased | Self::Leased(_) | Self::Lost => OpenReport::default(),
        }
    }

    /// The lease and its open path, if any.
    pub(super) fn into_parts(self) -> Option<(Lease, Option<OpenPath>)> {
        match self {
            Self::Leased(lease) => Some((lease, None)),
            Self::Ready(lease, path) | Self::Closing(lease, path) => Some((lease, Some(path))),
            Self::Unleased | Self::Away(_) | Self::Lost => None,
        }
    }
}

fn no_lease() -> CallError {
    CallError::Lost(ChannelError::Closed)
}
