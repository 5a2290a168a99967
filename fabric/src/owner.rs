//! Whose devices share windows.

use std::fmt;

/// Whose a device is. Devices of equal owners share windows, and reach the BARs of each other.
///
/// The name of a VM is stated by its borrower, and two may state the same. So an owner has the borrower's credential
/// beside it: what the lender has verified of the borrower, in a form that is equal for the same borrower alone.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Owner {
    vm: String,
    credential: String,
}

impl Owner {
    /// The VM `vm` of the borrower with this credential.
    pub fn new(vm: &str, credential: &str) -> Self {
        Self {
            vm: vm.to_owned(),
            credential: credential.to_owned(),
        }
    }
}

/// The VM, as messages name it.
impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.vm)
    }
}
