//! The command line.

use std::path::PathBuf;

use clap::{
    Args as ClapArgs, Parser, Subcommand, ValueEnum, builder::PossibleValuesParser, value_parser,
};
use farside_bench::job::JOBS;

/// Chores of farside's developers. Each one does all of its own set-up.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", max_term_width = 100)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) verb: Option<Verb>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Lend an NVMe device to a VM, use it there, and prove where the bytes went
    Demo(Demo),
    /// Run every test of the workspace, those that boot guests included
    Test(Test),
    /// Run what depends on chance again and again, with new seeds
    Soak(Soak),
    /// Feed the fuzz targets with what libFuzzer makes of their corpus
    Fuzz(Fuzz),
    /// Run the tests of crates without I/O in Miri
    Miri,
    /// Run what threads share in every order of their accesses (loom)
    Interleavings,
    /// Check licences, sources and advisories of the dependencies (cargo-deny, which fetches advisories)
    Deny,
    /// Lend physical devices in VMs that play hosts: real VFIO, real IOMMUs
    Cluster(Cluster),
    /// Compare the borrowed NVMe device with QEMU's own, in one guest
    Bench(Box<Bench>),
    /// Make the Debian package: program, systemd units, man pages, completions
    Deb(Deb),
    /// Check documents, layering and file sizes against the code
    Tidy,
    /// A wire with a delay between two network namespaces, for `bench`
    #[command(hide = true)]
    Wire(Wire),
}

/// Passes packets between two network namespaces until it is killed.
#[derive(Debug, ClapArgs)]
pub(crate) struct Wire {
    /// The time that a round trip takes longer by it, microseconds.
    #[arg(long, value_name = "US")]
    pub(crate) delay_us: u32,
    /// Its rate, Mbit/s.
    #[arg(long, value_parser = value_parser!(u64).range(1..=1_000_000))]
    pub(crate) mbit: u64,
    /// Two network namespaces, each by a path such as /proc/PID/ns/net.
    #[arg(required = true, num_args = 2)]
    pub(crate) namespaces: Vec<PathBuf>,
}

/// Lends an NVMe device to a VM: boots the guest, makes a file system on the
/// disk, writes and reads 256 MiB, shuts down, and proves by checksum that the
/// bytes are in the lender's image.
#[derive(Debug, ClapArgs)]
pub(crate) struct Demo {
    /// Write what was measured to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Guest RAM, MiB. Above 2816 the guest has high memory too, and a second
    /// DMA window.
    #[arg(long, value_name = "MIB", default_value_t = 1024,
          value_parser = value_parser!(u64).range(512..=1 << 20))]
    pub(crate) memory: u64,

    /// Meanwhile kill the disk's worker and the lender (SIGKILL), again and again: the
    /// guest's I/O waits, and none of it fails.
    #[arg(long)]
    pub(crate) kill: bool,
}

/// Prepares the test bed, builds the product and runs the workspace's tests: those that
/// boot VMs one binary after the other, beside all others. At the end lists the slowest
/// tests, and those that were not run, with the reasons.
#[derive(Debug, ClapArgs)]
pub(crate) struct Test {
    /// Arguments as for `cargo test`, such as names of tests; all tests without them.
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "ARGUMENTS"
    )]
    pub(crate) cargo_args: Vec<String>,
}

/// Runs migrations, kills, hot plug, property tests, simulations, the fuzz targets, Miri, loom, cargo-deny and twenty
/// guests at once in turn, each
/// round with a new seed where chance decides, until the time is over or one fails. Prints
/// the command that repeats a round.
#[derive(Debug, ClapArgs)]
pub(crate) struct Soak {
    /// How long a round may begin, minutes: 60 unless given. With --only, also how long such a round as
    /// many-vms (60) and one-guest (30) lasts.
    #[arg(long, value_name = "MINUTES")]
    pub(crate) minutes: Option<u64>,
    /// Only this round: migration, properties, simulation, fuzz, miri, hotplug, loss, crowd, canaries,
    /// outlive, outlive-guests, functions, cuts, interleavings, deny, many-vms or one-guest.
    #[arg(long, value_name = "ROUND")]
    pub(crate) only: Option<String>,
}

/// Runs the fuzz targets of tests/fuzz, one after the other, until one fails, which leaves the input
/// in tests/fuzz/libfuzzer/artifacts. Needs the nightly toolchain, a C++ compiler, and cargo-fuzz
/// (`cargo install cargo-fuzz`).
#[derive(Debug, ClapArgs)]
pub(crate) struct Fuzz {
    /// Only this target; may be given more than once.
    #[arg(value_name = "TARGET")]
    pub(crate) targets: Vec<String>,
    /// How long each target runs, seconds.
    #[arg(long, value_name = "S", default_value_t = 60)]
    pub(crate) seconds: u64,
}

