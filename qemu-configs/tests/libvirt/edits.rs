//! Devices are added and removed, and everything else stays.

use farside_qemu_configs::{add_devices, check_domain, read_domain, remove_all, remove_devices};

use crate::common::{VIRT_INSTALL, add, added_lines, borrowed, socket};

#[test]
fn what_is_added_to_a_domain_of_virt_install() {
    let edited = add(VIRT_INSTALL, &["disk0"]).unwrap();
    let port = |n: usize| {
        let multi = n == 0;
        let number = n + 1;
        format!(
            r#"    <qemu:arg value='{{"driver":"pcie-root-port","id":"port{n}","bus":"pcie.0","addr":"0x10.{n:#x}","multifunction":{multi},"chassis":{number},"slot":{number}}}'/>"#
        )
    };
    let option = "    <qemu:arg value='-device'/>".to_owned();
    let lines: Vec<String> = vec![
        "    <farside:vm xmlns:farside='urn:farside:libvirt:1' spare-ports='2' added='access commandline memoryBacking source'>".into(),
        "      <farside:device id='disk0' port='0'/>".into(),
        "    </farside:vm>".into(),
        "  <memoryBacking>".into(),
        "    <source type='memfd'/>".into(),
        "    <access mode='shared'/>".into(),
        "  </memoryBacking>".into(),
        "  <qemu:commandline xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>".into(),
        option.clone(),
        port(0),
        option.clone(),
        port(1),
        option.clone(),
        port(2),
        option,
        r#"    <qemu:arg value='{"driver":"vfio-user-pci","id":"dev-disk0","bus":"port0","addr":"0x0","socket":{"type":"unix","path":"/run/farside/vm/web1/disk0.sock"},"x-msg-timeout":23000}'/>"#.into(),
        "    <qemu:arg value='-blockdev'/>".into(),
        r#"    <qemu:arg value='{"driver":"vpc","file":{"driver":"file","filename":"/run/farside/vm/web1/anchor.vhd","locking":"off"},"node-name":"farside-borrowed-devices","read-only":true}'/>"#.into(),
        "  </qemu:commandline>".into(),
    ];
    assert_eq!(added_lines(VIRT_INSTALL, &edited), lines);
    assert_eq!(check_domain(&edited, &socket), Ok(vec![]));
    assert_eq!(add(&edited, &["disk0"]).unwrap(), edited, "twice is once");
    assert_eq!(remove_all(&edited).unwrap(), VIRT_INSTALL);
}

#[test]
fn devices_keep_their_ports_when_others_come_and_go() {
    let three = add(VIRT_INSTALL, &["a", "b", "c"]).unwrap();
    let two = remove_devices(&three, &["b".parse().unwrap()], &borrowed(&[])).unwrap();
    let ports = |xml: &str| -> Vec<_> {
        let vm = read_domain(xml).unwrap().unwrap();
        let devices = vm.devices.into_iter();
        devices.map(|d| (d.id.to_string(), d.port)).collect()
    };
    assert_eq!(ports(&two), [("a".into(), 0), ("c".into(), 2)]);
    let again = add(&two, &["d"]).unwrap();
    assert_eq!(
        ports(&again),
        [("a".into(), 0), ("c".into(), 2), ("d".into(), 1)]
    );
    let none = remove_devices(
        &again,
        &["a", "c", "d"].map(|id| id.parse().unwrap()),
        &borrowed(&[]),
    );
    assert_eq!(none.unwrap(), VIRT_INSTALL);
}

