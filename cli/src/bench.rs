//! `farside bench`: measures disks in the guest where it runs, makes reports,
//! compares two measurements.

mod disk;
mod fio_run;

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::{Args as ClapArgs, Subcommand, value_parser};
use farside_bench::{
    Comparison, Environment, JobResult, Pair, Results, environment,
    fio::Timing,
    job::{JOBS, Job},
    output, tables,
};

use disk::Disk;

/// Before a job is measured, seconds.
const RAMP: u32 = 1;

/// Measure disks in a guest, make reports, compare two measurements
///
/// Measures a borrowed NVMe device beside another disk, in the VM that has both.
#[derive(Debug, ClapArgs)]
#[command(args_conflicts_with_subcommands = true, arg_required_else_help = true)]
pub(crate) struct Bench {
    /// Compare two files of results.
    #[arg(long, num_args = 2, value_names = ["BEFORE", "AFTER"])]
    compare: Option<Vec<PathBuf>>,
    #[command(subcommand)]
    what: Option<What>,
}

#[derive(Debug, Subcommand)]
enum What {
    Run(Run),
    /// Make an HTML report and plots from a file of results
    Report {
        /// The results.
        results: PathBuf,
        /// Output directory; created if missing.
        #[arg(long, value_name = "DIRECTORY")]
        out: PathBuf,
    },
    /// Compare two files of results
    Compare {
        /// The results before.
        before: PathBuf,
        /// The results after.
        after: PathBuf,
    },
}

/// Run fio on two disks of this machine, alternately
///
/// Prints the ratios. Does not write to the disks unless --write is given.
#[derive(Debug, ClapArgs)]
struct Run {
    /// The borrowed disk, such as /dev/nvme0n1.
    #[arg(long, value_name = "DISK")]
    borrowed: PathBuf,
    /// The disk to compare it with, such as /dev/nvme1n1.
    #[arg(long, value_name = "DISK")]
    beside: PathBuf,
    /// Run the write jobs, too: DATA ON BOTH DISKS IS OVERWRITTEN.
    #[arg(long)]
    write: bool,
    /// Write the results to this file.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Measurements of each job on each disk.
    #[arg(long, value_name = "N", default_value_t = 5,
          value_parser = value_parser!(u32).range(1..=1000))]
    repeats: u32,
    /// Length of a measurement, seconds.
    #[arg(long, value_name = "S", default_value_t = 4,
          value_parser = value_parser!(u32).range(1..=3600))]
    seconds: u32,
}

pub(crate) fn run(args: &Bench) -> Result<()> {
    match (&args.compare, &args.what) {
        (Some(files), _) => match files.as_slice() {
            [before, after] => compare(before, after),
            _ => anyhow::bail!("give two files of results: --compare BEFORE AFTER"),
        },
        (None, Some(What::Compare { before, after })) => compare(before, after),
        (None, Some(What::Report { results, out })) => {
            let report = output::write_all(&output::read(results)?, out)?;
            println!("{}", report.display());
            Ok(())
        }
        (None, Some(What::Run(run))) => run.run(),
        (None, None) => anyhow::bail!("give `run`, `report` or `compare`; see --help"),
    }
}

fn compare(before: &std::path::Path, after: &std::path::Path) -> Result<()> {
    let (before, after) = (output::read(before)?, output::read(after)?);
    print!("{}", Comparison::new(&before, &after).text());
    Ok(())
}

impl Run {
    fn run(&self) -> Result<()> {
        let version = fio_run::version()?;
        let borrowed = Disk::open(&self.borrowed)?;
        let beside = Disk::open(&self.beside)?;
        ensure!(
            borrowed.name != beside.name,
            "--borrowed and --beside are the same disk, {}",
            self.beside.display()
        );
        let jobs: Vec<&Job> = JOBS
            .iter()
            .filter(|job| self.write || !job.writes())
            .collect();
        let names = [&self.borrowed, &self.beside].map(|path| path.display().to_string());
        let mut results = Results::new(self.environment(version), names.each_ref().map(|n| &**n));
        for job in jobs {
            eprintln!("{}", job.name);
            let result = self
                .job(job, &borrowed, &beside)
                .with_context(|| format!("running the job {}", job.name))?;
            results.jobs.push(result);
            // Nothing measured is lost when a later job fails.
            if let Some(path) = &self.out {
                output::write_json(&results, path)?;
            }
        }
        print!("{}", tables::text(&results));
        if !self.write {
            println!("(read jobs only: --write runs all, and overwrites both disks)");
        }
        Ok(())
    }

    fn job(&self, job: &Job, borrowed: &Disk, beside: &Disk) -> Result<JobResult> {
        let timing = Timing {
            ramp: RAMP,
            seconds: self.seconds,
        };
        let pair = |_| -> Result<Pair> {
            Ok(Pair {
                borrowed: fio_run::measure(job, borrowed, timing)?,
                beside: fio_run::measure(job, beside, timing)?,
            })
        };
        Ok(JobResult {
            job: job.name.to_string(),
            network: None,
            passthrough: None,
            pairs: (0..self.repeats).map(pair).collect::<Result<_>>()?,
        })
    }

    fn environment(&self, fio: String) -> Environment {
        let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").ok();
        let options = [
            ("fio", fio),
            ("repeats", self.repeats.to_string()),
            ("seconds", self.seconds.to_string()),
        ];
        Environment {
            guest_kernel: kernel.map(|release| release.trim().to_owned()),
            farside: env!("CARGO_PKG_VERSION").to_owned(),
            options: options.map(|(name, value)| (name.to_owned(), value)).into(),
            ..environment::here()
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Program {
        #[command(flatten)]
        bench: Bench,
    }

    fn parse(args: &[&str]) -> Result<Bench, clap::Error> {
        let args = [&["farside"], args].concat();
        Ok(Program::try_parse_from(args)?.bench)
    }

    #[test]
    fn comparing_has_two_forms() {
        let files = parse(&["--compare", "a", "b"]).unwrap().compare.unwrap();
        assert_eq!(files, [PathBuf::from("a"), PathBuf::from("b")]);
        let what = parse(&["compare", "a", "b"]).unwrap().what.unwrap();
        assert!(matches!(what, What::Compare { before, .. } if before == *"a"));
        assert!(parse(&["--compare", "a"]).is_err());
        assert!(parse(&[]).is_err());
    }

    #[test]
    fn drives_are_not_written_unless_that_is_said() {
        let run = |more: &[&str]| {
            let args = [&["run", "--borrowed", "/dev/a", "--beside", "/dev/b"], more].concat();
            match parse(&args).unwrap().what.unwrap() {
                What::Run(run) => run,
                other => panic!("{other:?}"),
            }
        };
        assert!(!run(&[]).write);
        assert!(run(&["--write"]).write);
        assert!(parse(&["run", "--borrowed", "/dev/a"]).is_err());
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = format!(
            "{:#}",
            run(&parse(&["compare", "/no/a", "/no/b"]).unwrap()).unwrap_err()
        );
        assert!(error.contains("/no/a"), "{error}");
    }
}
