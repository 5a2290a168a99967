//! Hosts that are VMs.

use std::time::Duration;

use anyhow::{Context, Result};
use farside_bench::fio::Sample;
use farside_testbed::HostVm;

use crate::scene::SHORT;

/// Time that all CPUs of a host were busy so far.
pub(super) fn busy(host: &HostVm) -> Result<Duration> {
    // As of a disk that does nothing.
    let sample = host.exec_ok("echo 0 0 0 0 0 0 0; cat /proc/stat", SHORT)?;
    let idle = "0 0 0 0 0 0 0\ncpu 0 0 0 0 0 0 0 0";
    Ok(Sample::parse(&sample)?.since(&Sample::parse(idle)?).cpu)
}

/// The subsystem of a kernel's NVMe/TCP target.
const SUBSYSTEM: &str = "nqn.2014-08.org.nvmexpress:uuid:farside";

/// Makes files namespaces, from 1 on, of the NVMe/TCP target of a host's kernel at this address.
pub(super) fn serve_by_tcp(host: &HostVm, address: &str, files: &[&str]) -> Result<()> {
    let mut script = format!(
        "set -e
        modprobe nvmet_tcp
        mountpoint -q /sys/kernel/config || mount -t configfs none /sys/kernel/config
        cd /sys/kernel/config/nvmet
        mkdir subsystems/{SUBSYSTEM}
        echo 1 >subsystems/{SUBSYSTEM}/attr_allow_any_host\n"
    );
    for (n, file) in (1..).zip(files) {
        script += &format!(
            "space=subsystems/{SUBSYSTEM}/namespaces/{n}
            mkdir $space
            echo -n {file} >$space/device_path
            echo 1 >$space/buffered_io
            echo 1 >$space/enable\n"
        );
    }
    script += &format!(
        "mkdir ports/1; cd ports/1
        echo tcp >addr_trtype; echo ipv4 >addr_adrfam
        echo {address} >addr_traddr; echo 4420 >addr_trsvcid
        ln -s ../../subsystems/{SUBSYSTEM} subsystems/"
    );
    let set_up = host.exec_ok(&script, SHORT);
    set_up
        .context("setting the kernel's NVMe/TCP target up")
        .map(drop)
}

/// A shell command that connects the kernel to that target.
pub(super) fn connect_by_tcp(address: &str) -> String {
    format!(
        "modprobe nvme_tcp &&
        echo -n transport=tcp,traddr={address},trsvcid=4420,nqn={SUBSYSTEM} >/dev/nvme-fabrics"
    )
}