/// Boots VMs that play hosts, each with an emulated VT-d and Linux's VFIO, lends a
/// physical NVMe device to a guest in such a VM, and shows from the kernels' own
/// output what the device could reach and when: on one host, and between two that
/// an NTB joins.
#[derive(Debug, ClapArgs)]
pub(crate) struct Cluster {
    /// Write what was seen to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Only this; may be given more than once.
    #[arg(long = "only", value_name = "WHAT", value_enum)]
    pub(crate) only: Vec<Only>,
}

/// A part of `cargo xtask cluster`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Only {
    /// Lender and borrower on one host.
    SameHost,
    /// Lender and borrower on two hosts.
    TwoHosts,
    /// Lender and borrower on two hosts that a network alone connects.
    Network,
    /// Two virtual functions of one device for two guests.
    Vfs,
}

/// Measures in one guest, on equal images: fio on the borrowed NVMe device and on
/// QEMU's own `nvme` device, in turns; one transfer at a time of 4 KiB to 128 MiB;
/// how long a device's answer takes, by DMA and by interrupts. And without a
/// guest: single things, such as a trapped read, or locking a guest's memory; and
/// what a busy thread on the CPU of the device's costs.
#[derive(Debug, ClapArgs)]
pub(crate) struct Bench {
    /// Only this; may be given more than once.
    #[arg(long = "only", value_name = "WHAT", value_enum)]
    pub(crate) only: Vec<Chapter>,
    /// Measure less, without warming up: the figures say little, but everything has run once.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Measure this `farside` [default: built from this checkout, as users run it].
    #[arg(long, value_name = "FILE")]
    pub(crate) program: Option<PathBuf>,
    /// Write results, plots (SVG and PNG) and an HTML report to this directory.
    #[arg(long, value_name = "DIRECTORY")]
    pub(crate) out: Option<PathBuf>,
    /// Write the results to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Measurements of each job and size on each disk [default: of jobs 5, or 2 with
    /// --quick; of sizes 2].
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=1000))]
    pub(crate) repeats: Option<u32>,
    /// Length of a measurement, seconds [default: 3, or 1 with --quick].
    #[arg(long, value_name = "S", value_parser = value_parser!(u32).range(1..=3600))]
    pub(crate) seconds: Option<u32>,
    /// Only this of fio's jobs; may be given more than once.
    #[arg(long = "job", value_name = "NAME",
          value_parser = PossibleValuesParser::new(JOBS.iter().map(|job| &*job.name)))]
    pub(crate) jobs: Vec<String>,
    /// How QEMU's own device does I/O on its image.
    #[arg(long, value_name = "HOW", default_value = "io_uring",
          value_parser = ["io_uring", "threads"])]
    pub(crate) own_aio: String,
    /// Put both disks behind a vIOMMU that translates all DMA, so that the guest maps
    /// and unmaps the pages of each I/O.
    #[arg(long)]
    pub(crate) viommu: bool,
    /// libvfio-user's sample server gpio-pci-idio-16, to read registers of, too.
    #[arg(long, value_name = "PROGRAM")]
    pub(crate) libvfio_user: Option<PathBuf>,
    /// Directory of an SPDK that has been built, whose NVMe over TCP to compare with.
    #[arg(long, value_name = "DIRECTORY")]
    pub(crate) spdk: Option<PathBuf>,
    /// Only between these hosts, for what crosses a network.
    #[arg(long, value_name = "WHAT")]
    pub(crate) hosts: Option<Hosts>,
    /// A delay of the network, added to its round trips, microseconds; may be given more than
    /// once [default: 0, 50, 200 and 2000, or 0 and 200 with --quick].
    #[arg(long = "delay", value_name = "US", value_parser = value_parser!(u32).range(0..=1_000_000))]
    pub(crate) delays: Vec<u32>,
    /// Directory for the two images [default: /dev/shm where it has room, else the
    /// temporary directory].
    #[arg(long, value_name = "DIRECTORY")]
    pub(crate) images: Option<PathBuf>,
}

