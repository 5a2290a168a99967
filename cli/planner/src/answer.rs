//! The document that `farside plan --json` prints.

use serde::Serialize;

use crate::{ClusterPlan, NtbPlan, VfioPlan};

/// The answers to one question.
#[derive(Clone, Debug, Serialize)]
pub struct Answer {
    /// [`Answer::FORMAT`].
    pub format: u32,
    /// The source of the limits: a preset, a file or a lender.
    pub adapter: Option<String>,
    /// Guests behind an NTB adapter.
    pub ntb: Option<NtbPlan>,
    /// A cluster of many hosts.
    pub cluster: Option<ClusterPlan>,
    /// Guests on the lender's own host.
    pub vfio: Option<VfioPlan>,
    /// Whether everything fits.
    pub fits: bool,
}

impl Default for Answer {
    fn default() -> Self {
        Self {
            format: Self::FORMAT,
            adapter: None,
            ntb: None,
            cluster: None,
            vfio: None,
            fits: false,
        }
    }
}

impl Answer {
    /// The version of the format. Incremented when a key is removed or changes its type or meaning;
    /// new keys leave it as it is.
    pub const FORMAT: u32 = 1;

    /// Problems, with remedies.
    pub fn problems(&self) -> Vec<&str> {
        let ntb = self.ntb.iter().flat_map(|plan| &plan.problems);
        let cluster = self.cluster.iter().flat_map(|plan| &plan.problems);
        let vfio = self.vfio.iter().flat_map(|plan| &plan.problems);
        ntb.chain(cluster).chain(vfio).map(String::as_str).collect()
    }
}
