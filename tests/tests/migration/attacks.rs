//! Failures of a migration other than killed processes: concurrent users, malformed input,
//! full disks. The VM does not run meanwhile, so that each case is quick; at the end it
//! boots on the expected host, with its data intact.

use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Completion;

use crate::{
    kills::{Random, begin_until, one_home, seed, settle},
    stage::{Chain, Ledger, Stage, VM, kill, shown},
};

/// How often both hosts resume concurrently.
const RACES: usize = 12;

const MIGRATE: [&str; 4] = ["migrate", VM, "--to", "b"];

fn is_described(stage: &Stage, host: &str) -> bool {
    stage.path(host, &format!("etc/vm/{VM}.toml")).exists()
}

/// Begins a migration and kills its process in that step, or soon after.
fn cut_off(stage: &Stage, from: &str, to: &str, step: &str) -> Result<()> {
    let migration = begin_until(stage, from, to, step)?;
    kill(migration.pid());
    migration.end(stage).map(drop)
}

/// The VM is on the expected host, and the other host refuses to start it.
fn is_at(stage: &Stage, host: &str, what: &str) -> Result<()> {
    let home = one_home(stage).with_context(|| what.to_owned())?;
    ensure!(home == host, "{what}: it is at {home}, not {host}");
    Ok(())
}

pub fn two_migrations_at_once_are_one(stage: &Stage) -> Result<Completion> {
    let lender = stage.lend()?;
    for n in 0..6 {
        let (from, to) = if n % 2 == 0 { ("a", "b") } else { ("b", "a") };
        let args = ["migrate", VM, "--to", to];
        let both = [stage.begin(from, &args)?, stage.begin(from, &args)?];
        let mut ends = Vec::new();
        for migration in both {
            ends.push(migration.end(stage)?);
        }
        let done = ends.iter().filter(|(success, _)| *success).count();
        ensure!(done == 1, "{ends:?}");
        let refused = ends.iter().find(|(success, _)| !success);
        let refusal = refused.map_or("", |(_, said)| said);
        ensure!(refusal.contains(&format!("has moved to {to}")), "{refusal}");
        is_at(stage, to, "two at once")?;
    }
    ensure!(Ledger::default().audit(&lender)?.handovers == 6);
    Ok(Completion::Completed)
}

/// Both hosts resume an interrupted migration; on the new host it is claimed, wrongly, that
/// the old host is dead.
pub fn both_hosts_go_on_at_once_and_one_has_the_vm(stage: &Stage) -> Result<Completion> {
    let mut random = Random::new(seed()?);
    let lender = stage.lend()?;
    stage.ok("a", &["start", VM])?;
    let mut chain = Chain::default();
    let guest = stage.guest()?;
    chain.grow(&guest)?;
    stage.ok("a", &["stop", VM])?;
    drop(guest);
    let mut from = "a";
    for n in 0..RACES {
        let to = if from == "a" { "b" } else { "a" };
        let steps = ["prepare", "return", "hand-over", "install", "start"];
        let step = steps[random.below(steps.len())];
        let back = random.below(2) == 1;
        let what = format!("race {n}: {from} to {to}, cut off at {step}, back: {back}");
        eprintln!("{what}");
        stage.note(format!("== {what}"));
        cut_off(stage, from, to, step)?;
        let mut here = vec!["migration", "resume", VM];
        if back {
            here.push("--back");
        }
        let there = ["migration", "resume", VM, "--lost-host"];
        let both = [stage.begin(from, &here)?, stage.begin(to, &there)?];
        for migration in both {
            // Each may be refused, depending on the other's progress.
            migration.end(stage)?;
        }
        settle(stage, from, false).with_context(|| what.clone())?;
        settle(stage, to, false).with_context(|| what.clone())?;
        from = one_home(stage).with_context(|| what.clone())?;
    }
    stage.ok(from, &["start", VM])?;
    let guest = stage.guest()?;
    chain.verify(&guest)?;
    let leases = Ledger::default().audit(&lender)?;
    ensure!(leases.count == 2, "{leases:?}");
    Ok(Completion::Completed)
}

/// A malformed request leaves the host unchanged, and is reported.
pub fn garbage_for_the_agent_changes_nothing(stage: &Stage) -> Result<Completion> {
    let frame = |text: &str| {
        let mut frame = b"fsm1".to_vec();
        frame.extend((text.len() as u32).to_le_bytes());
        frame.extend(text.as_bytes());
        frame
    };
    let mut noise = vec![0; 1 << 16];
    let mut random = Random::new(seed()?);
    noise.fill_with(|| random.below(256) as u8);
    let mut huge = b"fsm1".to_vec();
    huge.extend(u32::MAX.to_le_bytes());
    let nested = frame(&"[".repeat(100_000));
    let cut = frame("{\"Start\":{\"id\":\"1\",\"vm\":\"web1\"}}")[..20].to_vec();
    let before = fs::read_to_string(stage.path("a", &format!("etc/vm/{VM}.toml")))?;
    for (what, bytes) in [
        ("noise", noise),
        ("a web client", b"GET / HTTP/1.1\r\n\r\n".to_vec()),
        ("4 GiB", huge),
        ("deep brackets", nested),
        ("half a message", cut),
    ] {
        let mut child = stage
            .command("a", &["migration", "agent"])?
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        if let Some(mut stdin) = child.stdin.take() {
            // The agent may close the connection at the first bytes.
            let _ = stdin.write_all(&bytes);
        }
        let output = child.wait_with_output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(1), "{what}: {}", output.status);
        ensure!(said.contains("error: "), "{what}: {said}");
    }
    // Well formed, but without a preceding Hello; and then with malformed VM names.
    let stop = |vm: &str| format!("{{\"StopThere\":{{\"id\":\"1\",\"vm\":{vm:?}}}}}");
    let answer = ask(stage, &[&frame(&stop(VM))])?;
    ensure!(answer.contains("first message must be Hello"), "{answer}");
    let hello = format!(
        "{{\"Hello\":{}}}",
        serde_json::to_string(&farside_migration::Hello::ours())?
    );
    for name in ["../../etc/vm/web1", "", "a/b", "web1\n"] {
        let answer = ask(stage, &[&frame(&hello), &frame(&stop(name))])?;
        ensure!(answer.contains("VM name"), "{name:?}: {answer}");
    }
    let after = fs::read_to_string(stage.path("a", &format!("etc/vm/{VM}.toml")))?;
    ensure!(before == after && stage.journal("a").is_empty());
    Ok(Completion::Completed)
}