/// Builds the program, writes man pages and completions, and packs all of it with
/// the units and examples of `cli/packaging/`. The last line is the package's path.
///
/// cargo-deb is installed into the test bed's cache when there is none.
#[derive(Debug, ClapArgs)]
pub(crate) struct Deb {
    /// Pack this `farside` [default: built from this checkout, as users run it].
    #[arg(long, value_name = "FILE")]
    pub(crate) program: Option<PathBuf>,
    /// Write the package to this file or directory [default: target/debian].
    #[arg(long, value_name = "PATH")]
    pub(crate) output: Option<PathBuf>,
}

/// A part of `cargo xtask bench`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Chapter {
    /// fio's jobs on both disks.
    Fio,
    /// Bandwidth over transfer size.
    Sweep,
    /// From a register write to the device's answer.
    PingPong,
    /// Single things, without a guest.
    Micro,
    /// Reads beside a busy thread on the device's CPU, without a guest.
    Neighbour,
    /// How long I/O waits when processes of a disk are killed, without a guest.
    Pauses,
    /// fio's jobs over a network, beside NVMe over TCP. Measured only if it is named.
    Network,
    /// fio's jobs on a borrowed virtio-blk disk, beside QEMU's own virtio-blk-pci. Measured only if it is
    /// named, and without the other chapters that need a guest.
    Virtio,
    /// Throughput and round trips of a borrowed virtio-net device, beside QEMU's own virtio-net-pci. Measured only if
    /// it is named; makes tap interfaces, which takes root.
    VirtioNet,
    /// Transfers of a borrowed disk to and from the memory of another one, beside the guest's RAM. Measured only if it is
    /// named.
    PeerToPeer,
    /// fio's jobs on physical devices of an emulated host, in turns borrowed and by plain vfio-pci.
    /// Measured only if it is named.
    Passthrough,
}

/// What hosts are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Hosts {
    /// Network namespaces of this machine, with a polling driver in the guest's place.
    Namespaces,
    /// VMs, one of which has a guest.
    Vms,
}

impl Bench {
    /// Whether to measure that.
    pub(crate) fn wants(&self, chapter: Chapter) -> bool {
        match self.only.as_slice() {
            // They have the jobs of `Fio`, make hosts, or take root.
            [] if matches!(
                chapter,
                Chapter::Network
                    | Chapter::Virtio
                    | Chapter::VirtioNet
                    | Chapter::PeerToPeer
                    | Chapter::Passthrough
            ) =>
            {
                false
            }
            // Naming jobs implies fio.
            [] => self.jobs.is_empty() || chapter == Chapter::Fio,
            only => only.contains(&chapter),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn without_a_verb_the_verbs_are_listed() {
        assert!(Args::try_parse_from(["xtask"]).unwrap().verb.is_none());
        let help = Args::command().render_help().to_string();
        for verb in ["demo", "test", "soak", "cluster", "bench", "deb", "tidy"] {
            assert!(help.contains(&format!("\n  {verb} ")), "{help}");
        }
    }

    #[test]
    fn a_job_is_one_of_those_there_are() {
        assert!(Args::try_parse_from(["xtask", "bench", "--job", "randread-4k-qd1"]).is_ok());
        let error = Args::try_parse_from(["xtask", "bench", "--job", "x"]).unwrap_err();
        assert!(error.to_string().contains("seqwrite-128k"), "{error}");
    }

    #[test]
    fn what_takes_long_or_a_host_of_its_own_is_measured_if_it_is_named() {
        let wanted = |args: &[&str]| {
            let args = [&["xtask", "bench"], args].concat();
            let Some(Verb::Bench(bench)) = Args::try_parse_from(args).unwrap().verb else {
                panic!("not bench");
            };
            Chapter::value_variants()
                .iter()
                .filter(|chapter| bench.wants(**chapter))
                .copied()
                .collect::<Vec<_>>()
        };
        let mut all = Chapter::value_variants().to_vec();
        let by_name = [
            Chapter::Network,
            Chapter::Virtio,
            Chapter::VirtioNet,
            Chapter::PeerToPeer,
            Chapter::Passthrough,
        ];
        all.retain(|chapter| !by_name.contains(chapter));
        assert_eq!(wanted(&[]), all);
        assert_eq!(wanted(&["--quick"]), all);
        assert_eq!(wanted(&["--only", "network"]), [Chapter::Network]);
        assert_eq!(wanted(&["--only", "ping-pong"]), [Chapter::PingPong]);
        assert_eq!(wanted(&["--job", "seqread-128k"]), [Chapter::Fio]);
        assert_eq!(
            wanted(&["--only", "sweep", "--only", "fio"]),
            [Chapter::Fio, Chapter::Sweep]
        );
    }
}
