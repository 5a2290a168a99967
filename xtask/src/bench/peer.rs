//! Transfers of a borrowed disk to and from the memory of another one, its controller memory buffer, beside transfers to
//! and from the guest's RAM: one guest, in turns.

use std::ffi::OsString;

use anyhow::{Context, Result, ensure};
use farside_bench::{Better, Data, Section, Series, Unit, fio};
use farside_testbed::{Accel, TCG_ZEN_CPU, Vm};

use super::Parameters;
use crate::{
    interrupt,
    scene::{self, BOOT, SHORT, Scene, Size},
};

const VM: &str = "bench";
const SIZE: Size = Size {
    memory_mib: 1024,
    cpus: 2,
};

/// fio's `rw`, and what it is called.
const JOBS: [(&str, &str); 2] = [("read", "disk to"), ("write", "disk from")];
const PLACES: [&str; 2] = ["RAM", "buffer"];

/// Measures both.
pub(super) fn measure(parameters: &Parameters<'_>) -> Result<Section> {
    let images = parameters.images;
    let scene = Scene::start_pair(
        parameters.program.to_owned(),
        scene::directory(VM)?,
        [&images.borrowed, &images.own],
        VM,
    )?;
    let section = in_guest(parameters, &scene)
        .map_err(|error| error.context(format!("the bench failed{}", scene.last_words())))?;
    scene.stop()?;
    Ok(section)
}

fn in_guest(parameters: &Parameters<'_>, scene: &Scene) -> Result<Section> {
    let Parameters {
        testbed,
        settings,
        progress,
        ..
    } = parameters;
    let task = progress.spinner("Booting the guest");
    let cpu = match testbed.accel() {
        Accel::Tcg => ["-cpu", TCG_ZEN_CPU].map(OsString::from).to_vec(),
        Accel::Kvm => Vec::new(),
    };
    let guest = scene.launch(testbed, &SIZE, &[], &cpu)?;
    let vm = &guest.vm;
    vm.qmp().execute("cont", serde_json::json!({}))?;
    vm.wait_agent(BOOT)?;
    let (disk, buffer) = find(vm)?;
    task.done();

    let runs = u64::from(settings.repeats) * 4;
    let task = progress.bar("Measuring peer to peer", runs);
    let mut rates = vec![[Vec::new(), Vec::new()]; JOBS.len()];
    let mut done = 0;
    for _ in 0..settings.repeats {
        for ((rw, _), rates) in JOBS.iter().zip(&mut rates) {
            let memories = ["mmap".to_owned(), format!("mmapshared:{buffer}")];
            for (memory, rates) in memories.iter().zip(rates) {
                interrupt::check()?;
                let fio = format!(
                    "fio --output-format=json --name=peer --filename={disk} --rw={rw} --bs=128k \
                     --iodepth=8 --direct=1 --ioengine=libaio --time_based --runtime={} \
                     --ramp_time=1 --lat_percentiles=1 --clat_percentiles=0 \
                     --percentile_list=50:99:99.9 --mem={memory}",
                    settings.seconds
                );
                let output = vm.exec_ok(&fio, BOOT)?;
                rates.push(fio::read_output(&output)?.bandwidth);
                done += 1;
                task.set(done);
            }
        }
    }
    task.done();
    let lent = scene.device()?.1;
    ensure!(
        lent.faults.total == 0,
        "{} DMA faults: the figures mean nothing",
        lent.faults.total
    );
    guest.shutdown()?;
    let mut series = Vec::new();
    for ((_, name), rates) in JOBS.iter().zip(rates) {
        let named = |place: &str| format!("{name} {place}");
        for (place, rates) in PLACES.iter().zip(rates) {
            series.push(Series {
                name: named(place),
                unit: Unit::BytesPerSecond,
                better: Better::More,
                data: Data::Repeats(rates),
                against: (*place != PLACES[0]).then(|| named(PLACES[0])),
                target: None,
            });
        }
    }
    Ok(Section {
        name: "peer-to-peer".into(),
        title: "Transfers to another device's memory beside transfers to RAM".into(),
        about: format!(
            "One guest has two borrowed NVMe disks, of which one has a controller memory buffer. fio reads and writes the other one, \
             8 requests of 128 KiB at a time, for {} s after 1 s that does not count, with its data in that buffer \
             (p2pdma) and in the guest's RAM, in turns.",
            settings.seconds
        ),
        series,
    })
}

/// The path of the disk without the buffer, and the file by which a process has a part of the buffer as its memory.
fn find(vm: &Vm) -> Result<(String, String)> {
    let script = "for try in $(seq 100); do
             [ -e /dev/nvme0n1 ] && [ -e /dev/nvme1n1 ] && break; sleep 0.1
         done
         for disk in /sys/block/nvme*; do
             function=$(readlink -f $disk/device/device)
             if [ -e $function/p2pmem ]; then buffer=$function/p2pmem/allocate
             else path=/dev/${disk##*/}; fi
         done
         echo $path $buffer";
    let found = vm.exec_ok(script, SHORT)?;
    let mut words = found.split_whitespace().map(str::to_owned);
    words
        .next()
        .zip(words.next())
        .with_context(|| format!("not two disks, one of them with a buffer: {found}"))
}
