//! How hosts find lenders that no file lists: lenders announce themselves in etcd, or by mDNS on a
//! LAN, and borrowers look there.
//!
//! - [`EtcdConfig`], [`Discovery`]: what `host.toml` says of it.
//! - [`Announcer`]: a lender's device ids in etcd, under a lease that dies with it. A device id is in
//!   etcd once, so the second lender of an id is refused.
//! - [`Discovery::lenders`]: what a borrower knows. The last answer is kept in a file, for when etcd
//!   does not answer.
//! - [`MdnsAnnouncement`]: a lender on a LAN.
//!
//! What is found is a hint where to ask: the lender is the authority on its devices. Everything found
//! is untrusted: bounded, parsed strictly, and only `tls:` addresses are taken, where the lender's
//! certificate decides.

#![forbid(unsafe_code)]

mod announcer;
mod cache;
mod config;
mod etcd;
mod lookup;
mod mdns;
mod record;

pub use announcer::{AnnounceError, Announcer, Announcing};
pub use config::{EtcdConfig, EtcdEndpoint};
pub use etcd::EtcdError;
pub use lookup::{Change, Discovery, Known, MAX_KNOWN, Watch};
pub use mdns::{MdnsAnnouncement, MdnsError};
