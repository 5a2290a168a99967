//! A borrowed network device beside QEMU's own `virtio-net-pci`: one guest has both, each on a tap interface of this
//! machine, and they are measured in turns. QEMU's has no vhost: both are in user space.

use std::{
    ffi::OsString,
    io::{ErrorKind, Read, Write},
    net::{TcpListener, TcpStream, UdpSocket},
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use farside_bench::{Better, Data, Section, Series, Target, Unit};
use farside_testbed::Vm;
use farside_tests::Tap;
use rustix::io::Errno;

use super::{BORROWED, OWN, Parameters};
use crate::{
    interrupt,
    scene::{self, BOOT, Model, SHORT, Scene, Size},
};

const VM: &str = "bench";
const SIZE: Size = Size {
    memory_mib: 1024,
    cpus: 2,
};

/// The address of QEMU's own in the guest, by which it is told from the other.
const OWN_MAC: &str = "52:54:00:00:00:02";

/// Bytes of a transfer over TCP: those of one call.
const CHUNK: usize = 256 << 10;
/// Time before what is measured.
const WARM_UP: Duration = Duration::from_millis(500);
/// Bytes of a datagram.
const DATAGRAM: usize = 64;
/// The guest's ports: that of its echo, and one where nobody listens.
const ECHO: u16 = 5007;
const NOBODY: u16 = 5009;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Job {
    ToGuest,
    FromGuest,
    RoundTrips,
    Datagrams,
}

impl Job {
    const ALL: [Self; 4] = [
        Self::ToGuest,
        Self::FromGuest,
        Self::RoundTrips,
        Self::Datagrams,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::ToGuest => "TCP to the guest",
            Self::FromGuest => "TCP from the guest",
            Self::RoundTrips => "TCP round trips",
            Self::Datagrams => "datagrams to the guest",
        }
    }

    fn unit(self) -> Unit {
        match self {
            Self::ToGuest | Self::FromGuest => Unit::BytesPerSecond,
            Self::RoundTrips | Self::Datagrams => Unit::PerSecond,
        }
    }
}

/// Measures both.
pub(super) fn measure(parameters: &Parameters<'_>) -> Result<Section> {
    if let Some(why) = Tap::unable() {
        bail!("network devices cannot be measured: {why}");
    }
    let testbed = parameters.testbed;
    let taps = [Tap::new(testbed)?, Tap::new(testbed)?];
    let scene = Scene::start_as(
        Model::VirtioNet,
        parameters.program.to_owned(),
        scene::directory(VM)?,
        Path::new(taps[0].name()),
        VM,
        &[],
    )?;
    let section = in_guest(parameters, &scene, &taps)
        .map_err(|error| error.context(format!("the bench failed{}", scene.last_words())))?;
    scene.stop()?;
    Ok(section)
}

fn in_guest(parameters: &Parameters<'_>, scene: &Scene, taps: &[Tap; 2]) -> Result<Section> {
    let Parameters {
        testbed,
        settings,
        progress,
        ..
    } = parameters;
    let task = progress.spinner("Booting the guest");
    let netdev = format!(
        "tap,id=own,ifname={},script=no,downscript=no,vhost=off",
        taps[1].name()
    );
    let device = format!("virtio-net-pci,netdev=own,mac={OWN_MAC},romfile=");
    let arguments = ["-netdev", &netdev, "-device", &device].map(OsString::from);
    let guest = scene.launch(testbed, &SIZE, &[], &arguments)?;
    let vm = &guest.vm;
    vm.qmp().execute("cont", serde_json::json!({}))?;
    vm.wait_agent(BOOT)?;
    vm.exec_ok("modprobe virtio_net", SHORT)?;
    let mut interfaces = Vec::new();
    for name in ["eth0", "eth1"] {
        let path = format!("/sys/class/net/{name}");
        vm.wait_path(&path, SHORT)?;
        let mac = vm.exec_ok(&format!("cat {path}/address"), SHORT)?;
        interfaces.push((mac.trim() == OWN_MAC, name));
    }
    interfaces.sort_unstable();
    for ((is_own, name), tap) in interfaces.iter().zip(taps) {
        ensure!(*is_own == (tap.name() == taps[1].name()), "{interfaces:?}");
        let up = format!(
            "ip address add {}/24 dev {name}; ip link set {name} up
             ping -c 1 -W 30 {}",
            tap.guest(),
            tap.host()
        );
        vm.exec_ok(&up, SHORT)?;
    }
    task.done();

    let life = Duration::from_secs(24 * 3600);
    let echo = format!("while nc -l -p {ECHO} -e cat; do :; done");
    let _echo = vm.exec_start(&echo, life)?;
    let runs = u64::from(settings.repeats) * Job::ALL.len() as u64 * 2;
    let task = progress.bar("Measuring network devices", runs);
    let mut rates = vec![[Vec::new(), Vec::new()]; Job::ALL.len()];
    let mut done = 0;
    for _ in 0..settings.repeats {
        for (job, rates) in Job::ALL.into_iter().zip(&mut rates) {
            for (((_, name), tap), rates) in interfaces.iter().zip(taps).zip(rates) {
                interrupt::check()?;
                task.detail(job.name());
                let run = Run {
                    vm,
                    tap,
                    interface: name,
                    time: Duration::from_secs(settings.seconds.into()),
                };
                rates.push(run.measure(job).with_context(|| job.name())?);
                done += 1;
                task.set(done);
            }
        }
    }
    task.done();
    let lent = scene.device()?.1;
    ensure!(
        lent.faults.total == 0,
        "the borrowed device met {} DMA faults: the figures mean nothing",
        lent.faults.total
    );
    guest.shutdown()?;
    let mut series = Vec::new();
    for (job, [borrowed, own]) in Job::ALL.into_iter().zip(rates) {
        let of = |whose: &str| format!("{}, {whose}", job.name());
        let one = |whose, rates, against, target| Series {
            name: of(whose),
            unit: job.unit(),
            better: Better::More,
            data: Data::Repeats(rates),
            against,
            target,
        };
        series.push(one(OWN, own, None, None));
        let target = Some(Target::AtLeast(1.0));
        series.push(one(BORROWED, borrowed, Some(of(OWN)), target));
    }
    Ok(Section {
        name: "network-devices".into(),
        title: "A borrowed network device beside QEMU's own".into(),
        about: format!(
            "One guest has a borrowed virtio-net device and QEMU's own virtio-net-pci without vhost, each on a tap \
             interface of this machine, which take turns. TCP: one connection, both ends as fast as they can, for {} s \
             after {} ms that do not count. Round trips: one byte to a program in the guest that sends it back. \
             Datagrams: of {DATAGRAM} bytes, as fast as the kernel takes them; those that the guest's driver has \
             received count.",
            settings.seconds,
            WARM_UP.as_millis()
        ),
        series,
    })
}

