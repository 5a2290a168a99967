//! The JSON documents for scripts, against docs/json.md: a test fails if a key is removed
//! or changes its type, or if the page lacks it.

use std::collections::{BTreeMap, BTreeSet};

use farside_backend_api::{
    BackendReport, BarAddress, Connection, ConnectionState, DeviceList, DeviceReport, LenderReport,
    ListedDevice, Status, VolumeEntry, VolumeList,
    upgrade::{
        DeviceCheck, LeaseCheck, LenderCheck, Obstacle, Reads, UpgradeCheck, Versions, VmCheck,
    },
};
use farside_bench::{
    Axis, Better, Data, Environment, Hosts, JobResult, Measurement, Network, Pair, Passthrough,
    Point, Quantiles, Results, Section, Series, Target, Unit,
};
use farside_doctor::{Finding, Level, Report};
use farside_fabric::{Access, Fault, FaultReason, FaultRecord, FaultSummary, Iova, Usage, VmShare};
use farside_irq_relay::{IrqIndex, VectorCount, VectorsStatus};
use farside_lender_protocol::{
    Address, BorrowedBy, DeviceEntry, DeviceStatus, Fence, Generation, KeptFor, LimitUse, Resource,
    Transport,
};
use farside_planner::{
    AddressRules, Answer, Cluster, Guest, Preset, Remedy, plan_cluster, plan_ntb, plan_vfio,
};
use farside_qemu_configs::{HugePages, Machine};
use serde_json::{Value, json, to_value};

const PAGE: &str = include_str!("../../docs/json.md");

/// Checks that the section `title` of docs/json.md has the keys of these documents, which
/// together have all of them, and the format number.
pub(crate) fn is_documented(title: &str, documents: &[&Value]) {
    let (_, section) = PAGE
        .split_once(&format!("\n## `{title}`\n"))
        .unwrap_or_else(|| panic!("docs/json.md has no section `{title}`"));
    let section = section.split("\n## ").next().unwrap_or_default();
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    let documented: BTreeSet<String> = rows
        .map(|row| {
            let cells: Vec<_> = row.split('|').map(str::trim).collect();
            format!("| {} | {} |", cells[1], cells[2])
        })
        .collect();
    // Of an object that is as another one, the keys are there.
    let rows = section.lines().filter(|line| line.contains(" | as `"));
    let as_another: Vec<_> = rows.filter_map(|row| row.split('`').nth(1)).collect();
    let is_there = |key: &str| {
        let mut others = as_another.iter();
        others.any(|other| {
            key.strip_prefix(other)
                .is_some_and(|rest| rest.starts_with('.'))
        })
    };
    let found: BTreeSet<String> = keys(documents)
        .iter()
        .filter(|(key, _)| !is_there(key))
        .map(|(key, types)| format!("| `{key}` | {types} |"))
        .collect();
    let gone: Vec<_> = documented.difference(&found).collect();
    let new: Vec<_> = found.difference(&documented).collect();
    assert!(
        gone.is_empty() && new.is_empty(),
        "`{title}` in docs/json.md\nnot in the document: {gone:#?}\nnot on the page: {new:#?}"
    );
    let format = format!("| `format` | integer | | {}", documents[0]["format"]);
    assert!(section.contains(&format), "no {format:?} at `{title}`");
}

/// The keys of documents of one kind, such as `devices[].generation`, with the types of their
/// values in all documents.
fn keys(documents: &[&Value]) -> BTreeMap<String, String> {
    let mut types = BTreeMap::new();
    for document in documents {
        visit("", document, &mut types);
    }
    types.remove("");
    let (mut keys, mut elements) = (BTreeMap::new(), BTreeMap::new());
    // In reverse order: elements precede their array.
    for (key, mut types) in types.into_iter().rev() {
        let null = types.remove("null").then_some("null");
        let names = types.into_iter().chain(null).map(|name| {
            let element: Option<&String> = elements.get(&key).filter(|_| name == "array");
            element.map_or(name.to_owned(), |element| format!("array of {element}"))
        });
        let names = names.collect::<Vec<_>>().join(" or ");
        match key.strip_suffix("[]") {
            Some(array) => elements.insert(array.to_owned(), names),
            None => keys.insert(key, names),
        };
    }
    keys
}

fn visit(key: &str, value: &Value, types: &mut BTreeMap<String, BTreeSet<&'static str>>) {
    let name = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    types.entry(key.to_owned()).or_default().insert(name);
    for element in value.as_array().into_iter().flatten() {
        visit(&format!("{key}[]"), element, types);
    }
    for (name, value) in value.as_object().into_iter().flatten() {
        let dot = if key.is_empty() { "" } else { "." };
        visit(&format!("{key}{dot}{name}"), value, types);
    }
}

