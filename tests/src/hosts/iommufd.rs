//! One host whose kernel offers iommufd: the same borrow by VFIO's newer interface.
//! A scripted guest uses the drive, so the host needs to run no QEMU.

use std::{
    fs::File,
    io::Read,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use farside_testbed::kernel_view::LiveMappings;

use super::{
    Set,
    facts::{IommufdFacts, seconds},
    host::{Host, socket},
    play::{DEVICE, DRIVE, VM},
    scripted::Scripted,
    stage::drive,
};
