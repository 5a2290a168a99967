//! The scripted VMM, step by step.

use anyhow::{Context, Result, ensure};
use farside_testbed::Pending;
use farside_tests::{BOOT, SHORT};
use serde_json::Value;

use crate::host::{Host, Place, socket};

/// A scripted VMM that waits for its next step. It continues to run after a drop.
pub struct Scripted<'a> {
    host: &'a Host,
    vm: &'static str,
    running: Pending<'a>,
    steps: usize,
}

impl<'a> Scripted<'a> {
    pub fn start(host: &'a Host, place: Place, vm: &'static str, device: &str) -> Result<Self> {
        let socket = socket(place, vm, device);
        let command = format!(
            "cd /tmp; mkfifo {vm}.in || exit 1
            # Opened for both, so that no line is the last one.
            exec 3<>{vm}.in
            echo $$ >{vm}.pid
            exec scripted-vmm --socket {socket} --ram 64M --low 32M --deadline 170 --timeout 60 \
                --step <&3 >{vm}.out 2>{vm}.log"
        );
        host.exec_ok(&format!("cd /tmp; rm -f {vm}.in {vm}.out {vm}.pid"), SHORT)?;
        let running = host.exec_start(&command, 10 * BOOT)?;
        host.wait_path(&format!("/tmp/{vm}.out"), SHORT)?;
        Ok(Self {
            host,
            vm,
            running,
            steps: 0,
        })
    }

    /// Starts a step.
    pub fn begin(&mut self, step: &str) -> Result<()> {
        self.steps += 1;
        let command = format!("echo '{step}' >/tmp/{}.in", self.vm);
        self.host.exec_ok(&command, SHORT).map(drop)
    }

    /// The result of the last step that was started.
    pub fn answer(&self) -> Result<Value> {
        let (vm, n) = (self.vm, self.steps);
        let command = format!(
            "cd /tmp
            until [ $(wc -l <{vm}.out) -ge {n} ] || ! kill -0 $(cat {vm}.pid); do sleep 0.05; done
            sed -n {n}p {vm}.out"
        );
        let line = self.host.exec_ok(&command, BOOT)?;
        serde_json::from_str(line.trim()).with_context(|| format!("scripted-vmm printed `{line}`"))
    }

    /// Performs a step, which must succeed.
    pub fn step(&mut self, step: &str) -> Result<Value> {
        let answer = self.try_step(step)?;
        let log = format!("cat /tmp/{}.log", self.vm);
        ensure!(
            answer["ok"] == true,
            "step `{step}`: {answer}\n{}",
            self.host.exec_ok(&log, SHORT)?
        );
        Ok(answer["found"].clone())
    }

    /// Performs a step.
    pub fn try_step(&mut self, step: &str) -> Result<Value> {
        self.begin(step)?;
        self.answer()
    }

    /// Kills it during whatever step is running.
    pub fn kill(self) -> Result<()> {
        // It may have exited already, after a refusal.
        let kill = format!("kill -KILL $(cat /tmp/{}.pid) 2>/dev/null; true", self.vm);
        self.host.exec_ok(&kill, SHORT)?;
        self.running.wait_for(SHORT)?;
        Ok(())
    }

    /// Ends it regularly.
    pub fn quit(self) -> Result<()> {
        self.host
            .exec_ok(&format!("echo quit >/tmp/{}.in", self.vm), SHORT)?;
        let ended = self.running.wait_for(BOOT)?;
        ensure!(ended.success(), "scripted-vmm: {ended}");
        Ok(())
    }
}
