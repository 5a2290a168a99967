//! The example of docs/migration.md, run as printed there.

use std::{
    env, fs,
    os::unix::process::CommandExt,
    process::{Child, Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use farside_backend_api::DeviceList;
use farside_testbed::{Accel, Staged};
use farside_tests::{BOOT, SHORT, Vm, farside_program, testbed};
use rustix::process::{Pid, Signal, kill_process_group};

const PAGE: &str = include_str!("../../docs/migration.md");

/// The example's line that gives the VM its system disk; the test's guest boots from a
/// kernel instead.
const DISK: &str = r#"qemu-args = ["-drive", "if=virtio,format=raw,file=$HOSTS/web1.img"]"#;

/// Seconds after which timeout(1) ends commands, which then exit with status 124.
const DEADLINE: &str = "600";

/// The shell commands of the example, one text per block.
fn blocks() -> Result<Vec<&'static str>> {
    let (_, section) = PAGE.split_once("\n## An example\n").context("no example")?;
    let section = section.split("\n## ").next().unwrap_or_default();
    let blocks: Vec<_> = section
        .split("```sh\n")
        .skip(1)
        .filter_map(|block| block.split("```").next())
        .collect();
    ensure!(blocks.len() == 2, "two blocks of commands, not {blocks:?}");
    Ok(blocks)
}

/// The working directory of the example. On drop, all processes that it has started end.
struct Session {
    directory: tempfile::TempDir,
    shell: Option<Child>,
}

impl Session {
    /// A shell with `farside` and QEMU in its `PATH`, as a user has it.
    fn shell(&self, commands: &str) -> Result<Command> {
        let path = env::join_paths(
            [farside_program()?, testbed()?.qemu()]
                .into_iter()
                .filter_map(|program| Some(program.parent()?.to_owned()))
                .chain(env::split_paths(&env::var_os("PATH").unwrap_or_default())),
        )?;
        let mut command = Command::new("timeout");
        command
            .args(["--kill-after=10", DEADLINE, "sh", "-ec", commands])
            .current_dir(self.directory.path())
            .env("PATH", path)
            .stdin(Stdio::null())
            .process_group(0);
        Ok(command)
    }

    /// Runs one command with the environment that the first block exports.
    fn type_line(&self, line: &str) -> Result<String> {
        let directory = self.directory.path();
        let output = self
            .shell(line)?
            .env("HOSTS", directory)
            .env("FARSIDE_RSH", directory.join("rsh"))
            .output()?;
        ensure!(
            output.status.success(),
            "{line}: {}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        for host in ["rack1-a", "rack1-b"] {
            // Refused if no VM runs, as after a test that passed.
            let _ = self.type_line(&format!("./rsh {host} farside stop web1 --limit 0 --force"));
        }
        // The lender, which the first block starts in the background.
        if let Some(mut shell) = self.shell.take() {
            let _ = kill_process_group(Pid::from_child(&shell), Signal::KILL);
            let _ = shell.wait();
        }
    }
}

/// The guest that the example has started, with the borrowed disk. On drop, its QEMU is
/// killed if it still runs.
fn guest(staged: &Staged) -> Result<Vm> {
    let vm = staged.adopt(BOOT)?;
    vm.wait_agent(BOOT)?;
    vm.wait_path("/dev/nvme0n1", SHORT)?;
    Ok(vm)
}

#[test]
fn the_example_of_the_docs_works_as_printed() -> Result<()> {
    let testbed = testbed()?;
    let staged = testbed.vm("web1").lean().stage()?;
    let args: Vec<_> = staged.guest_args().iter().map(|arg| arg.to_str()).collect();
    let accel = match testbed.accel() {
        Accel::Tcg => "tcg",
        Accel::Kvm => "kvm",
    };
    let own_guest = format!(
        "accel = {accel:?}\nqemu-args = {}",
        serde_json::to_string(&args)?
    );
    let blocks = blocks()?;
    ensure!(blocks[0].contains(DISK), "no line {DISK:?}");
    let set_up = blocks[0].replace(DISK, &own_guest);

    let mut session = Session {
        directory: tempfile::Builder::new().prefix("fs-").tempdir_in("/tmp")?,
        shell: None,
    };
    let log = session.directory.path().join("shell.log");
    let shell = session
        .shell(&set_up)?
        .stdout(fs::File::create(&log)?)
        .stderr(fs::File::options().append(true).open(&log)?)
        .spawn()?;
    let status = session.shell.insert(shell).wait()?;
    ensure!(status.success(), "{status}: {}", fs::read_to_string(&log)?);

    let mut vm = guest(&staged)?;
    vm.exec_ok("echo carried along > /dev/nvme0n1; sync", SHORT)?;
    let mut compared = 0;
    for line in blocks[1].lines() {
        let (command, says) = line.split_once('#').unwrap_or((line, ""));
        let printed = session.type_line(command)?;
        if command.contains("farside migrate") {
            vm = guest(&staged)?;
            let mark = vm.exec_ok("head -n 1 /dev/nvme0n1", SHORT)?;
            ensure!(mark.trim() == "carried along", "the disk holds {mark:?}");
        }
        let expected = match says.trim() {
            "and back" => "VM web1 runs on rack1-a now",
            says if says.starts_with("VM ") => says,
            _ => continue,
        };
        let first = printed.lines().next();
        ensure!(
            first == Some(expected),
            "{printed:?} does not begin with {expected:?}"
        );
        compared += 1;
    }
    ensure!(
        compared == 2,
        "the page shows the output of {compared} commands"
    );
    let lent = session.type_line("./rsh rack1-c farside devices --json")?;
    let lent: DeviceList = serde_json::from_str(&lent)?;
    let device = &lent.devices.first().context("no device")?.device;
    ensure!(
        device.id == "disk0" && device.borrowed_by.is_none(),
        "{lent:?}"
    );
    refused_where_it_left(&session)
}

/// The sentence that follows the example.
fn refused_where_it_left(session: &Session) -> Result<()> {
    let start = "./rsh rack1-b farside start web1 2>&1";
    let output = session
        .shell(start)?
        .env("HOSTS", session.directory.path())
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(!output.status.success(), "{text}");
    for words in ["VM web1 has moved to rack1-a", "start it there"] {
        ensure!(text.contains(words), "no {words:?} in {text:?}");
    }
    Ok(())
}
