//! A domain of the host: a user's domain, to which `farside libvirt --edit` adds borrowed
//! devices.

use std::{fs, os::unix::fs::PermissionsExt, time::Duration};

use anyhow::{Context, Result, ensure};
use farside_testbed::{AgentPort, Guest};
use farside_tests::{BOOT, SHORT};

use crate::stage::{Stage, boot_xml};

/// Bytes that a test writes.
pub const DATA: u64 = 8 << 20;

/// A defined domain.
pub struct Domain<'s, 'a> {
    stage: &'s Stage<'a>,
    pub vm: String,
    agent: AgentPort,
}

/// The XML of a user's domain, without borrowed devices.
pub fn plain_xml(vm: &str, agent: &AgentPort) -> Result<String> {
    Ok(format!(
        "<domain type='qemu'>
  <name>{vm}</name>
  <memory unit='MiB'>512</memory>
  <vcpu>1</vcpu>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    {}
  </os>
  <features><acpi/></features>
  <!-- What only makes an emulated guest slower is left out, as in the test bed's TCG_CPU. -->
  <cpu mode='maximum'>
    <feature policy='disable' name='la57'/>
    <feature policy='disable' name='erms'/>
    <feature policy='disable' name='fsrm'/>
  </cpu>
  <on_poweroff>destroy</on_poweroff>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <controller type='usb' model='none'/>
    <memballoon model='none'/>
    <serial type='file'><source path='{}'/></serial>
    <channel type='unix'>
      <source mode='connect' path='{}'/>
      <target type='virtio' name='{}'/>
    </channel>
  </devices>
</domain>
",
        boot_xml()?,
        agent.console().display(),
        agent.socket().display(),
        AgentPort::NAME,
    ))
}

impl<'s, 'a> Domain<'s, 'a> {
    /// Defines a domain that borrows these devices: adds them to the user's XML as a user
    /// would.
    pub fn define(stage: &'s Stage<'a>, vm: &str, devices: &[&str]) -> Result<Self> {
        let agent = AgentPort::listen(vm, stage.cluster.directory())?;
        let xml = plain_xml(vm, &agent)?;
        let file = stage.cluster.file(&format!("{vm}.xml"), &xml)?;
        let file = file.to_str().context("a path is text")?;
        let lender = stage.lender().display().to_string();
        let mut words = vec!["farside", "libvirt", "--edit", file, "--in-place"];
        words.extend(["--vm", vm, "--lender", &lender]);
        for device in devices {
            words.extend(["--device", device]);
        }
        stage.ok(&words)?;
        stage.ok(&["farside", "libvirt", "--check", file])?;
        stage.ok(&["virt-xml-validate", file, "domain"])?;
        stage.virsh(&["define", file])?;
        Ok(Self {
            stage,
            vm: vm.to_owned(),
            agent,
        })
    }

    /// Writes its configuration for this host, with additional lines `more`.
    pub fn describe(&self, devices: &[&str], more: &str) -> Result<()> {
        let text = format!(
            "manager = \"libvirt\"\nmemory = \"512M\"\ndevices = {devices:?}\n\
             lenders = [{:?}]\n{more}\n",
            self.stage.lender()
        );
        let path = self.stage.path("/etc/farside/vm");
        let path = path.join(format!("{}.toml", self.vm));
        fs::write(&path, text).with_context(|| path.display().to_string())
    }

    /// Its XML, as defined.
    pub fn xml(&self) -> Result<String> {
        self.stage.virsh(&["dumpxml", "--inactive", &self.vm])
    }

    /// Redefines it.
    pub fn redefine(&self, xml: &str) -> Result<()> {
        let name = format!("{}.again.xml", self.vm);
        let file = self.stage.cluster.file(&name, xml)?;
        let file = file.display().to_string();
        self.stage.virsh(&["define", "--validate", &file]).map(drop)
    }

    /// Starts it and waits for the guest's agent.
    pub fn boot(&self) -> Result<Guest> {
        // Connections of a QEMU that ended before it ran a guest.
        while self.agent.accept(Duration::ZERO).is_ok() {}
        self.stage.virsh(&["start", &self.vm])?;
        self.guest()
    }

    /// Waits for a guest that was started elsewhere, and its agent.
    pub fn guest(&self) -> Result<Guest> {
        let guest = self.agent.accept(SHORT)?;
        guest.wait_agent(BOOT)?;
        Ok(guest)
    }

    /// Destroys it, as at a power loss.
    pub fn destroy(&self) -> Result<()> {
        self.stage.virsh(&["destroy", &self.vm]).map(drop)
    }

    /// Allows QEMU to connect to the agent's socket and to write the console as any user.
    pub fn let_anyone_in(&self) -> Result<()> {
        fs::write(self.agent.console(), "").context("making the console's file")?;
        for path in [self.agent.socket(), self.agent.console()] {
            fs::set_permissions(path, fs::Permissions::from_mode(0o666))
                .with_context(|| path.display().to_string())?;
        }
        Ok(())
    }

    /// The log of its backend.
    pub fn backend_log(&self) -> Result<String> {
        let path = self.stage.path("/var/lib/farside/vm");
        let path = path.join(&self.vm).join("backend.log");
        fs::read_to_string(&path).with_context(|| path.display().to_string())
    }
}

/// Writes [`DATA`] bytes to a disk and reads them back from the medium. Returns their
/// checksum.
pub fn write_and_read(guest: &Guest, drive: &str) -> Result<String> {
    guest.wait_path(drive, SHORT)?;
    let written = guest.exec_ok(
        &format!(
            "dd if=/dev/urandom of=/tmp/data bs=1M count={count} 2>/dev/null &&
             dd if=/tmp/data of={drive} bs=1M oflag=direct conv=fsync 2>/dev/null &&
             sha256sum < /tmp/data",
            count = DATA >> 20
        ),
        SHORT,
    )?;
    let written = written.split_whitespace().next().unwrap_or_default();
    ensure!(written.len() == 64, "no checksum: {written:?}");
    ensure!(written == read(guest, drive)?, "{drive} has other data");
    Ok(written.to_owned())
}

/// The checksum of the first [`DATA`] bytes of a disk.
pub fn read(guest: &Guest, drive: &str) -> Result<String> {
    guest.wait_path(drive, SHORT)?;
    let read = guest.exec_ok(
        &format!(
            "dd if={drive} bs=1M count={} iflag=direct 2>/dev/null | sha256sum",
            DATA >> 20
        ),
        SHORT,
    )?;
    Ok(read
        .split_whitespace()
        .next()
        .unwrap_or_default()
        .to_owned())
}
