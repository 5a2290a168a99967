//! A disk that farside borrows over the network, and the polling driver that uses it.

use std::{path::Path, process::Command, time::Duration};

use anyhow::Result;
use farside_bench::{Measurement, Quantiles, job::Job, job::Pattern};
use farside_scripted_vmm::{
    nvme::{Doorbells, Load, Opcode, Polled},
    ram::Layout,
    session::{Options, Session},
};

use super::{
    cpus,
    hosts::{FAR, Host, Hosts},
};
use crate::{
    child::Child,
    cpu::{self, Pinned},
    scene::{self, DEVICE, SHORT},
};

/// Guest RAM: the driver's, and the data in flight.
const RAM: u64 = 32 << 20;

/// Names of the VM and of the certificate, without TLS and with it.
const NAMES: [&str; 2] = ["plain", "sealed"];

/// The daemons of both hosts, and the VM.
pub(super) struct Borrowed {
    session: Session,
    queue: Polled,
    /// The near host's.
    cpu: usize,
    // Dropped after the session.
    backend: Child,
    lender: Child,
}

impl Borrowed {
    /// Lends `image` on the far host, and borrows it on the near one.
    pub(super) fn start(program: &Path, hosts: &Hosts, image: &Path, tls: bool) -> Result<Self> {
        let Hosts { near, far, .. } = hosts;
        let vm = NAMES[usize::from(tls)];
        let [near_cpu, far_cpu] = cpus()?;
        let (address, rule) = match tls {
            true => (format!("tls:{FAR}:7411"), "host=near"),
            false => (format!("tcp:{FAR}:7410"), "network"),
        };
        if tls {
            certify(program, near, far)?;
        }
        let mut lend = far.command(program);
        let mut drive = std::ffi::OsString::from(format!("{DEVICE}="));
        drive.push(image);
        lend.args(["lend", "--name", vm, "--nvme"]).arg(drive);
        lend.args(["--listen", &address, "--borrower", rule]);
        lend.arg("--socket").arg(far.path(&format!("{vm}.sock")));
        if !tls {
            lend.arg("--listen-plain");
        }
        let lender = start((far, far_cpu), &format!("lender-{vm}"), lend, &address)?;
        let mut serve = near.command(program);
        serve.args([
            "serve", "--vm", vm, "--lender", &address, "--device", DEVICE,
        ]);
        let backend = start(
            (near, near_cpu),
            &format!("backend-{vm}"),
            serve,
            "served at",
        )?;
        let options = Options {
            socket: scene::socket(&near.path(""), vm),
            layout: Layout::new(RAM, None, false)?,
            vectors: None,
            queues: 1,
            namespace: 1,
            seed: 1,
            patience: SHORT,
            timeout: SHORT,
        };
        let mut session = Session::connect(options)?;
        let (machine, drive) = session.drive()?;
        let queue = drive.polled(machine, Doorbells::Buffer)?;
        Ok(Self {
            session,
            queue,
            cpu: near_cpu,
            backend,
            lender,
        })
    }

    pub(super) fn measure(&mut self, job: &Job, time: Duration) -> Result<Measurement> {
        let load = Load {
            opcode: match job.writes() {
                true => Opcode::Write,
                false => Opcode::Read,
            },
            bytes: job.block,
            depth: u16::try_from(job.depth)?,
            sequential: matches!(
                job.pattern,
                Pattern::SequentialRead | Pattern::SequentialWrite
            ),
            yields: true,
        };
        let _pinned = Pinned::to(self.cpu)?;
        // This process is the VM.
        let pids = [self.backend.pid(), self.lender.pid(), std::process::id()];
        let before = cpu::time(&pids)?;
        let (machine, _) = self.session.drive()?;
        let latencies = self.queue.run(machine, load, time)?;
        let cpu = cpu::time(&pids)? - before;
        let iops = latencies.len() as f64 / time.as_secs_f64();
        let quantiles = Quantiles::of(latencies.iter().map(|it| it.as_nanos() as f64));
        let quantile = |of: fn(&Quantiles) -> f64| quantiles.as_ref().map_or(f64::INFINITY, of);
        Ok(Measurement {
            iops,
            bandwidth: iops * job.block as f64,
            p50: quantile(|q| q.p50),
            p99: quantile(|q| q.p99),
            p999: quantile(|q| q.p999),
            guest_cpu: None,
            host_cpu: (!latencies.is_empty())
                .then(|| cpu.as_nanos() as f64 / latencies.len() as f64),
        })
    }

    /// The ends of the logs, for an error.
    pub(super) fn last_words(&self) -> String {
        format!(
            "\nbackend{}\nlender{}",
            self.backend.last_words(),
            self.lender.last_words()
        )
    }

    /// Ends the VM, then both daemons, which must exit successfully.
    pub(super) fn stop(self) -> Result<()> {
        drop(self.session);
        self.backend.stop(SHORT)?;
        self.lender.stop(SHORT)
    }
}

/// Starts a daemon on a host that has one CPU.
fn start(
    (host, cpu): (&Host, usize),
    name: &str,
    mut command: Command,
    ready: &str,
) -> Result<Child> {
    let _pinned = Pinned::to(cpu)?;
    command.env("FARSIDE_LOG", "info");
    host.start(name, command, ready)
}

/// Issues certificates to both hosts.
fn certify(program: &Path, near: &Host, far: &Host) -> Result<()> {
    let authority = far.path("ca").display().to_string();
    far.run(program, &["pki", "init", "--directory", &authority])?;
    for (host, name) in [(near, "near"), (far, "far")] {
        let output = host.path("pki").display().to_string();
        let args = ["--directory", &authority, "--output", &output];
        let issue = ["pki", "issue", name, "--address", FAR];
        far.run(program, &[&issue[..], &args[..]].concat())?;
    }
    Ok(())
}
