//! Writes the seed corpora of the fuzz targets to a directory: the messages, accesses and documents
//! of the unit tests.

use std::{fmt::Debug, fs, path::Path};

use farside_irq_relay::{IrqEvent, IrqIndex};
use farside_lender_protocol::{
    Envelope, ErrorKind, Generation, HeldFence, RemoteError, Reply, Request, Revocation, Transport,
    VERSION,
    registers::{Access, Event},
};
use serde::Serialize;

/// An operation on a connection; see ``messages``.
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

/// With the byte that selects the kind.
fn texts(texts: &[(u8, &str)]) -> Vec<Vec<u8>> {
    let bytes = |(kind, text): &(u8, &str)| [&[*kind], text.as_bytes()].concat();
    texts.iter().map(bytes).collect()
}

fn admin() -> Vec<Vec<u8>> {
    let entry = r#"{"id":"disk0","source":"model","summary":"NVMe","borrowed_by":null,"fences":[],"problem":null}"#;
    let devices = format!(r#"{{"format":1,"devices":[{entry}]}}"#);
    texts(&[
        (
            0,
            r#"{"version":1,"command":{"attach":{"device":"disk1"}}}"#,
        ),
        (
            0,
            r#"{"version":1,"command":{"detach":{"device":"disk1","force":false}}}"#,
        ),
        (0, r#"{"version":1,"command":"status"}"#),
        (
            1,
            r#"{"attached":{"socket":"/run/a.sock","already":false}}"#,
        ),
        (1, r#""detached""#),
        (
            1,
            r#"{"refused":{"kind":"in-use","message":"a client uses it"}}"#,
        ),
        (2, r#"{"format":1,"backends":[],"lenders":[]}"#),
        (3, r#"{"vm":"web1","devices":[]}"#),
        (4, &devices),
    ])
}

fn config_files() -> Vec<Vec<u8>> {
    texts(&[
        (
            0,
            "name = \"web1\"\ndevices = [\"disk0\", { id = \"disk1\", port = 3 }]\nmemory = \"4 GiB\"\ncpus = 2\n",
        ),
        (
            0,
            "devices = [\"a\"]\nlenders = [\"tcp:rack1-b:7410\"]\nntb = \"0000:01:00.0\"\ninterrupts = \"relayed\"\npin = \"prefer\"\nmachine = \"q35\"\naccel = \"kvm\"\nhugepages = \"2M\"\nboot = \"a\"\nspare-ports = 2\nmax-memory = \"8 GiB\"\nqemu-args = [\"-nic\", \"user\"]\n",
        ),
        (
            1,
            "name = \"rack1\"\nsocket = \"/run/a\"\nlisten = \"tcp:10.0.0.1:7410\"\n[fabric]\nbar-size = \"32 GiB\"\n[[device]]\nid = \"disk0\"\nborrowers = [\"user=root,vm=web1\", \"network\"]\nmodel.nvme = { image = \"/a\", read-only = true }\n",
        ),
        (
            1,
            "[[device]]\nid = \"a\"\nmodel.dma-test = {}\n[[device]]\nid = \"b\"\nvfio = \"0000:01:00.0\"\n",
        ),
        (2, "tcp:rack1-b:7410"),
        (2, "tcp:[fe80::1%eth0]:1"),
        (2, "/run/farside/lender.sock"),
        (3, "disk-0_a.b"),
        (4, "32 GiB"),
        (5, "user=root,vm=web1"),
        (5, "host=rack1-a,vm=web1"),
        (2, "tls:rack1-b:7411"),
        (5, "network"),
    ])
}

fn qmp() -> Vec<Vec<u8>> {
    let greeting = r#"{"QMP": {"version": {"qemu": {"micro": 0, "minor": 1, "major": 10}}, "capabilities": []}}"#;
    let with = |commands: u8, lines: &str| {
        [&[commands], greeting.as_bytes(), b"\r\n", lines.as_bytes()].concat()
    };
    vec![
        with(0, ""),
        with(1, "{\"return\": {}, \"id\": 0}\n"),
        with(
            2,
            "{\"event\": \"STOP\", \"data\": {}}\n{\"return\": {\"status\": \"running\"}, \"id\": 0}\n{\"id\": 1, \"error\": {\"class\": \"GenericError\", \"desc\": \"no\"}}\n",
        ),
        with(
            0,
            "{\"event\": \"DEVICE_DELETED\", \"data\": {\"device\": \"disk0\"}}\n",
        ),
        with(3, "{\"return\": 7}\n[]\n"),
    ]
}

fn migrations() -> Vec<Vec<u8>> {
    let journal = r#"{"id":"1","vm":"web1","role":"destination","step":"prepare","begun":[],"source":"a","destination":"b","shell":null,"was_running":true,"shutdown_timeout":1,"configuration":{"toml":""},"devices":[{"id":"disk0","port":0,"lender":"tcp:a:1","lender_name":"a","identity":{"pci":"1:2","summary":"","digest":""},"lease":5,"held":{"generation":5,"secret":null},"secret":null,"fence":null,"back_secret":null,"back":null}],"strategy":"cold","manifest":3}"#;
    let former = journal
        .replace("\"manifest\":3", "\"manifest\":1")
        .replace(r#"{"generation":5,"secret":null}"#, "5")
        .replace("\"configuration\"", "\"description\"");
    let manifest = journal.replace(",\"manifest\":3", "");
    let prepare = format!(r#"{{"Prepare":{manifest}}}"#);
    let install = format!(r#"{{"Install":{manifest}}}"#);
    let mut seeds = texts(&[
        (0, journal),
        (0, &former),
        (0, r#"{"manifest":2,"devices":"disk0"}"#),
        (1, &prepare),
        (1, &install),
        (1, r#"{"Start":{"id":"1","vm":"web1"}}"#),
        (1, r#"{"Listening":49152}"#),
    ]);
    // There and back; cut off at some calls, and resumed.
    seeds.push(vec![2, 0x40, 0, 0x60, 0, 0x41, 0]);
    seeds.push(vec![2, 0, 12, 2, 3, 3, 200]);
    seeds.push(vec![2, 0x80, 20, 0xa2, 5, 0x21, 9, 3, 4]);
    seeds
}

fn etcd() -> Vec<Vec<u8>> {
    let value = r#"{"format":1,"lender":"rack1-b","address":"tls:rack1-b:7410","instance":"0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f"}"#;
    let entry =
        r#"{"key":"ZmFyc2lkZS9kZXZpY2VzL2Rpc2sw","mod_revision":"6","value":"Yg==","lease":"99"}"#;
    let range = format!(r#"{{"header":{{"revision":"7"}},"kvs":[{entry}],"more":true}}"#);
    let txn =
        format!(r#"{{"succeeded":true,"responses":[{{"response_range":{{"kvs":[{entry}]}}}}]}}"#);
    texts(&[
        (0, value),
        (1, "farside/devices/disk0"),
        (2, &range),
        (3, &txn),
        (4, r#"{"result":{"header":{},"ID":"5","TTL":"15"}}"#),
        (
            5,
            r#"{"result":{"canceled":true,"events":[{"type":"DELETE"}]}}"#,
        ),
        (6, r#"{"error":"lease not found","code":5}"#),
    ])
}

fn lender_messages() -> Vec<Vec<u8>> {
    fn encoded(kind: u8, message: impl Debug + Serialize) -> Vec<u8> {
        let bytes = postcard::to_stdvec(&message);
        let bytes = bytes.unwrap_or_else(|error| panic!("{message:?}: {error}"));
        [vec![kind], bytes].concat()
    }
    let device = || "disk0".parse().expect("a valid name");
    let envelope = |request| Envelope {
        generation: Generation(3),
        accesses: 1,
        request,
    };
    let secret = "7".repeat(32).try_into().expect("32 digits");
    let held = HeldFence {
        generation: Generation(5),
        secret: Some(secret),
    };
    let requests = [
        Request::Hello {
            version: VERSION,
            vm: Some("web1".into()),
        },
        Request::Devices { after: None },
        Request::Borrow {
            device: device(),
            transport: Transport::Ntb,
            fence: Some(held),
        },
        Request::Handover {
            device: device(),
            vm: "web1".into(),
            migration: "m1".into(),
            supersedes: Some(held),
            secret,
        },
        Request::EndReservation {
            device: device(),
            secret: Some(secret),
        },
        Request::Return,
    ];
    let mut seeds: Vec<_> = requests
        .into_iter()
        .map(|request| encoded(0, envelope(request)))
        .collect();
    let refused = RemoteError {
        kind: ErrorKind::Busy,
        message: "borrowed".into(),
    };
    let generation = Generation(9);
    for reply in [
        Reply::Done,
        Reply::Refused(refused),
        Reply::Fence { generation },
    ] {
        seeds.push(encoded(1, reply));
    }
    let write = Access::Write {
        bar: 0,
        offset: 0x1000,
        len: 4,
        value: 7,
    };
    seeds.push(encoded(2, write));
    let irq = IrqEvent::new(IrqIndex::Msix, 2047).expect("the last vector");
    seeds.push(encoded(3, Event::Interrupt(irq)));
    // Interrupt updates: index, start, count, action, vectors.
    for (action, vectors) in [(2, vec![3, 2, 1, 0]), (0, vec![0]), (2, vec![2, 1, 1])] {
        let tag = encoded(0, (0u64, 0u64, 15u32));
        seeds.push([tag, vec![2, 0, 2, action], vectors].concat());
    }
    for request in [
        Request::Revoke {
            device: device(),
            limit_ms: 2000,
        },
        Request::SetAvailable {
            device: device(),
            available: true,
        },
        Request::AddDevice {
            table: "id = \"disk1\"\nmodel.dma-test = {}".into(),
        },
        Request::RemoveDevice { device: device() },
        Request::ResizeDevice { device: device() },
    ] {
        seeds.push(encoded(0, envelope(request)));
    }
    seeds.push(encoded(1, Reply::Revocation(Revocation::Ended)));
    seeds.push(encoded(3, Event::Release { limit_ms: 2000 }));
    seeds
}

/// Bytes without a meaning of their own, for targets whose input is a list of steps.
fn steps() -> Vec<Vec<u8>> {
    let mut state = 1u64;
    let mut byte = || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (state >> 56) as u8
    };
    [16, 64, 256, 1024]
        .map(|len| (0..len).map(|_| byte()).collect())
        .into()
}

fn main() -> std::io::Result<()> {
    let corpus = std::env::args().nth(1);
    let corpus = corpus.expect("usage: seeds DIRECTORY");
    for (target, seeds) in [
        ("admin", admin()),
        ("backend", steps()),
        ("config_files", config_files()),
        ("config_space", configs()),
        ("description", steps()),
        ("domains", domains()),
        ("etcd", etcd()),
        ("irqs", steps()),
        ("leases", steps()),
        ("lender_messages", lender_messages()),
        ("lender_stream", steps()),
        ("medium", steps()),
        ("message_sequences", messages()),
        ("migrations", migrations()),
        ("nvme", steps()),
        ("qmp", qmp()),
        ("register_tokens", steps()),
        ("virtio", steps()),
    ] {
        let directory = Path::new(&corpus).join(target);
        fs::create_dir_all(&directory)?;
        for (number, seed) in seeds.iter().enumerate() {
            fs::write(directory.join(format!("seed-{number:02}")), seed)?;
        }
        println!("{} seeds in {}", seeds.len(), directory.display());
    }
    Ok(())
}
