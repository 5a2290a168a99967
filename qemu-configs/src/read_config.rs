//! The format of QEMU's `-readconfig`: sections of `key = "value"`.
//!
//! It holds the machine, memory, CPUs, monitor and root ports. It cannot express `-cpu` and
//! `-blockdev`, nor a nested property such as the socket of a borrowed device; those stay
//! arguments. (QEMU 11.1: "Property 'vfio-user-pci.socket.type' not found".)

use std::{
    fmt::Write,
    path::{Path, PathBuf},
};

use serde::Serialize;
use serde_json::Value;

use crate::{
    CommandLine, MonitorSocket, Vm, VmError,
    check::path_text,
    command_line::SERIALISES,
    parts::{MEMORY, MONITOR},
};

/// Maximum length of a value, in bytes. The format has no escape for a quote.
const MAX_VALUE: usize = 1023;

/// A file for `-readconfig`, and the command line that reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadConfig {
    /// The contents of the file.
    pub text: String,
    /// QEMU's arguments: the file, and the options that it cannot express.
    pub command_line: CommandLine,
}

impl Vm {
    /// The VM as a file for `-readconfig`, to be written to `file`. `program` is QEMU, by name or
    /// path.
    pub fn read_config(
        &self,
        program: impl Into<PathBuf>,
        file: &Path,
    ) -> Result<ReadConfig, VmError> {
        // Fails for the same errors as the command line.
        let program = program.into();
        self.command_line(&program)?;
        let mut args = vec!["-readconfig".to_owned(), path_text(file)?.to_owned()];
        args.extend(self.args_beside_config()?);
        let text = self.config_text()?;
        let command_line = CommandLine { program, args };
        Ok(ReadConfig { text, command_line })
    }

    fn config_text(&self) -> Result<String, VmError> {
        let mut file = Ini::default();
        file.section("name", None)
            .set("guest", &self.name)?
            .set("debug-threads", "on")?;
        let machine = file.section("machine", None);
        machine
            .set("type", self.machine.name())?
            .set("memory-backend", MEMORY)?;
        for (property, node) in self.flash() {
            machine.set(property, node)?;
        }
        for (accel, threads) in self.accels() {
            let section = file.section("accel", None).set("accel", accel)?;
            if let Some(threads) = threads {
                section.set("thread", threads)?;
            }
        }
        file.section("smp-opts", None)
            .set("cpus", &self.vcpus.to_string())?;
        file.section("memory", None)
            .set("size", &format!("{}M", self.ram >> 20))?;
        file.properties("object", &self.memory_backend())?;
        if let Some(socket) = &self.monitor {
            let chardev = file.section("chardev", Some(MONITOR));
            match socket {
                MonitorSocket::Path(path) => chardev.set("path", path_text(path)?)?,
                MonitorSocket::Fd(fd) => chardev.set("fd", &fd.to_string())?,
            }
            .set("backend", "socket")?
            .set("server", "on")?
            .set("wait", "off")?;
            file.section("mon", Some(MONITOR))
                .set("chardev", MONITOR)?
                .set("mode", "control")?;
        }
        for port in self.root_ports() {
            file.properties("device", &port)?;
        }
        Ok(file.0)
    }
}

#[derive(Default)]
struct Ini(String);

impl Ini {
    fn section(&mut self, kind: &str, id: Option<&str>) -> &mut Self {
        let id = id.map_or(String::new(), |id| format!(" \"{id}\""));
        let gap = if self.0.is_empty() { "" } else { "\n" };
        let _ = writeln!(self.0, "{gap}[{kind}{id}]");
        self
    }

    fn set(&mut self, key: &str, value: &str) -> Result<&mut Self, VmError> {
        if value.len() > MAX_VALUE || value.contains(['"', '\n']) {
            return Err(VmError::ConfigValue {
                key: key.to_owned(),
                value: value.to_owned(),
            });
        }
        let _ = writeln!(self.0, "  {key} = \"{value}\"");
        Ok(self)
    }

    /// A section for an option that is otherwise JSON; its id goes into the heading.
    fn properties(&mut self, kind: &str, part: &impl Serialize) -> Result<(), VmError> {
        let fields = serde_json::to_value(part).expect(SERIALISES);
        let fields = fields.as_object().expect("a part is a struct");
        self.section(kind, fields.get("id").and_then(Value::as_str));
        for (key, value) in fields.iter().filter(|(key, _)| *key != "id") {
            let value = match value {
                Value::Bool(true) => "on".to_owned(),
                Value::Bool(false) => "off".to_owned(),
                Value::String(text) => text.clone(),
                other => other.to_string(),
            };
            self.set(key, &value)?;
        }
        Ok(())
    }
}
