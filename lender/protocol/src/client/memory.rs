//! Calls about the memory and the windows of a lease.

use std::os::fd::BorrowedFd;

use farside_fabric::{Iova, PeerAddress};

use super::Client;
use crate::{CallError, Reply, Request};

impl Client {
    /// See [`Request::MapPeer`].
    pub fn map_peer(
        &mut self,
        peer_address: PeerAddress,
        len: u64,
        file: BorrowedFd<'_>,
        offset: u64,
        writable: bool,
    ) -> Result<(), CallError> {
        self.done(
            Request::MapPeer {
                peer_address,
                len,
                offset,
                writable,
            },
            &[file],
        )
    }

    /// See [`Request::UnmapPeer`].
    pub fn unmap_peer(&mut self, peer_address: PeerAddress, len: u64) -> Result<(), CallError> {
        self.done(Request::UnmapPeer { peer_address, len }, &[])
    }

    /// See [`Request::OpenWindow`]. Returns the number of LUT entries that it uses.
    pub fn open_window(
        &mut self,
        iova: Iova,
        peer_address: PeerAddress,
        len: u64,
    ) -> Result<u32, CallError> {
        match self.call(
            Request::OpenWindow {
                iova,
                peer_address,
                len,
            },
            &[],
        )? {
            (Reply::Window { lut_entries }, _) => Ok(lut_entries),
            (other, _) => Err(self.unexpected(&other)),
        }
    }

    /// See [`Request::ReachBar`].
    pub fn reach_bar(
        &mut self,
        iova: Iova,
        exported: PeerAddress,
        len: u64,
    ) -> Result<(), CallError> {
        self.done(
            Request::ReachBar {
                iova,
                exported,
                len,
            },
            &[],
        )
    }

    /// See [`Request::CloseWindow`].
    pub fn close_window(&mut self, iova: Iova) -> Result<(), CallError> {
        self.done(Request::CloseWindow { iova }, &[])
    }
}