#[test]
fn keys_have_the_types_of_all_documents() {
    let one = json!({"a": null, "b": [{"c": 1}, {"c": 1.5}], "d": [["x", 1]], "e": []});
    let other = json!({"a": {"f": true}, "b": [], "d": [], "e": {}});
    let keys: Vec<_> = keys(&[&one, &other]).into_iter().collect();
    let keys: Vec<_> = keys.iter().map(|(k, t)| (k.as_str(), t.as_str())).collect();
    assert_eq!(
        keys,
        [
            ("a", "object or null"),
            ("a.f", "boolean"),
            ("b", "array of object"),
            ("b[].c", "integer or number"),
            ("d", "array of array of integer or string"),
            ("e", "array or object"),
        ]
    );
}

fn entry(problem: Option<&str>) -> DeviceEntry {
    let borrowed_by = BorrowedBy {
        vm: "web1".parse().unwrap(),
        generation: Generation(3),
        seconds: 2,
    };
    let fence = Fence {
        vm: "web1".parse().unwrap(),
        generation: Generation(2),
        migration: "m1".to_owned(),
        reserved: false,
    };
    DeviceEntry {
        borrowed_by: problem.map(|_| borrowed_by),
        availability: Default::default(),
        kept: problem.map(|_| KeptFor {
            vm: "web1".parse().unwrap(),
            seconds: 3,
            left: 297,
        }),
        id: "disk0".parse().unwrap(),
        source: "model".to_owned(),
        summary: "NVMe, 1 GiB".to_owned(),
        fences: vec![fence],
        problem: problem.map(str::to_owned),
    }
}

fn connection(error: Option<&str>) -> Connection {
    Connection {
        state: ConnectionState::Waiting,
        seconds: 3,
        retries: 7,
        restarts: 2,
        last_error: error.map(str::to_owned),
    }
}

#[test]
fn status_is_documented() {
    let lender: Address = "tcp:rack1-b:7410".parse().unwrap();
    let fired = VectorCount {
        index: IrqIndex::Msix,
        vector: 1,
        fired: 40,
    };
    let fault = Fault {
        iova: Iova::new(4096),
        len: 64,
        access: Access::Read,
        reason: FaultReason::Window,
    };
    let recent = FaultRecord {
        sequence: 1,
        unix_ms: 8,
        fault,
    };
    let free = DeviceStatus {
        entry: entry(None),
        bus_master: false,
        usage: Usage::default(),
        interrupts: Vec::new(),
        faults: FaultSummary::default(),
        counters: Vec::new(),
        limits: Vec::new(),
    };
    let lent = DeviceStatus {
        entry: entry(Some("the medium fails")),
        interrupts: vec![fired],
        faults: FaultSummary {
            recent: vec![recent],
            ..FaultSummary::default()
        },
        counters: vec![("io_commands".to_owned(), 12).into()],
        limits: vec![LimitUse::new(Resource::MemoryBytes, 1, 2)],
        ..free.clone()
    };
    let borrowed = DeviceReport {
        bars: vec![BarAddress {
            bar: 0,
            gpa: 0xfe00_0000,
            size: 0x4000,
        }],
        interrupts: VectorsStatus {
            enabled: Some(IrqIndex::Msix),
            fired: vec![fired],
            ..VectorsStatus::default()
        },
        last_error: Some("the lender is gone".to_owned()),
        connection: Some(connection(Some("the network is unreachable"))),
        controller: Some(lent.clone()),
        state_version: Some(2),
        ..DeviceReport::new(&"disk0".parse().unwrap(), "NVMe, 1 GiB", lender.clone())
    };
    let idle = DeviceReport::new(&"disk1".parse().unwrap(), "NVMe, 1 GiB", lender.clone());
    let connected = DeviceReport {
        connection: Some(connection(None)),
        ..idle.clone()
    };
    let backend = BackendReport {
        format: farside_backend_api::status::FORMAT,
        vm: "web1".parse().unwrap(),
        pid: 7,
        problem: Some("its helper process has ended".to_owned()),
        restarts: Some(1),
        farside: Some("1.0.0".to_owned()),
        records_version: Some(2),
        protocol_version: Some(14),
        keeper_restarts: Some(1),
        devices: vec![borrowed, idle, connected],
    };
    let without_problem = BackendReport {
        problem: None,
        restarts: None,
        farside: None,
        records_version: None,
        protocol_version: None,
        keeper_restarts: None,
        ..backend.clone()
    };
    let lender = LenderReport {
        lender: "rack1-b".to_owned(),
        address: lender,
        devices: vec![lent, free],
        limits: vec![LimitUse::new(Resource::LutEntries, 4, 256)],
    };
    let status = to_value(Status::new(vec![backend, without_problem], vec![lender])).unwrap();
    is_documented("farside status --json", &[&status]);
}

