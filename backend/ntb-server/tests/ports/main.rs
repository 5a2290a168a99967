//! Two scripted VMMs at the two ports of an NTB.

mod independent_client;
mod life;
mod messages;
mod rates;
mod vmm;
mod windows;
mod world;
