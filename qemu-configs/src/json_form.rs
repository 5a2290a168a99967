//! The VM as JSON, for QMP and for other software.

use serde_json::{Value, json};

use crate::{CommandLine, MonitorSocket, Vm, VmError};

impl Vm {
    /// One JSON object for software that starts QEMU itself:
    ///
    /// - `program`, `arguments`: all of [`Vm::command_line`];
    /// - `memory`: the argument of `-object`, and of QMP's `object-add`;
    /// - `machine`: the properties of `-machine` that borrowing needs;
    /// - `ports`, `devices`: the arguments of `-device`, and of QMP's `device_add`;
    /// - `monitor`: the path of the QMP socket that QEMU creates, or null.
    pub fn json_form(&self, line: &CommandLine) -> Result<Value, VmError> {
        let devices = (0..self.devices.len()).map(|position| self.device_add(position));
        Ok(json!({
            "program": line.program,
            "arguments": line.args,
            "memory": self.memory_backend(),
            "machine": { "type": self.machine.name(), "memory-backend": crate::parts::MEMORY },
            "ports": self.root_ports(),
            "devices": devices.collect::<Result<Vec<_>, _>>()?,
            "monitor": self.monitor.as_ref().and_then(MonitorSocket::path),
        }))
    }
}
