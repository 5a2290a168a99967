//! Properties of all domains.

use farside_qemu_configs::{
    Borrowed, BorrowedDevice, add_devices, check_domain, read_domain, remove_all, remove_devices,
};
use proptest::prelude::*;

use crate::common::{borrowed, device, socket};

/// White space, comments and the like, between elements.
fn between() -> impl Strategy<Value = String> {
    prop::sample::select(vec![
        "",
        "\n",
        "\n  ",
        "\n\t",
        " ",
        "\n\n  ",
        "<!-- > </domain> ' -->",
        "\n  <!-- a -->\n  ",
        "<?pi '>?>",
    ])
    .prop_map(str::to_owned)
}

fn one_of(choices: &[&'static str]) -> impl Strategy<Value = &'static str> + use<> {
    prop::sample::select(choices.to_vec())
}

/// A domain with elements in any order and any layout.
fn domain() -> impl Strategy<Value = String> {
    let root = one_of(&[
        "",
        " xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'",
        " xmlns:q=\"http://libvirt.org/schemas/domain/qemu/1.0\" id='>'",
        " xmlns:qemu='urn:other'",
        " xmlns:farside='urn:else'",
    ]);
    let elements = (
        one_of(&[
            "<name>vm1</name>",
            "<name>\n vm1 </name>",
            "<name><![CDATA[vm1]]></name>",
        ]),
        one_of(&[
            "<memory>1048576</memory>",
            "<memory unit=\"GiB\" >2</memory >",
        ]),
        one_of(&[
            "",
            "<currentMemory unit='KiB'>1024</currentMemory>",
            "<maxMemory slots='1'>9999999</maxMemory>",
        ]),
        one_of(&[
            "",
            "<metadata/>",
            "<metadata />",
            "<metadata></metadata>",
            "<metadata>\n</metadata>",
            "<metadata>\n    <x:y xmlns:x='urn:x' z='/>'><![CDATA[</metadata>]]></x:y>\n  </metadata>",
        ]),
        one_of(&[
            "",
            "<memoryBacking/>",
            "<memoryBacking\n/>",
            "<memoryBacking>\n  </memoryBacking>",
            "<memoryBacking><hugepages/></memoryBacking>",
            "<memoryBacking>\n    <source type='memfd'/>\n  </memoryBacking>",
            "<memoryBacking>\n\t<access mode=\"shared\"/><!-- --><source type='file'/></memoryBacking>",
        ]),
        one_of(&[
            "<os><type machine='q35'>hvm</type></os>",
            "<os>\n<type arch='x86_64' machine='pc-i440fx-9.2'>hvm</type>\n</os>",
        ]),
        one_of(&[
            "",
            "<cpu mode='maximum'/>",
            "<cpu><numa><cell id='0'/><cell\tid='1' memAccess='shared'/>\n<cell></cell></numa></cpu>",
        ]),
        one_of(&[
            "",
            "<devices/>",
            "<devices><disk><address type='pci' domain='0x0000' bus='0x00' slot='0x0f' function='0x0'/></disk></devices>",
            "<devices>\n    <emulator>/a &amp; b</emulator>\n  </devices>",
        ]),
    );
    // With a prefix that the root may declare, or with its own declaration.
    let commandline = (0usize..6).prop_map(|choice| {
        let ns = "http://libvirt.org/schemas/domain/qemu/1.0";
        match choice {
            0 | 1 => String::new(),
            2 => format!("<qq:commandline xmlns:qq='{ns}'/>"),
            3 => format!("<commandline xmlns='{ns}'><arg value='-s'/></commandline>"),
            4 => format!("<qq:commandline xmlns:qq='{ns}'>\n    <qq:arg value='-device'/>\n    <qq:arg value='edu,id=e'/>\n  </qq:commandline>"),
            _ => format!("<qq:commandline xmlns:qq='{ns}'>\n  <!-- x --></qq:commandline>"),
        }
    });
    (
        root,
        elements,
        commandline,
        prop::collection::vec(between(), 10),
        any::<[bool; 3]>(),
    )
        .prop_flat_map(
            |(
                root,
                (name, memory, more, metadata, backing, os, cpu, devices),
                commandline,
                gaps,
                flags,
            )| {
                let elements: Vec<String> =
                    [name, memory, more, metadata, backing, os, cpu, devices]
                        .into_iter()
                        .map(str::to_owned)
                        .chain([commandline])
                        .collect();
                (Just(elements).prop_shuffle(), Just((root, gaps, flags)))
            },
        )
        .prop_map(|(elements, (root, gaps, [crlf, end, declared]))| {
            let mut xml = String::new();
            if declared {
                xml += "<?xml version='1.0'?>\n<!-- <domain> -->\n";
            }
            xml += &format!("<domain type='kvm'{root}>");
            for (gap, element) in gaps.iter().zip(&elements) {
                xml += gap;
                xml += element;
            }
            xml += gaps.last().unwrap();
            xml += "</domain>";
            if end {
                xml += "\n";
            }
            if crlf {
                xml = xml.replace('\n', "\r\n");
            }
            xml
        })
}

fn devices() -> impl Strategy<Value = Vec<BorrowedDevice>> {
    prop::collection::btree_map("[a-z][a-z0-9]{0,2}", any::<bool>(), 1..5).prop_map(|ids| {
        let ids = ids.into_iter().enumerate();
        ids.map(|(n, (id, fixed))| BorrowedDevice {
            port: fixed.then(|| u16::try_from(n).unwrap() + 5),
            ..device(&id)
        })
        .collect()
    })
}

proptest! {
    #[test]
    fn adding_twice_is_adding_once_and_removing_undoes_it(
        xml in domain(),
        devices in devices(),
        lenders in prop::collection::vec("[a-z'&<\"]{1,5}", 0..3),
        spare_ports in prop::option::of(0u16..4),
    ) {
        let wanted = Borrowed { devices: devices.clone(), lenders: lenders.clone(), spare_ports, ..borrowed(&[]) };
        let once = add_devices(&xml, &wanted).unwrap();
        prop_assert_eq!(&add_devices(&once, &wanted).unwrap(), &once);
        prop_assert_eq!(&add_devices(&once, &borrowed(&[])).unwrap(), &once);
        prop_assert_eq!(check_domain(&once, &socket), Ok(vec![]));
        let read = read_domain(&once).unwrap().unwrap();
        prop_assert_eq!(&read.lenders, &lenders);
        prop_assert_eq!(read.devices.len(), devices.len());
        for (read, wanted) in read.devices.iter().zip(&devices) {
            prop_assert_eq!(&read.id, &wanted.id);
            prop_assert!(wanted.port.is_none_or(|port| port == read.port));
        }
        prop_assert_eq!(remove_all(&once).unwrap(), xml);
    }

    #[test]
    fn one_after_another_and_back(xml in domain(), ids in prop::collection::btree_set("[a-z]{1,3}", 2..5)) {
        let ids: Vec<_> = ids.into_iter().collect();
        let mut stages = vec![xml.clone()];
        for id in &ids {
            let last = stages.last().unwrap();
            stages.push(add_devices(last, &borrowed(&[id])).unwrap());
        }
        let all: Vec<_> = ids.iter().map(String::as_str).collect();
        prop_assert_eq!(stages.last().unwrap(), &add_devices(&xml, &borrowed(&all)).unwrap());
        for id in ids.into_iter().rev() {
            let last = stages.pop().unwrap();
            let without = remove_devices(&last, &[id.parse().unwrap()], &borrowed(&[])).unwrap();
            prop_assert_eq!(&without, stages.last().unwrap());
        }
    }

    /// Truncated or corrupted text returns an error, and never panics.
    #[test]
    fn any_text_gives_a_domain_or_an_error(
        xml in domain(),
        cut in any::<prop::sample::Index>(),
        put in one_of(&["", "<", "'", "]]>", "&", "é", "</domain>", "<metadata/>"]),
    ) {
        let mut at = cut.index(xml.len());
        while !xml.is_char_boundary(at) { at -= 1; }
        let garbled = format!("{}{put}{}", &xml[..at], &xml[at..]);
        for text in [&xml[..at], &garbled] {
            if let Ok(edited) = add_devices(text, &borrowed(&["a"])) {
                prop_assert_eq!(&remove_all(&edited).unwrap(), text);
            }
            let _ = check_domain(text, &socket);
            let _ = read_domain(text);
        }
    }
}
