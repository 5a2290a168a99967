//! A domain made by virt-install, and devices to add.

use std::path::PathBuf;

use farside_daemon::{DeviceId, VmName};
use farside_qemu_configs::{Borrowed, BorrowedDevice, DomainError, add_devices};

/// The output of `virt-install --name web1 --memory 4096 --vcpus 2 …`, shortened.
pub const VIRT_INSTALL: &str = "\
<?xml version='1.0' encoding='UTF-8'?>
<!--
WARNING: THIS IS AN AUTO-GENERATED FILE. CHANGES TO IT ARE LIKELY TO BE
OVERWRITTEN AND LOST. <domain> > </domain>
-->
<domain type='kvm'>
  <name>web1</name>
  <uuid>4dea22b3-1d52-d8f3-2516-782e98ab3fa0</uuid>
  <metadata>
    <libosinfo:libosinfo xmlns:libosinfo=\"http://libosinfo.org/xmlns/libvirt/domain/1.0\">
      <libosinfo:os id=\"http://debian.org/debian/13\"/>
    </libosinfo:libosinfo>
  </metadata>
  <memory unit='KiB'>4194304</memory>
  <currentMemory unit='KiB'>4194304</currentMemory>
  <vcpu placement='static'>2</vcpu>
  <os>
    <type arch='x86_64' machine='pc-q35-10.0'>hvm</type>
    <boot dev='hd'/>
  </os>
  <features>
    <acpi/>
    <apic/>
  </features>
  <cpu mode='host-passthrough' check='none' migratable='on'/>
  <clock offset='utc'>
    <timer name='rtc' tickpolicy='catchup'/>
  </clock>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <disk type='file' device='disk'>
      <driver name='qemu' type='qcow2' discard='unmap'/>
      <source file='/var/lib/libvirt/images/web1.qcow2'/>
      <target dev='vda' bus='virtio'/>
      <address type='pci' domain='0x0000' bus='0x04' slot='0x00' function='0x0'/>
    </disk>
    <controller type='pci' index='0' model='pcie-root'/>
    <controller type='pci' index='1' model='pcie-root-port'>
      <model name='pcie-root-port'/>
      <target chassis='1' port='0x10'/>
      <address type='pci' domain='0x0000' bus='0x00' slot='0x02' function='0x0' multifunction='on'/>
    </controller>
    <interface type='hostdev' managed='yes'>
      <source>
        <address type='pci' domain='0x0000' bus='0x00' slot='0x10' function='0x0'/>
      </source>
      <address type='pci' domain='0x0000' bus='0x01' slot='0x10' function='0x0'/>
    </interface>
  </devices>
</domain>
";

pub fn socket(vm: &VmName, device: &DeviceId) -> PathBuf {
    format!("/run/farside/vm/{vm}/{device}.sock").into()
}

pub fn device(id: &str) -> BorrowedDevice {
    BorrowedDevice {
        id: id.parse().unwrap(),
        port: None,
        function: 0,
        bootindex: None,
    }
}

pub fn borrowed(ids: &[&str]) -> Borrowed<'static> {
    Borrowed {
        devices: ids.iter().map(|id| device(id)).collect(),
        lenders: Vec::new(),
        spare_ports: None,
        socket: &socket,
    }
}

pub fn add(xml: &str, ids: &[&str]) -> Result<String, DomainError> {
    add_devices(xml, &borrowed(ids))
}

/// Lines that `new` adds to `old`, which must be the only difference.
pub fn added_lines(old: &str, new: &str) -> Vec<String> {
    let mut old = old.lines().peekable();
    let mut added = Vec::new();
    for line in new.lines() {
        match old.next_if_eq(&line) {
            Some(_) => {}
            None => added.push(line.to_owned()),
        }
    }
    assert_eq!(old.next(), None, "a line has gone");
    added
}