/// The replies of the agent on host `a`.
fn ask(stage: &Stage, frames: &[&[u8]]) -> Result<String> {
    let mut child = stage
        .command("a", &["migration", "agent"])?
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let mut stdin = child.stdin.take().context("no pipe")?;
    for frame in frames {
        stdin.write_all(frame)?;
    }
    drop(stdin);
    let output = child.wait_with_output()?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A lender that cannot persist a handover does not perform it; and a modified journal on
/// the new host stops the migration there, without further damage.
pub fn a_full_lender_and_a_changed_journal_stop_it(stage: &Stage) -> Result<Completion> {
    // First: a mount made later may be invisible in its namespace.
    let disk = SmallDisk::mount(&stage.path("c", "state"))?;
    let lender = stage.lend()?;
    disk.fill()?;
    let refused = ["No space left on device", "migration resume web1"];
    stage.refused("a", &MIGRATE, &refused)?;
    disk.empty()?;
    ensure!(Ledger::default().audit(&lender)?.handovers == 0);

    let journal = stage.journal_path("b");
    let text = stage.journal("b");
    let changed = text.replace(VM, "web2");
    ensure!(changed != text);
    for (bad, words) in [
        (changed, "was changed"),
        (text[..text.len() / 2].to_owned(), "cut off or was changed"),
        (
            text.replace("\"manifest\": 3", "\"manifest\": 7"),
            "manifest of version 7",
        ),
        (String::new(), "cut off or was changed"),
    ] {
        fs::write(&journal, &bad)?;
        // The message names the host and the file.
        let file = shown(&journal);
        stage.refused("a", &["migration", "resume", VM], &[words, "b: ", &file])?;
        ensure!(is_described(stage, "a") && !is_described(stage, "b"));
    }
    fs::write(&journal, &text)?;
    stage.ok("a", &["migration", "resume", VM])?;
    is_at(stage, "b", "mended")?;
    ensure!(Ledger::default().audit(&lender)?.handovers == 1);
    Ok(Completion::Completed)
}

/// A small file system mounted over a directory, unmounted on drop.
struct SmallDisk {
    directory: PathBuf,
}

impl SmallDisk {
    fn mount(directory: &Path) -> Result<Self> {
        fs::create_dir_all(directory)?;
        let output = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=256k", "tmpfs"])
            .arg(directory)
            .output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "mount: {said}");
        Ok(Self {
            directory: directory.to_owned(),
        })
    }

    /// Fills the file system.
    fn fill(&self) -> Result<()> {
        let mut file = File::create(self.directory.join("ballast"))?;
        let full = loop {
            if let Err(error) = file.write_all(&[1; 4096]) {
                break error;
            }
        };
        ensure!(full.kind() == std::io::ErrorKind::StorageFull, "{full}");
        Ok(())
    }

    fn empty(&self) -> Result<()> {
        Ok(fs::remove_file(self.directory.join("ballast"))?)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Fails only if it is already unmounted.
        let _ = Command::new("umount")
            .arg("-l")
            .arg(&self.directory)
            .status();
    }
}

pub fn a_full_disk_stops_it_and_room_lets_it_go_on(stage: &Stage) -> Result<Completion> {
    let lender = stage.lend()?;
    let disks = ["a", "b"].map(|host| SmallDisk::mount(&stage.path(host, "state")));
    let [old, new] = disks;
    let (old, new) = (old?, new?);
    // Before the first step: nothing has changed.
    for (disk, words) in [
        (&old, "No space left on device"),
        (&new, "No space left on device"),
    ] {
        disk.fill()?;
        stage.refused("a", &MIGRATE, &[words])?;
        is_at(stage, "a", "a full disk")?;
        disk.empty()?;
    }
    // In between: it resumes, or is taken back, once there is space.
    for (disk, back) in [(&old, false), (&new, false), (&old, true), (&new, true)] {
        let from = one_home(stage)?;
        let to = if from == "a" { "b" } else { "a" };
        cut_off(stage, from, to, "return")?;
        disk.fill()?;
        let mut resume = vec!["migration", "resume", VM];
        if back {
            resume.push("--back");
        }
        let ended = stage.run(from, &resume)?;
        if !ended.status.success() {
            let said = &ended.stderr;
            let words = ["No space left on device", "has arrived", "no migration"];
            ensure!(words.iter().any(|word| said.contains(word)), "{said}");
        }
        disk.empty()?;
        settle(stage, from, back)?;
        one_home(stage)?;
    }
    let home = one_home(stage)?;
    stage.ok(home, &["start", VM])?;
    stage.guest()?;
    Ledger::default().audit(&lender)?;
    Ok(Completion::Completed)
}
