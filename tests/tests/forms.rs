//! Each output form of one configuration, with a real QEMU: it must accept the form, and
//! create the same devices at the same addresses. No guest is booted.

use std::{fs, os::unix::net::UnixStream, path::Path, process::Command, time::Instant};

use anyhow::{Context, Result, ensure};
use farside_qemu_configs::message_timeout_ms;
use farside_tests::{Cluster, Daemon, MIB, SHORT, testbed};
use farside_vm_control::QmpClient;
use serde_json::{Value, json};

const VM: &str = "web1";

/// Guest RAM, bytes.
const RAM: u64 = 512 * MIB;

/// A device at port 3, one at the port of its position, and two spare ports.
const DEVICES: [&str; 2] = ["dma0", "dma1"];
const PORTS: [&str; 6] = ["port0", "port1", "port2", "port3", "port4", "port5"];

/// A client of a QEMU's monitor.
struct Monitor(QmpClient);

impl Monitor {
    /// Connects when QEMU listens, which it does before it creates its devices; it replies
    /// afterwards.
    fn connect(socket: &Path, qemu: &mut Daemon) -> Result<Self> {
        let deadline = Instant::now() + SHORT;
        let stream = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() > deadline => return Err(error.into()),
                Err(_) => ensure!(qemu.is_running()?, "QEMU has ended: {}", qemu.log()),
            }
            std::thread::yield_now();
        };
        let mut monitor = Self(QmpClient::new(stream));
        monitor.0.greet(deadline)?;
        monitor.run("qmp_capabilities", json!({}))?;
        Ok(monitor)
    }

    fn run(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let line = format!("{command} {arguments}");
        self.0.run(command, arguments).context(line)
    }

    fn property(&mut self, of: &str, name: &str) -> Result<Value> {
        let path = format!("/machine/peripheral/{of}");
        self.run("qom-get", json!({ "path": path, "property": name }))
    }

    /// The properties that must be equal in all forms.
    fn devices(&mut self) -> Result<Value> {
        let mut seen = serde_json::Map::new();
        let device_names = DEVICES.map(|id| format!("dev-{id}"));
        for name in device_names.iter().map(String::as_str).chain(PORTS) {
            let mut wanted = vec!["type", "addr", "parent_bus", "multifunction"];
            match name.starts_with("dev-") {
                true => wanted.push("x-msg-timeout"),
                false => wanted.extend(["chassis", "slot"]),
            }
            for property in wanted {
                let value = self.property(name, property)?;
                seen.insert(format!("{name}.{property}"), value);
            }
        }
        let memory = self.run("query-memdev", json!({}))?;
        let memory = memory.as_array().context("a list")?;
        let backends = memory.iter().map(|backend| {
            json!({ "id": backend["id"], "size": backend["size"], "share": backend["share"] })
        });
        seen.insert("memory".into(), backends.collect());
        Ok(seen.into())
    }
}

/// Starts a QEMU with stopped CPUs, and reads its devices.
fn look(cluster: &Cluster, mut command: Command) -> Result<Value> {
    command.args(["-S", "-display", "none", "-nodefaults"]);
    command.current_dir(cluster.directory());
    let mut qemu = Daemon::start("QEMU", command)?;
    let socket = cluster.directory().join(format!("vm/{VM}/qmp"));
    let mut monitor = Monitor::connect(&socket, &mut qemu)
        .with_context(|| format!("QEMU's monitor; it said:\n{}", qemu.log()))?;
    let devices = monitor.devices()?;
    monitor.run("quit", json!({}))?;
    let ended = qemu.wait_exit(SHORT)?;
    ensure!(ended.success(), "QEMU: {ended}: {}", qemu.log());
    Ok(devices)
}

/// The output of `farside qemu` in that form.
fn form(cluster: &Cluster, form: &str) -> Result<String> {
    let ended = cluster.run(&["qemu", "--vm", VM, "--form", form])?;
    ensure!(ended.status.success(), "{form}: {ended:?}");
    Ok(ended.stdout)
}

/// A command line as a user would paste it.
fn typed(text: &str) -> Command {
    let mut command = Command::new("sh");
    // The words after the script are its arguments.
    command.args(["-c", &format!("exec {} \"$@\"", text.trim_end()), "sh"]);
    command
}

#[test]
fn the_real_qemu_takes_every_form_and_makes_the_same_of_each() -> Result<()> {
    let cluster = Cluster::new()?;
    let description = format!(
        "devices = [{{ id = \"dma0\", port = 3 }}, \"dma1\"]\nmemory = \"{RAM}\"\n\
         accel = \"tcg\"\nspare-ports = 2\nqemu = \"{}\"\n",
        testbed()?.qemu().display()
    );
    cluster.describe(VM, &description)?;
    let _lender = cluster.lend(&["--dma-test", "dma0", "--dma-test", "dma1"])?;
    let _backend = cluster.serve(VM, &DEVICES).start()?;

    let shell = look(&cluster, typed(&form(&cluster, "shell")?))?;

    let printed = form(&cluster, "json")?;
    let json: Value = serde_json::from_str(&printed)?;
    let arguments: Vec<String> = serde_json::from_value(json["arguments"].clone())?;
    let mut command = Command::new(json["program"].as_str().context("a program")?);
    command.args(arguments);
    let by_json = look(&cluster, command)?;

    let file = form(&cluster, "readconfig")?;
    fs::write(cluster.directory().join(format!("{VM}.cfg")), &file)?;
    // The comment at the top has the command that starts it.
    let lines = file.lines().filter_map(|line| line.strip_prefix("#   "));
    let command_line: Vec<_> = lines.collect();
    let by_file = look(&cluster, typed(&command_line.join("\n")))?;

    ensure!(
        shell == by_json,
        "command line: {shell:#}\nJSON: {by_json:#}"
    );
    ensure!(
        shell == by_file,
        "command line: {shell:#}\nfile: {by_file:#}"
    );

    // Checks that the compared values are not trivial.
    ensure!(shell["dev-dma0.type"] == "vfio-user-pci", "{shell:#}");
    let bus = shell["dev-dma0.parent_bus"].as_str().context("a bus")?;
    ensure!(bus.contains("/port3/"), "{shell:#}");
    // Device and function in QEMU's encoding: 10.3.
    ensure!(shell["port3.addr"] == 0x10 << 3 | 3, "{shell:#}");
    ensure!(
        shell["dev-dma0.x-msg-timeout"] == message_timeout_ms(RAM),
        "{shell:#}"
    );
    ensure!(shell["memory"][0]["size"] == RAM, "{shell:#}");
    ensure!(shell["memory"][0]["share"] == true, "{shell:#}");
    Ok(())
}
