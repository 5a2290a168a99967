//! A small driver against the model, over memory that is an ordinary
//! implementation of [`Dma`](crate::Dma).

mod admin;
mod bench;
mod cmb;
mod configuration;
pub(crate) mod crash;
mod doorbells;
mod entries;
pub(crate) mod failing;
mod faults;
mod growth;
mod hostile;
mod io;
mod life;
mod mapped;
mod medium;
mod notifications;
mod preempting;
pub(crate) mod random;
mod recovery;
mod reservations;
mod restarts;
mod state;
pub(crate) mod watch;
mod world;
