//! OpenSSH between VMs that play hosts.

use std::time::Duration;

use anyhow::{Context, Result};

use super::HostVm;
use crate::{elf, recipe, tools_disk};

/// Timeout of one script: an emulated CPU makes keys slowly.
const LIMIT: Duration = Duration::from_secs(120);

const HOST_KEY: &str = "/etc/ssh/ssh_host_ed25519_key";
const USER_KEY: &str = "/root/.ssh/id_ed25519";
const PID_FILE: &str = "/run/sshd.pid";

/// A VM's name and address on the network, and its public keys.
struct Acquaintance<'a> {
    vm: &'a HostVm,
    name: &'a str,
    address: &'a str,
    host_key: String,
    user_key: String,
}

/// Gives each of the VMs a name, and makes root of each able to log in to all of them by it: with keys
/// made now, and sshd in each. The VMs' network must be up.
pub fn acquaint(vms: &[(&HostVm, &str, &str)]) -> Result<()> {
    let mut known = Vec::new();
    for (vm, name, address) in vms {
        let keys = vm.exec_ok(&key_script(name), LIMIT);
        let keys = keys.with_context(|| format!("making SSH keys in VM {}", vm.name()))?;
        let mut keys = keys.lines().map(str::to_owned);
        known.push(Acquaintance {
            vm,
            name,
            address,
            host_key: keys.next().context("no host key")?,
            user_key: keys.next().context("no user's key")?,
        });
    }
    for Acquaintance { vm, .. } in &known {
        let started = vm.exec_ok(&start_script(&known), LIMIT).and_then(|_| {
            // Written after sshd has begun to listen.
            vm.wait_path(PID_FILE, LIMIT)
        });
        started.with_context(|| format!("starting sshd in VM {}", vm.name()))?;
    }
    Ok(())
}

/// Links OpenSSH to where it looks for its parts, makes keys, and prints the public ones.
fn key_script(name: &str) -> String {
    let mut script = format!("set -e\nhostname {name}\nmkdir -p /usr/lib/openssh\n");
    for program in recipe::HOST_PROGRAMS {
        script += &format!("ln -s {}/{program} /{program}\n", tools_disk::MOUNT);
    }
    script += &format!(
        "# The userland has some of them.
        ln -s {mount}/{libraries}/* /{libraries}/ 2>/dev/null || true
        echo 'root:*:0:0:root:/root:/bin/sh' >/etc/passwd
        echo 'sshd:*:100:65534:sshd:/run/sshd:/bin/false' >>/etc/passwd
        echo 'root:x:0:' >/etc/group
        echo 'hosts: files' >/etc/nsswitch.conf
        mkdir -p /run/sshd /etc/ssh /root/.ssh
        chmod 700 /root/.ssh
        echo 'UsePAM no' >/etc/ssh/sshd_config
        echo 'Subsystem sftp /usr/lib/openssh/sftp-server' >>/etc/ssh/sshd_config
        echo 'PidFile {PID_FILE}' >>/etc/ssh/sshd_config
        for key in {HOST_KEY} {USER_KEY}; do
            ssh-keygen -q -t ed25519 -N '' -C '' -f $key
            cat $key.pub
        done",
        mount = tools_disk::MOUNT,
        libraries = elf::LIBRARY_DIRECTORY,
    );
    script
}

fn start_script(known: &[Acquaintance<'_>]) -> String {
    let mut script = "set -e\n".to_owned();
    for Acquaintance {
        name,
        address,
        host_key,
        user_key,
        ..
    } in known
    {
        script += &format!(
            "echo '{address} {name}' >>/etc/hosts
            echo '{name} {host_key}' >>/root/.ssh/known_hosts
            echo '{user_key}' >>/root/.ssh/authorized_keys\n"
        );
    }
    script + "/usr/sbin/sshd -E /tmp/sshd.log\n"
}
