//! All output forms of a VM configuration are equivalent.

use std::collections::BTreeMap;

use farside_qemu_configs::{
    Accel, Device, DomainOptions, Firmware, HugePages, Machine, MonitorSocket, Vm, VmError,
    message_timeout_ms, read_domain,
};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

/// The QEMU arguments in a domain, as libvirt reads them.
fn arguments_of(xml: &str) -> Vec<String> {
    let tree = roxmltree::Document::parse(xml).unwrap();
    let namespace = "http://libvirt.org/schemas/domain/qemu/1.0";
    let values = tree
        .descendants()
        .filter(|node| node.has_tag_name((namespace, "arg")));
    values
        .map(|node| node.attribute("value").unwrap().to_owned())
        .collect()
}

/// The parts that a guest sees of borrowed devices, and QEMU of their sockets: ports and
/// devices, with addresses, sockets and timeouts.
fn borrowed(devices: Vec<Value>) -> Vec<Value> {
    let ours = ["vfio-user-pci", "pcie-root-port"];
    let is_ours = |device: &Value| ours.iter().any(|driver| device["driver"] == *driver);
    devices.into_iter().filter(is_ours).collect()
}

/// Sections of a `-readconfig` file as QEMU reads it: kind, id, keys.
fn sections(text: &str) -> Vec<(String, Option<String>, BTreeMap<String, String>)> {
    let mut sections = Vec::new();
    for line in text.lines().filter(|line| !line.is_empty()) {
        if let Some(heading) = line.strip_prefix('[') {
            let heading = heading.strip_suffix(']').unwrap();
            let (kind, id) = match heading.split_once(' ') {
                Some((kind, id)) => (kind, Some(id.trim_matches('"').to_owned())),
                None => (heading, None),
            };
            sections.push((kind.to_owned(), id, BTreeMap::new()));
        } else {
            let (key, value) = line.trim().split_once(" = ").unwrap();
            let value = value.strip_prefix('"').unwrap().strip_suffix('"').unwrap();
            let keys: &mut BTreeMap<_, _> = &mut sections.last_mut().unwrap().2;
            assert!(keys.insert(key.to_owned(), value.to_owned()).is_none());
        }
    }
    sections
}

/// The JSON values of all `option`s.
fn values_of(args: &[String], option: &str) -> Vec<Value> {
    args.windows(2)
        .filter(|pair| pair[0] == option)
        .map(|pair| serde_json::from_str(&pair[1]).unwrap())
        .collect()
}

