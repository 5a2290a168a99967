//! Leases of media, and leases of a controller in this process.

use std::{sync::Arc, time::Duration};

use farside_daemon::DeviceId;

use super::{CallError, Client, Lease, TIMEOUT};
use crate::{Address, Channel, Dialer, Generation, MediumLease, Reply, Request, Secret};

impl Client {
    /// See [`Request::BorrowMedium`]. The connection carries frames from then on.
    pub fn borrow_medium(
        mut self,
        device: &DeviceId,
        keep: Duration,
        resumes: Option<Secret>,
    ) -> Result<(MediumLease, Channel), CallError> {
        let request = Request::BorrowMedium {
            device: device.to_owned(),
            fence: self.fence,
            keep_ms: keep.as_millis().try_into().unwrap_or(u64::MAX),
            resumes,
        };
        match self.call(request, &[])? {
            (Reply::Medium(lease), _) => Ok((*lease, self.channel)),
            (other, _) => Err(self.unexpected(&other)),
        }
    }

    /// The client of a lease of a controller in this process, which answers on `channel` as if it was
    /// asked to [borrow](Client::borrow_device). `address` and `lender` are those of its medium.
    pub fn leased(
        channel: Channel,
        address: &Address,
        lender: String,
        dialer: Dialer,
    ) -> Result<(Self, Lease), CallError> {
        let mut client = Self {
            address: address.clone(),
            dialer,
            channel,
            generation: Generation(0),
            accesses: Arc::default(),
            lender,
            instance: None,
            deadline: None,
            fence: None,
            answers_due: 0,
            failed: false,
            process_ended: false,
        };
        let (reply, fds) = client.channel.receive::<Reply>(TIMEOUT)?;
        if let Reply::Refused(error) = reply {
            return Err(error.into());
        }
        let lease = client.take_lease(reply, fds)?;
        Ok((client, lease))
    }
}