/// One measurement of one device.
struct Run<'a> {
    vm: &'a Vm,
    tap: &'a Tap,
    /// In the guest.
    interface: &'a str,
    time: Duration,
}

impl Run<'_> {
    /// Bytes, round trips or frames a second.
    fn measure(&self, job: Job) -> Result<f64> {
        match job {
            Job::ToGuest => {
                self.stream("</dev/null >/dev/null", |stream, chunk| stream.write(chunk))
            }
            Job::FromGuest => self.stream("</dev/zero", |stream, chunk| stream.read(chunk)),
            Job::RoundTrips => self.round_trips(),
            Job::Datagrams => self.datagrams(),
        }
    }

    /// Bytes a second over a connection that the guest opens.
    fn stream(
        &self,
        of_guest: &str,
        mut step: impl FnMut(&mut TcpStream, &mut [u8]) -> std::io::Result<usize>,
    ) -> Result<f64> {
        let host = self.tap.host();
        let listener = TcpListener::bind((host.as_str(), 0))?;
        let port = listener.local_addr()?.port();
        // It ends with the connection.
        let command = format!("nc {host} {port} {of_guest}; true");
        let running = self.vm.exec_start(&command, self.time + SHORT)?;
        let (mut stream, _) = listener.accept()?;
        let mut chunk = vec![0; CHUNK];
        let rate = rate_of(self.time, || Ok(step(&mut stream, &mut chunk)?))?;
        drop(stream);
        running.wait()?;
        Ok(rate)
    }

    fn round_trips(&self) -> Result<f64> {
        let deadline = Instant::now() + SHORT;
        let mut stream = loop {
            match TcpStream::connect((self.tap.guest(), ECHO)) {
                Ok(stream) => break stream,
                // The guest has yet to listen again.
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                    ensure!(Instant::now() < deadline, "the guest does not listen");
                    std::thread::sleep(Duration::from_millis(20));
                }
                Err(error) => return Err(error).context("connecting to the guest"),
            }
        };
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(SHORT))?;
        rate_of(self.time, || {
            stream.write_all(&[1])?;
            stream.read_exact(&mut [0])?;
            Ok(1)
        })
    }

    /// Frames that the guest's driver has received, a second.
    fn datagrams(&self) -> Result<f64> {
        let socket = UdpSocket::bind((self.tap.host(), 0))?;
        let to = (self.tap.guest(), NOBODY);
        let count = || -> Result<u64> {
            let file = format!("/sys/class/net/{}/statistics/rx_packets", self.interface);
            let text = self.vm.exec_ok(&format!("cat {file}"), SHORT)?;
            text.trim().parse().context("a count of frames")
        };
        let before = count()?;
        let began = Instant::now();
        while began.elapsed() < self.time {
            match socket.send_to(&[0; DATAGRAM], &to) {
                Ok(_) => {}
                // The guest says that nobody listens, or the interface's queue is full.
                Err(error)
                    if matches!(
                        Errno::from_io_error(&error),
                        Some(Errno::CONNREFUSED | Errno::NOBUFS)
                    ) => {}
                Err(error) => return Err(error).context("sending to the guest"),
            }
        }
        let sent = began.elapsed();
        let received = count()? - before;
        Ok(received as f64 / sent.as_secs_f64())
    }
}

/// What `step` does a second, after [`WARM_UP`].
fn rate_of(time: Duration, mut step: impl FnMut() -> Result<usize>) -> Result<f64> {
    let began = Instant::now();
    while began.elapsed() < WARM_UP {
        ensure!(step()? > 0, "the guest has closed the connection");
    }
    let (began, mut done) = (Instant::now(), 0);
    while began.elapsed() < time {
        let step = step()?;
        ensure!(step > 0, "the guest has closed the connection");
        done += step;
    }
    Ok(done as f64 / began.elapsed().as_secs_f64())
}
