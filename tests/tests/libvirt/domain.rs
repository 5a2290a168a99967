//! A domain of the host: a user's own, with borrowed devices put into it by
//! `farside libvirt`.

use std::{fs, os::unix::fs::PermissionsExt};

use anyhow::{Context, Result, ensure};
use farside_testbed::{AgentPort, Guest};
use farside_tests::{BOOT, SHORT};

use crate::stage::{Stage, boot_xml};

/// Bytes that a test writes.
pub const DATA: u64 = 8 << 20;

/// A domain that is defined.
pub struct Domain<'s, 'a> {
    stage: &'s Stage<'a>,
    pub vm: String,
    agent: AgentPort,
}

/// The XML of a domain as its user wrote it, without borrowed devices.
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
  <!-- Five-level page tables only make an emulated guest slower. -->
  <cpu mode='maximum'><feature policy='disable' name='la57'/></cpu>
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

/// Puts borrowed devices into a domain.
fn with_devices(xml: String, vm: &str, devices: &[&str], stage: &Stage) -> Result<String> {
    let mut metadata = format!(
        "<metadata><farside:vm xmlns:farside='urn:farside:libvirt:1'>\
         <farside:lender address='{}'/>",
        stage.lender().display()
    );
    let mut args = String::new();
    for (port, device) in devices.iter().enumerate() {
        metadata += &format!("<farside:device id='{device}' port='{port}'/>");
        let root_port = serde_json::json!({"driver": "pcie-root-port", "id": format!("port{port}"),
            "bus": "pcie.0", "addr": format!("0x10.{port:#x}"), "multifunction": port == 0,
            "chassis": 100 + port, "slot": 100 + port});
        let socket = format!("/run/farside/vm/{vm}/{device}.sock");
        let device = serde_json::json!({"driver": "vfio-user-pci", "id": format!("dev-{device}"),
            "bus": format!("port{port}"), "addr": "0x0", "x-msg-timeout": 60000,
            "socket": {"type": "unix", "path": socket}});
        for value in [root_port, device] {
            args += &format!("<qemu:arg value='-device'/><qemu:arg value='{value}'/>");
        }
    }
    metadata += "</farside:vm></metadata>";
    Ok(xml
        .replace("<domain type='qemu'>", "<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>")
        .replace("</name>", &format!("</name>{metadata}<memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>"))
        .replace("</domain>", &format!("<qemu:commandline>{args}</qemu:commandline></domain>")))
}

impl<'s, 'a> Domain<'s, 'a> {
    /// Defines a domain that borrows these devices.
    pub fn define(stage: &'s Stage<'a>, vm: &str, devices: &[&str]) -> Result<Self> {
        let agent = AgentPort::listen(vm, stage.cluster.folder())?;
        let xml = with_devices(plain_xml(vm, &agent)?, vm, devices, stage)?;
        let file = stage.cluster.file(&format!("{vm}.xml"), &xml)?;
        let file = file.to_str().context("a path is text")?;
        stage.ok(&["virt-xml-validate", file, "domain"])?;
        stage.virsh(&["define", file])?;
        Ok(Self {
            stage,
            vm: vm.to_owned(),
            agent,
        })
    }

    /// Starts it and waits for the guest's agent.
    pub fn boot(&self) -> Result<Guest> {
        self.stage.virsh(&["start", &self.vm])?;
        let guest = self.agent.accept(SHORT)?;
        guest.wait_agent(BOOT)?;
        Ok(guest)
    }

    /// Ends it at once, as if it lost power.
    pub fn destroy(&self) -> Result<()> {
        self.stage.virsh(&["destroy", &self.vm]).map(drop)
    }

    /// Lets QEMU connect to the agent's socket and write the console as any user.
    pub fn let_anyone_in(&self) -> Result<()> {
        fs::write(self.agent.console(), "").context("making the console's file")?;
        for path in [self.agent.socket(), self.agent.console()] {
            fs::set_permissions(path, fs::Permissions::from_mode(0o666))
                .with_context(|| path.display().to_string())?;
        }
        Ok(())
    }

    /// What its backend has logged.
    pub fn backend_log(&self) -> Result<String> {
        let path = self.stage.path("/var/lib/farside/vm");
        let path = path.join(&self.vm).join("backend.log");
        fs::read_to_string(&path).with_context(|| path.display().to_string())
    }
}

/// Writes [`DATA`] bytes to a drive and reads them back from the medium. Returns
/// their checksum.
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

/// The checksum of the first [`DATA`] bytes of a drive.
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