#[test]
fn devices_are_documented() {
    let listed = [entry(Some("the medium fails")), entry(None)].map(|device| ListedDevice {
        lender: "rack1-b".to_owned(),
        address: "tls:rack1-b:7410".parse().unwrap(),
        transport: Transport::Network,
        device,
    });
    let list = DeviceList::new(listed.to_vec());
    let value = to_value(&list).unwrap();
    is_documented("farside devices --json", &[&value]);
    assert_eq!(serde_json::from_value::<DeviceList>(value).unwrap(), list);
}

#[test]
fn volumes_are_documented() {
    let volumes = [Some("web1"), None].map(|vm| VolumeEntry {
        id: "disk7".parse().unwrap(),
        model: "nvme".into(),
        size_bytes: 20 << 30,
        used_bytes: 1 << 20,
        lent: true,
        borrowed_by: vm.map(|vm| vm.parse().unwrap()),
    });
    let list = VolumeList::new(volumes.to_vec());
    let value = to_value(&list).unwrap();
    is_documented("farside volume list --json", &[&value]);
    assert_eq!(serde_json::from_value::<VolumeList>(value).unwrap(), list);
}

#[test]
fn a_check_for_an_upgrade_is_documented() {
    let versions = Versions {
        oldest: 1,
        newest: 2,
    };
    let reads = Reads {
        leases: versions,
        state: versions,
        records: versions,
        protocol: 14,
    };
    let obstacle = Obstacle {
        what: "the lease has version 3".to_owned(),
        remedy: "stop the VM".to_owned(),
    };
    // One that goes on, of which little is known, and one that does not.
    let checks = [None, Some(obstacle)].map(|obstacle| {
        let known = obstacle.as_ref().map(|_| 3);
        let farside = obstacle.as_ref().map(|_| "9.1.0".to_owned());
        let lease = LeaseCheck {
            device: "disk0".parse().unwrap(),
            vm: "web1".parse().unwrap(),
            version: 3,
            worker_version: 3,
            state_version: known,
            obstacle: obstacle.clone(),
        };
        let lender = LenderCheck {
            socket: "/run/farside/lender.sock".into(),
            farside: farside.clone(),
            version: known,
            obstacle: obstacle.clone(),
            leases: vec![lease],
        };
        let vm = VmCheck {
            vm: "web1".parse().unwrap(),
            farside,
            records_version: known,
            protocol_version: known,
            devices: vec![DeviceCheck {
                device: "disk0".parse().unwrap(),
                state_version: known,
                obstacle: obstacle.clone(),
            }],
        };
        let check = UpgradeCheck::new("1.0.0", reads, vec![lender], vec![vm]);
        assert_eq!(check.goes_on, obstacle.is_none());
        to_value(check).unwrap()
    });
    is_documented("farside upgrade --check --json", &[&checks[0], &checks[1]]);
}

#[test]
fn a_diagnosis_is_documented() {
    let full = Finding {
        level: Level::Problem,
        check: "memlock".to_owned(),
        vm: Some("web1".to_owned()),
        what: "8 MiB".to_owned(),
        why: "too little".to_owned(),
        fix: vec!["ulimit -l 1".to_owned()],
    };
    let report = to_value(Report {
        findings: vec![full],
    });
    is_documented("farside doctor --json", &[&report.unwrap()]);
}

