//! Writes the seed corpora of the fuzz targets: the messages and accesses of the unit
//! tests.

use std::fs;
use std::path::Path;

/// An operation on a connection; see `farside_fuzz::messages`.
fn message(fds: u8, command: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![fds << 3, command, flags];
    bytes.extend((payload.len() as u16).to_le_bytes());
    bytes.extend(payload);
    bytes
}

fn words(values: &[u32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_ne_bytes())
        .collect()
}

fn longs(values: &[u64]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_ne_bytes())
        .collect()
}

fn access(offset: u64, region: u32, count: u32) -> Vec<u8> {
    [longs(&[offset]), words(&[region, count])].concat()
}

/// Negotiates, sends, runs the server, reads.
fn talk(messages: &[Vec<u8>]) -> Vec<u8> {
    [vec![3], messages.concat(), vec![4, 255, 5]].concat()
}

fn messages() -> Vec<Vec<u8>> {
    let map = |address| [words(&[32, 3]), longs(&[0, address, 0x1000])].concat();
    let unmap = |flags, size| [words(&[24, flags]), longs(&[0, size])].concat();
    let multi = [
        longs(&[2]),
        access(0, 0, 4),
        vec![1; 8],
        access(4, 0, 8),
        vec![2; 8],
    ]
    .concat();
    let write = [access(4, 7, 2), vec![6, 0]].concat();
    let split = |at: u8, fds: u8, command, payload: &[u8]| {
        [
            vec![2 | fds << 3, at],
            message(0, command, 0, payload)[1..].to_vec(),
        ]
        .concat()
    };
    vec![
        talk(&[]),
        talk(&[message(0, 4, 0, &words(&[16, 0, 0, 0]))]),
        talk(&[message(
            0,
            5,
            0,
            &[words(&[64, 0, 0, 0]), longs(&[0, 0])].concat(),
        )]),
        talk(&[message(
            0,
            5,
            0,
            &[words(&[32, 0, 7, 0]), longs(&[0, 0])].concat(),
        )]),
        talk(&[message(0, 7, 0, &words(&[16, 0, 2, 0]))]),
        talk(&[message(1, 2, 0, &map(0)), message(0, 2, 0, &map(0x1000))]),
        talk(&[
            message(1, 2, 0, &map(0)),
            message(0, 3, 0, &unmap(0, 0x1000)),
        ]),
        talk(&[message(1, 2, 0, &map(0)), message(0, 3, 0, &unmap(2, 0))]),
        talk(&[message(2, 8, 0, &words(&[20, 0x24, 2, 0, 2]))]),
        talk(&[message(
            0,
            8,
            0,
            &[words(&[22, 0x22, 2, 0, 2]), vec![1, 0]].concat(),
        )]),
        talk(&[message(0, 8, 0, &words(&[20, 0x21, 2, 0, 0]))]),
        talk(&[
            message(0, 9, 0, &access(0, 7, 4)),
            message(0, 10, 0, &write),
        ]),
        talk(&[
            message(0, 15, 0x10, &multi),
            message(0, 9, 0, &access(0, 0, 8)),
        ]),
        talk(&[
            message(0, 13, 0, &[]),
            message(0, 13, 0x10, &[]),
            message(0, 13, 1, &[]),
        ]),
        talk(&[
            vec![6],
            message(0, 13, 0, &[]),
            vec![4, 9],
            message(0, 13, 0, &[]),
            vec![6],
        ]),
        talk(&[
            message(0, 6, 0, &[0; 16]),
            message(0, 16, 0, &[0; 8]),
            message(0, 99, 0, &[]),
        ]),
        talk(&[split(5, 3, 8, &words(&[20, 0x24, 2, 0, 3]))]),
        talk(&[split(16, 1, 2, &map(0)), split(40, 1, 2, &map(0x1000))]),
        talk(&[vec![1, 20, 0], vec![0; 20]]),
        talk(&[
            vec![1 | 17 << 3, 16, 0],
            [0, 0, 8, 0, 0, 0, 0x20, 0].repeat(2),
        ]),
        talk(&[vec![7]]),
    ]
}

fn configs() -> Vec<Vec<u8>> {
    let write = |offset: u16, data: &[u8]| {
        [
            vec![1],
            offset.to_le_bytes().to_vec(),
            vec![data.len() as u8],
            data.to_vec(),
        ]
        .concat()
    };
    let refused = |offset, data: &[u8]| {
        let mut op = write(offset, data);
        op[0] = 2;
        op
    };
    let reset = vec![7, 0, 0, 0];
    let good = |ops: &[Vec<u8>]| [vec![0, 0], ops.concat()].concat();
    let changed = |at: u16, value: u8| {
        [
            vec![0, 1],
            at.to_le_bytes().to_vec(),
            vec![value],
            write(4, &[6, 4]),
        ]
        .concat()
    };
    vec![
        good(&[write(4, &[6, 4]), write(0x10, &[0xff; 24]), reset.clone()]),
        good(&[refused(4, &[0x46, 4]), write(0x44, &[3]), write(0x44, &[0])]),
        good(&[write(0x52, &[0x71, 0]), write(0x54, &[0xff; 20]), reset]),
        good(&[
            write(0xd3, &[0xc0]),
            write(0x89, &[0x80]),
            write(0x140, &[0xff; 64]),
        ]),
        good(&[vec![0x80, 1, 0, 8], vec![3, 0, 0, 0], vec![11, 0, 0, 0]]),
        [vec![1, 0], write(4, &[6])].concat(),
        changed(0x34, 0x3c),
        changed(0x41, 0x44),
        changed(0x51, 0x40),
        changed(0x83, 0x50),
        changed(0x102, 0x11),
        changed(0xd4, 0xff),
    ]
}

fn domains() -> Vec<Vec<u8>> {
    let everything = include_str!("../../../qemu-configs/tests/libvirt/everything.xml");
    let small = "<domain type='kvm'><name>vm1</name><memory unit='GiB'>1</memory>\
         <os><type machine='pc'>hvm</type></os></domain>";
    let plain = "<?xml version='1.0'?>\r\n<!-- <domain> -->\n<domain type='kvm' \
         xmlns:q=\"http://libvirt.org/schemas/domain/qemu/1.0\" id='>'>\n  <name>vm1</name>\n  \
         <metadata>\n    <x:y xmlns:x='urn:x' z='/>'><![CDATA[</metadata>]]></x:y>\n  </metadata>\n  \
         <memory>1048576</memory>\n  <memoryBacking>\n  </memoryBacking>\n  \
         <os><type arch='x86_64' machine='q35'>hvm</type></os>\n  <cpu><numa><cell id='0'/></numa></cpu>\n  \
         <devices>\n    <disk><address type='pci' bus='0x00' slot='0x0f'/></disk>\n  </devices>\n  \
         <q:commandline>\n    <q:arg value='-device'/>\n    <q:arg value='edu,id=e'/>\n  \
         </q:commandline>\n</domain>\n";
    let texts = [everything, small, plain];
    let with = |which: u8| texts.map(|text| [&[which], text.as_bytes()].concat());
    [0, 1, 0x9e].into_iter().flat_map(with).collect()
}

fn main() -> std::io::Result<()> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    for (target, seeds) in [
        ("message_sequences", messages()),
        ("config_space", configs()),
        ("domains", domains()),
    ] {
        let directory = corpus.join(target);
        fs::create_dir_all(&directory)?;
        for (number, seed) in seeds.iter().enumerate() {
            fs::write(directory.join(format!("seed-{number:02}")), seed)?;
        }
        println!("{} seeds in {}", seeds.len(), directory.display());
    }
    Ok(())
}
