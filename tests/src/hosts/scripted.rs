//! The scripted VMM in a host, controlled step by step.

use anyhow::{Context, Result, ensure};
use farside_testbed::Pending;
use serde_json::Value;

use super::host::Host;
use crate::{BOOT, SHORT};

const INPUT: &str = "/run/scripted-vmm.in";
const OUTPUT: &str = "/run/scripted-vmm.out";

/// A scripted VMM that waits for its next step.
pub(super) struct Scripted<'a> {
    host: &'a Host,
    running: Pending<'a>,
    steps: usize,
}

impl<'a> Scripted<'a> {
    /// Starts it with a backend's socket.
    pub(super) fn start(host: &'a Host, socket: &str, args: &str) -> Result<Self> {
        // Those of a former one.
        host.exec_ok(&format!("rm -f {INPUT} {OUTPUT}"), SHORT)?;
        let command = format!(
            "mkfifo {INPUT} || exit 1
            # Opened for both, so that no line is the last one.
            exec 3<>{INPUT}
            exec scripted-vmm --socket {socket} --wait 60 --deadline 170 --timeout 60 {args} \
                --step <&3 >{OUTPUT} 2>/tmp/scripted-vmm.log"
        );
        let running = host.exec_start(&command, 10 * BOOT)?;
        host.wait_path(OUTPUT, SHORT)?;
        Ok(Self {
            host,
            running,
            steps: 0,
        })
    }

    /// Performs one step that must succeed; returns its result.
    pub(super) fn step(&mut self, step: &str) -> Result<Value> {
        self.steps += 1;
        let n = self.steps;
        let command = format!(
            "echo '{step}' >{INPUT}
            until [ $(wc -l <{OUTPUT}) -ge {n} ] || ! pidof scripted-vmm >/dev/null; do
                sleep 0.1
            done
            sed -n {n}p {OUTPUT}"
        );
        let line = self.host.exec_ok(&command, BOOT)?;
        let answer: Value = serde_json::from_str(line.trim())
            .with_context(|| format!("step `{step}`: scripted-vmm printed `{line}`"))
            .map_err(|error| anyhow::anyhow!("{error:#}{}", self.host.story()))?;
        ensure!(
            answer["ok"] == true,
            "step `{step}`: {answer}{}",
            self.host.story()
        );
        Ok(answer["found"].clone())
    }

    /// Ends the run; returns its report.
    pub(super) fn quit(self) -> Result<Value> {
        self.host.exec_ok(&format!("echo quit >{INPUT}"), SHORT)?;
        let ended = self.running.wait_for(BOOT)?;
        ensure!(ended.success(), "scripted-vmm: {ended}");
        let line = self.host.exec_ok(&format!("tail -n 1 {OUTPUT}"), SHORT)?;
        serde_json::from_str(&line).with_context(|| format!("scripted-vmm printed `{line}`"))
    }
}