fn text(value: &Value) -> String {
    match value {
        Value::Bool(on) => (if *on { "on" } else { "off" }).to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn vm_strategy() -> impl Strategy<Value = Vm> {
    let ports = prop::collection::btree_set(0u16..16, 0..6).prop_shuffle_ports();
    (
        ports,
        1u64..4096,
        any::<[bool; 5]>(),
        0u16..5,
        0usize..3,
        1u32..9,
    )
        .prop_map(
            |(ports, mib, [i440fx, ovmf, monitor, boot, functions], spare, pages, vcpus)| {
                let mut vm = Vm::new("vm1".parse().unwrap(), mib << 20);
                vm.vcpus = vcpus;
                vm.spare_ports = spare;
                if i440fx {
                    vm.machine = Machine::I440fx;
                }
                (vm.huge_pages, vm.accel) = match pages {
                    0 => (HugePages::None, Accel::Auto),
                    1 => (HugePages::Of2MiB, Accel::Kvm),
                    _ => (HugePages::Of1GiB, Accel::Tcg),
                };
                vm.ram = vm.ram.next_multiple_of(vm.huge_pages.granule());
                if ovmf {
                    let (code, vars) = ("/fw/code, 4M.fd".into(), "/vm/vars.fd".into());
                    vm.firmware = Firmware::Ovmf { code, vars };
                }
                vm.monitor = monitor.then(|| MonitorSocket::Path("/run/vm1/q,mp".into()));
                vm.devices = ports
                    .into_iter()
                    .enumerate()
                    .map(|(n, port)| Device {
                        id: format!("disk{n}").parse().unwrap(),
                        port: Some(port),
                        socket: format!("/run/farside/vm1/disk{n}.sock").into(),
                        function: 0,
                        bootindex: (boot && n == 0).then_some(0),
                    })
                    .collect();
                if functions && let Some(first) = vm.devices.first().cloned() {
                    for function in [7, 1] {
                        let id = format!("function{function}");
                        vm.devices.push(Device {
                            socket: format!("/run/farside/vm1/{id}.sock").into(),
                            id: id.parse().unwrap(),
                            function,
                            bootindex: None,
                            ..first.clone()
                        });
                    }
                }
                vm
            },
        )
}

trait ShufflePorts {
    fn prop_shuffle_ports(self) -> BoxedStrategy<Vec<u16>>;
}

impl<S: Strategy<Value = std::collections::BTreeSet<u16>> + 'static> ShufflePorts for S {
    fn prop_shuffle_ports(self) -> BoxedStrategy<Vec<u16>> {
        self.prop_map(|set| set.into_iter().collect::<Vec<_>>())
            .prop_shuffle()
            .boxed()
    }
}

proptest! {
    #[test]
    fn all_forms_agree(vm in vm_strategy()) {
        let line = vm.command_line("qemu").unwrap();
        let json_form = vm.json_form(&line).unwrap();
        let config = vm.read_config("qemu", "/tmp/a.cfg".as_ref()).unwrap();
        let rest = &config.command_line.args;
        prop_assert_eq!(&rest[..2], ["-readconfig", "/tmp/a.cfg"]);
        let in_file = sections(&config.text);
        let keys_of = |kind: &str| -> Vec<_> {
            in_file.iter().filter(|section| section.0 == kind).collect()
        };

        // Devices and ports: in the command line, in JSON, and in the monitor's form.
        let plugged = values_of(&line.args, "-device");
        let mut stated = json_form["ports"].as_array().unwrap().clone();
        stated.extend(json_form["devices"].as_array().unwrap().iter().cloned());
        prop_assert_eq!(&plugged, &stated);
        let by_monitor: Vec<_> = (0..vm.devices.len())
            .map(|n| vm.device_add(n).unwrap())
            .collect();
        prop_assert_eq!(&values_of(rest, "-device"), &by_monitor);
        prop_assert_eq!(json_form["devices"].as_array().unwrap(), &by_monitor);

        // Under libvirt, whose XML has the same devices and RAM.
        let domain = vm.libvirt_domain(&DomainOptions::default()).unwrap();
        let there = borrowed(values_of(&arguments_of(&domain), "-device"));
        prop_assert_eq!(&there, &borrowed(plugged.clone()));
        let timeouts = there.iter().filter(|device| device["driver"] == "vfio-user-pci");
        for device in timeouts {
            prop_assert_eq!(&device["x-msg-timeout"], message_timeout_ms(vm.ram));
        }
        let read = read_domain(&domain).unwrap().unwrap();
        prop_assert_eq!((read.memory, read.machine), (vm.ram, vm.machine));

        // Root ports in the file.
        let ports: Vec<Map<_, _>> = keys_of("device").iter().map(|(_, id, keys)| {
            let mut port: Map<_, _> = keys.iter().map(|(k, v)| (k.clone(), json!(v))).collect();
            port.insert("id".into(), json!(id));
            port
        }).collect();
        let expected: Vec<Map<_, _>> = json_form["ports"].as_array().unwrap().iter().map(|port| {
            let port = port.as_object().unwrap();
            port.iter().map(|(k, v)| (k.clone(), json!(text(v)))).collect()
        }).collect();
        prop_assert_eq!(ports, expected);

        // Memory.
        let (_, id, memory) = keys_of("object")[0];
        prop_assert_eq!(id.as_deref(), Some("mem"));
        for (key, value) in json_form["memory"].as_object().unwrap() {
            if key != "id" {
                prop_assert_eq!(memory.get(key), Some(&text(value)));
            }
        }
        prop_assert_eq!(json_form["memory"]["size"].as_u64(), Some(vm.ram));
        let object = line.args.iter().position(|arg| arg == "-object").unwrap();
        let mib = vm.ram >> 20;
        let wanted = format!("memory-backend-memfd,id=mem,size={mib}M,share=on");
        prop_assert!(line.args[object + 1].starts_with(&wanted));
        let huge = line.args[object + 1].contains("hugetlb=on");
        prop_assert_eq!(huge, memory.contains_key("hugetlb"));
        prop_assert_eq!(&keys_of("memory")[0].2["size"], &format!("{mib}M"));

        // Machine and monitor.
        let machine = &keys_of("machine")[0].2;
        prop_assert_eq!(&machine["type"], vm.machine.name());
        prop_assert_eq!(&machine["memory-backend"], "mem");
        prop_assert_eq!(machine.contains_key("pflash0"), rest.contains(&"-blockdev".to_owned()));
        prop_assert_eq!(values_of(rest, "-blockdev"), values_of(&line.args, "-blockdev"));
        let socket = keys_of("chardev").first().map(|section| section.2["path"].clone());
        prop_assert_eq!(json!(socket), json_form["monitor"].clone());
        prop_assert_eq!(line.args.contains(&"-qmp".to_owned()), socket.is_some());
    }
}

#[test]
fn a_file_for_readconfig() {
    let mut vm = Vm::new("vm1".parse().unwrap(), 1 << 30);
    vm.accel = Accel::Tcg;
    vm.monitor = Some(MonitorSocket::Path("/run/q".into()));
    vm.devices.push(Device {
        id: "disk0".parse().unwrap(),
        port: None,
        socket: "/run/disk0.sock".into(),
        function: 0,
        bootindex: None,
    });
    let config = vm.read_config("qemu", "/tmp/a.cfg".as_ref()).unwrap();
    let expected = "[name]\n  guest = \"vm1\"\n  debug-threads = \"on\"\n\n\
        [machine]\n  type = \"q35\"\n  memory-backend = \"mem\"\n\n\
        [accel]\n  accel = \"tcg\"\n  thread = \"multi\"\n\n\
        [smp-opts]\n  cpus = \"1\"\n\n\
        [memory]\n  size = \"1024M\"\n\n\
        [object \"mem\"]\n  qom-type = \"memory-backend-memfd\"\n  share = \"on\"\n  size = \"1073741824\"\n\n\
        [chardev \"qmp\"]\n  backend = \"socket\"\n  path = \"/run/q\"\n  server = \"on\"\n  wait = \"off\"\n\n\
        [mon \"qmp\"]\n  chardev = \"qmp\"\n  mode = \"control\"\n\n\
        [device \"port0\"]\n  addr = \"0x10.0x0\"\n  bus = \"pcie.0\"\n  chassis = \"1\"\n  \
        driver = \"pcie-root-port\"\n  multifunction = \"on\"\n  slot = \"1\"\n";
    // Keys are in the order of a map, which is irrelevant to QEMU.
    assert_eq!(sections(&config.text), sections(expected));
    assert_eq!(
        config.command_line.args,
        [
            "-readconfig",
            "/tmp/a.cfg",
            "-cpu",
            "max",
            "-device",
            r#"{"driver":"vfio-user-pci","id":"dev-disk0","bus":"port0","addr":"0x0","socket":{"type":"unix","path":"/run/disk0.sock"},"x-msg-timeout":10000}"#,
        ]
    );
}

#[test]
fn a_file_cannot_have_a_quote() {
    let mut vm = Vm::new("vm1".parse().unwrap(), 1 << 30);
    vm.monitor = Some(MonitorSocket::Path("/run/\"q".into()));
    let error = vm.read_config("qemu", "/tmp/a.cfg".as_ref()).unwrap_err();
    assert!(matches!(error, VmError::ConfigValue { .. }));
    assert_eq!(
        error.to_string(),
        "path = \"/run/\\\"q\" cannot be in a file for -readconfig, whose values have at most \
         1023 bytes and no quote: use another form"
    );
}
