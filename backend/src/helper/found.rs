//! The lenders that were found, to which connections may be opened.

use std::{
    collections::HashSet,
    sync::{Mutex, PoisonError},
};

use farside_discovery::{Discovery, Known};
use farside_lender_protocol::Address;

/// Maximum number of lenders, all looks together.
const MAX_FOUND: usize = 1000;

#[derive(Default)]
pub(super) struct Found(Mutex<HashSet<Address>>);

impl Found {
    /// Looks for lenders, and adds those that are found.
    pub(super) fn look(&self, discovery: Option<&Discovery>) -> Known {
        let known = discovery.map(Discovery::lenders).unwrap_or_default();
        let mut found = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for lender in known.now.iter().chain(&known.before) {
            if found.len() < MAX_FOUND {
                found.insert(lender.clone());
            }
        }
        known
    }

    pub(super) fn all(&self) -> HashSet<Address> {
        let found = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        found.clone()
    }
}