#[test]
fn one_line_stays_one_line_and_crlf_stays_crlf() {
    let line = "<domain type='qemu'><name>a</name><memory>1048576</memory><metadata/>\
                <os><type>hvm</type></os></domain>";
    let edited = add(line, &["disk0"]).unwrap();
    assert!(!edited.contains('\n'), "{edited}");
    assert!(edited.contains("<metadata><farside:vm "), "{edited}");
    assert!(
        edited.contains(r#""bus":"pci.0","addr":"0x10""#),
        "{edited}"
    );
    assert_eq!(remove_all(&edited).unwrap(), line);

    let crlf = VIRT_INSTALL.replace('\n', "\r\n");
    let edited = add(&crlf, &["disk0"]).unwrap();
    assert_eq!(edited.matches('\n').count(), edited.matches("\r\n").count());
    assert_eq!(remove_all(&edited).unwrap(), crlf);

    let unfinished = VIRT_INSTALL.trim_end();
    let edited = add(unfinished, &["disk0"]).unwrap();
    assert!(edited.ends_with("</domain>"));
    assert_eq!(remove_all(&edited).unwrap(), unfinished);
}

#[test]
fn what_is_there_already_is_used_and_stays() {
    let theirs = VIRT_INSTALL
        .replace(
            "<domain type='kvm'>",
            "<domain type='kvm' xmlns:q='http://libvirt.org/schemas/domain/qemu/1.0' xmlns:qemu='urn:other'>",
        )
        .replace(
            "  <vcpu ",
            "  <memoryBacking>\n    <hugepages/>\n    <access mode='shared'/>\n  </memoryBacking>\n  <vcpu ",
        )
        .replace(
            "</devices>\n</domain>",
            "</devices>\n  <q:commandline>\n    <q:arg value='-s'/><!-- <q:arg/> -->\n    <q:env name='A' value='-device'/>\n  </q:commandline>\n</domain>",
        );
    let edited = add(&theirs, &["disk0"]).unwrap();
    let added = added_lines(&theirs, &edited);
    assert!(added[0].contains("added='source'"), "{added:?}");
    assert!(added.contains(&"    <source type='memfd'/>".to_owned()));
    assert!(added.contains(&"    <q:arg value='-device'/>".to_owned()));
    assert!(!edited.contains("<qemu:"));
    assert_eq!(remove_all(&edited).unwrap(), theirs);
}

#[test]
fn numa_cells_are_told_that_they_are_shared() {
    let theirs = VIRT_INSTALL.replace(
        "migratable='on'/>",
        "migratable='on'>\n    <numa>\n      <cell id='0' cpus='0' memory='2097152'/>\n      \
         <cell\n id='1' cpus='1' memory='2097152' memAccess=\"shared\" />\n    </numa>\n  </cpu>",
    );
    assert_eq!(
        check_domain(&theirs, &socket).unwrap()[1].to_string(),
        "line 27, column 7: this NUMA cell's memory is not marked as shared: \
         add memAccess='shared' (farside libvirt --edit does)"
    );
    let edited = add(&theirs, &["disk0"]).unwrap();
    assert!(
        edited.contains("<cell memAccess='shared' id='0'"),
        "{edited}"
    );
    assert_eq!(edited.matches("memAccess").count(), 2);
    assert_eq!(check_domain(&edited, &socket), Ok(vec![]));
    assert_eq!(remove_all(&edited).unwrap(), theirs);
}

/// libvirt reformats a domain: other quotes, no comments, the namespace at the root.
#[test]
fn what_libvirt_wrote_anew_is_known_again() {
    let edited = add(VIRT_INSTALL, &["disk0"]).unwrap();
    let anew = edited
        .replace(
            " xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'",
            "",
        )
        .replace(
            "<domain type='kvm'>",
            "<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>",
        )
        .replace("{\"", "{&quot;")
        .replace("\":", "&quot;:")
        .replace("'urn:farside:libvirt:1'", "\"urn:farside:libvirt:1\"");
    assert_ne!(anew, edited);
    assert_eq!(add(&anew, &["disk0"]).unwrap(), anew);
    let without = remove_all(&anew).unwrap();
    let root = "<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>";
    assert_eq!(without, VIRT_INSTALL.replace("<domain type='kvm'>", root));
}

#[test]
fn more_memory_takes_a_new_timeout() {
    let edited = add(VIRT_INSTALL, &["disk0"]).unwrap();
    let grown = edited.replace(
        "  <currentMemory",
        "  <maxMemory slots='2' unit='GiB'>8</maxMemory>\n  <currentMemory",
    );
    let problems = check_domain(&grown, &socket).unwrap();
    assert_eq!(problems.len(), 1);
    let said = problems[0].to_string();
    assert!(
        said.contains("\"x-msg-timeout\":23000")
            && said.ends_with("(8192 MiB of RAM, or the VM's open-timeout, take an x-msg-timeout of 40000 ms): farside libvirt --edit fixes it"),
        "{said}"
    );
    let fixed = add_devices(&grown, &borrowed(&[])).unwrap();
    assert!(fixed.contains("\"x-msg-timeout\":40000"));
    assert_eq!(check_domain(&fixed, &socket), Ok(vec![]));
}

#[test]
fn what_somebody_changed_since_is_left() {
    let edited = add(VIRT_INSTALL, &["disk0"]).unwrap();
    let changed = edited
        .replace(
            "<access mode='shared'/>",
            "<access mode='shared'/>\n    <locked/>",
        )
        .replace("<source type='memfd'/>", "<source type='file'/>");
    let without = remove_all(&changed).unwrap();
    assert_eq!(
        added_lines(VIRT_INSTALL, &without),
        [
            "  <memoryBacking>",
            "    <source type='file'/>",
            "    <locked/>",
            "  </memoryBacking>"
        ]
    );
}

#[test]
fn several_elements_of_farside_become_one() {
    let edited = add(VIRT_INSTALL, &["disk0"]).unwrap();
    let end = "</farside:vm>";
    let element = edited.find("<farside:vm").unwrap()..edited.find(end).unwrap() + end.len();
    let element = &edited[element];
    let doubled = edited.replace(element, &element.repeat(2));
    let once = add(&doubled, &["disk0", "disk1"]).unwrap();
    assert_eq!(add(&once, &["disk0", "disk1"]).unwrap(), once);
    assert_eq!(remove_all(&once).unwrap(), VIRT_INSTALL);
}

#[test]
fn a_lone_carriage_return_in_an_indentation_is_not_repeated() {
    let odd = VIRT_INSTALL.replace("    <libosinfo:libosinfo", "  \r <libosinfo:libosinfo");
    assert_ne!(odd, VIRT_INSTALL);
    let edited = add(&odd, &["disk0"]).unwrap();
    assert_eq!(edited.matches('\r').count(), 1);
    assert_eq!(remove_all(&edited).unwrap(), odd);
}
