//! The three address spaces that a DMA crosses.

use std::{fmt, marker::PhantomData};

use serde::{Deserialize, Serialize};

use crate::{FabricError, PAGE_SIZE};

/// An address of one of the spaces, in bytes.
pub trait Address: Copy + Ord + fmt::Debug + fmt::Display {
    /// The name of the space in messages.
    const SPACE: &'static str;
    /// The address `value`.
    fn new(value: u64) -> Self;
    /// The address as a number.
    fn get(self) -> u64;
}

macro_rules! address {
    ($(#[$doc:meta])* $name:ident, $space:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[derive(Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(u64);

        impl $name {
            /// The address `value`.
            pub const fn new(value: u64) -> Self {
                Self(value)
            }

            /// The address as a number.
            pub const fn get(self) -> u64 {
                self.0
            }

            /// The address `bytes` above, or `None` past the end of the space.
            pub const fn checked_add(self, bytes: u64) -> Option<Self> {
                match self.0.checked_add(bytes) {
                    Some(sum) => Some(Self(sum)),
                    None => None,
                }
            }

            /// The address `bytes` above, modulo 2^64.
            pub const fn wrapping_add(self, bytes: u64) -> Self {
                Self(self.0.wrapping_add(bytes))
            }

            /// Bytes from the last multiple of `unit`, a power of two, up to this address.
            pub const fn offset_in(self, unit: u64) -> u64 {
                self.0 & (unit - 1)
            }

            /// Whether it is a multiple of `unit`, a power of two.
            pub const fn is_aligned_to(self, unit: u64) -> bool {
                self.offset_in(unit) == 0
            }

            /// Bytes from `base` up to this address, or `None` if `base` is above it.
            pub const fn offset_from(self, base: Self) -> Option<u64> {
                self.0.checked_sub(base.0)
            }
        }

        impl Address for $name {
            const SPACE: &'static str = $space;

            fn new(value: u64) -> Self {
                Self(value)
            }

            fn get(self) -> u64 {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    };
}

address! {
    /// What the device puts on its bus. For a borrowed device it equals the guest-physical
    /// address, or, behind a vIOMMU, it is an IOVA of the guest's.
    Iova, "IOVA"
}
address! {
    /// A physical address at the lender, inside the BAR of its NTB.
    BusAddress, "bus address"
}
address! {
    /// An address in the IOMMU domain of a host's NTB endpoint: where the peer host's windows
    /// lead, to guest RAM at the borrower and to BARs at the lender.
    PeerAddress, "peer address"
}

/// Whole pages of one space: at least one, with an end that fits in 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressRange<A> {
    start: u64,
    end: u64,
    space: PhantomData<A>,
}

impl<A: Address> AddressRange<A> {
    /// The `len` bytes from `start`.
    ///
    /// # Errors
    /// [`FabricError::BadRange`] when empty or past the end of the space,
    /// [`FabricError::Unaligned`] when not whole pages of [`PAGE_SIZE`].
    pub fn new(start: A, len: u64) -> Result<Self, FabricError> {
        let start = start.get();
        let end = start.checked_add(len).filter(|&end| end > start);
        let end = end.ok_or(FabricError::BadRange {
            space: A::SPACE,
            start,
            len,
        })?;
        for value in [start, len] {
            if !value.is_multiple_of(PAGE_SIZE) {
                return Err(FabricError::Unaligned {
                    space: A::SPACE,
                    start,
                    len,
                    alignment: PAGE_SIZE,
                });
            }
        }
        Ok(Self {
            start,
            end,
            space: PhantomData,
        })
    }

    /// First address.
    pub fn start(self) -> A {
        A::new(self.start)
    }

    /// First address after the range.
    pub fn end(self) -> A {
        A::new(self.end)
    }

    /// Bytes; never 0, so there is no `is_empty`.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(self) -> u64 {
        self.end - self.start
    }
}

impl<A: Address> fmt::Display for AddressRange<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}..{:#x}", self.start, self.end)
    }
}
