//! The DMA path if lender and borrower are the same host.
//!
//! There is no NTB between them, so no window to run out of: the device's domain
//! maps IOVA to the borrower's memory at once. Its mappings are the composition of
//! what the borrower mapped (peer address to memory) and the windows that are open
//! (IOVA to peer address): a piece for each pair that meets, made when both are
//! there, gone when either goes.

mod composition;
mod path;

pub use composition::{Composition, Mapper, Piece};
pub use path::LocalPath;
