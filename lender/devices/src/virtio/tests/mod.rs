use crate::nvme::tests::{crash, failing, random, watch};

mod bench;
mod blk;
mod faults;
mod growth;
mod hostile;
mod net;
mod network;
mod recovery;
mod registers;
mod restarts;
mod rings;
mod world;
