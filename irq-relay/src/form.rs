//! Which way interrupts take.

use serde::Deserialize;

/// How a device's interrupts reach the VMM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Interrupts {
    /// The lender's device signals the VMM's eventfd itself. On one machine.
    #[default]
    Direct,
    /// The lender sends a message to the backend, which signals it. Across
    /// machines; or to test that form.
    Relayed,
}