#[test]
fn plans_are_documented() {
    let guest = |vms, ram: u64| Guest {
        vms,
        ram,
        machine: Machine::Q35,
        devices: 1,
        huge_pages: HugePages::None,
    };
    let rules = AddressRules::default();
    let all = Remedy {
        bar_size: Some(1 << 30),
        lut_entries: Some(512),
        requester_entries: Some(64),
        per_vm: Some(128),
        lenders: Some(2),
    };
    // One that fits and two that do not, with adapters of different limits.
    let cases = [
        ("dolphin-pxh830", 1, 1 << 30, None),
        ("amd", 30, 16 << 30, Some(all)),
        ("amd", 30, 16 << 30, Some(Remedy::default())),
    ];
    let plans = cases.map(|(adapter, vms, ram, remedy)| {
        let mut limits = Preset::find(adapter).unwrap().limits.clone();
        if vms == 1 {
            limits.per_vm = VmShare {
                lut_entries: Some(128),
                requester_entries: Some(4),
            };
        }
        let limits = &limits;
        let cluster = Cluster {
            nodes: 60,
            devices: vms,
            peers: 1,
            device_bars: 16 << 10,
            switch_requesters: None,
        };
        let guests = [guest(vms, ram)];
        let mut ntb = plan_ntb(&guests, limits, &rules).unwrap();
        let guest = remedy.map(|_| &guests[0]);
        let mut cluster = plan_cluster(&cluster, limits, guest).unwrap();
        (ntb.remedy, cluster.remedy) = (remedy, remedy);
        if remedy.is_some() {
            ntb.guests[0].largest_alone = None;
        }
        to_value(Answer {
            adapter: Some(adapter.to_owned()),
            ntb: Some(ntb),
            cluster: Some(cluster),
            ..Answer::default()
        })
    });
    let local = [1 << 30, 1 << 50].map(|ram| {
        let mut plan = plan_vfio(&[guest(1, ram)], &rules).unwrap();
        plan.guests[0].largest = plan.guests[0].largest.filter(|_| plan.fits);
        to_value(Answer {
            vfio: Some(plan),
            ..Answer::default()
        })
    });
    let documents: Vec<_> = plans.into_iter().chain(local).map(Result::unwrap).collect();
    let documents: Vec<_> = documents.iter().collect();
    is_documented("farside plan --json", &documents);
}

#[test]
fn results_of_a_benchmark_are_documented() {
    let measurement = |cpu| Measurement {
        iops: 1.0,
        bandwidth: 1.0,
        p50: 1.0,
        p99: 1.0,
        p999: 1.0,
        guest_cpu: cpu,
        host_cpu: cpu,
    };
    let pair = |cpu| Pair {
        borrowed: measurement(cpu),
        beside: measurement(cpu),
    };
    let job = |network, passthrough, pairs| JobResult {
        job: "randread-4k-qd1".to_owned(),
        network,
        passthrough,
        pairs,
    };
    let passthrough = Passthrough {
        device: "nvme".to_owned(),
        interrupts_ratio: 1.0,
        trapped_accesses_after_start: 0,
    };
    let network = Network {
        hosts: Hosts::Namespaces,
        delay_us: 50,
        peer: "SPDK".to_owned(),
        tls: false,
    };
    let series = |name: &str, data, target| Series {
        name: name.to_owned(),
        unit: Unit::Nanoseconds,
        better: Better::Less,
        data,
        against: Some("bare".to_owned()),
        target: Some(target),
    };
    let quantiles = Quantiles {
        samples: 9,
        min: 1.0,
        p1: 1.0,
        p25: 1.0,
        p50: 1.0,
        p75: 1.0,
        p99: 1.0,
        p999: 1.0,
        max: 1.0,
    };
    let points = Data::Points {
        over: Axis {
            name: "transfer size".to_owned(),
            unit: Unit::Bytes,
        },
        points: vec![Point {
            x: 1.0,
            y: vec![1.0],
        }],
    };
    let section = Section {
        name: "interrupts".to_owned(),
        title: "Interrupts".to_owned(),
        about: "How long.".to_owned(),
        series: vec![
            series("repeats", Data::Repeats(vec![1.0]), Target::AtLeast(1.0)),
            series(
                "quantiles",
                Data::Quantiles(vec![quantiles]),
                Target::AtMost(1.0),
            ),
            series("points", points, Target::AtMost(1.0)),
        ],
    };
    let known = Environment {
        host_kernel: Some("6.12".to_owned()),
        guest_kernel: Some("6.12".to_owned()),
        qemu: Some("10.1.0".to_owned()),
        accel: Some("kvm".to_owned()),
        ..Environment::default()
    };
    let mut results = Results::new(known, ["borrowed", "own"]);
    results.jobs = vec![
        job(None, None, vec![pair(Some(1.0)), pair(None)]),
        job(Some(network), None, Vec::new()),
        job(None, Some(passthrough), Vec::new()),
    ];
    results.sections.push(section);
    let unknown = Results::new(Environment::default(), ["borrowed", "own"]);
    let documents = [results, unknown].map(|results| to_value(results).unwrap());
    is_documented("cargo xtask bench --json", &[&documents[0], &documents[1]]);
}
