//! What docs/network.md prints is what the commands print.

use std::fs;

use anyhow::{Context, Result, ensure};
use farside_backend_api::ConnectionState;

use crate::{cuts::wait_connection_of, stage::Stage};

const PAGE: &str = include_str!("../../../docs/network.md");

/// A line with each number as 0 and each run of spaces as one, without the last error, which depends on how
/// the network is cut.
fn normal(line: &str) -> String {
    let line = line.split("lender at tls:").next().unwrap_or_default();
    let mut text = String::new();
    for char in line.chars() {
        let char = if char.is_ascii_digit() { '0' } else { char };
        if !(matches!(char, '0' | ' ') && text.ends_with(char)) {
            text.push(char);
        }
    }
    text
}

/// Compares what follows `$ command` on the page with what the borrower's host prints.
fn compare(stage: &Stage, command: &str) -> Result<()> {
    let block = PAGE.split_once(&format!("```text\n$ farside {command}\n"));
    let (_, block) = block.with_context(|| format!("the page has no {command:?}"))?;
    let block = block.split("```").next().unwrap_or_default();
    let found = stage.near.farside(&[command])?;
    let lines: Vec<String> = found.lines().map(normal).collect();
    for line in block.lines().map(normal) {
        ensure!(
            lines.contains(&line),
            "the page prints {line:?}, `farside {command}`:\n{found}"
        );
    }
    Ok(())
}

pub fn the_page_prints_what_the_commands_print(stage: &mut Stage) -> Result<()> {
    stage.use_tls()?;
    let list = format!("lenders = [\"{}\"]\n", stage.address());
    fs::write(stage.near.path("etc/host.toml"), list)?;
    fs::File::create(stage.far.path("large.img"))?.set_len(10 << 30)?;
    stage.lend_also("large.img", &["--name", "rack1-b"])?;
    let backend = stage.serve("web1", 300)?;
    stage.boot("web1")?.step("io 1M")?;
    stage.cut()?;
    wait_connection_of(stage, ("web1", "disk0"), ConnectionState::Waiting)?;
    compare(stage, "status")?;
    stage.join()?;
    wait_connection_of(stage, ("web1", "disk0"), ConnectionState::Connected)?;
    stage.daemon(backend).kill()?;
    stage.wait("disk0 kept for web1", |stage| {
        let status = stage.far_status()?.0;
        let entry = &status.lent("disk0").context("no disk0")?.entry;
        Ok(entry.kept.is_some().then_some(()))
    })?;
    compare(stage, "devices")
}
