//! Network namespaces, made with the test bed's `ip`.

use std::{
    process::{Command, Stdio},
    sync::LazyLock,
};

use anyhow::{Context, Result, ensure};
use farside_testbed::lacks_root;

use crate::testbed;

/// The reason why this machine cannot run the test, if any.
pub fn unable() -> Option<String> {
    static MADE: LazyLock<Result<(), String>> = LazyLock::new(|| {
        let name = format!("fs-try-{}", std::process::id());
        let made = add(&name).and_then(|()| ip(&["netns", "delete", &name]));
        made.map(drop)
            .map_err(|error| format!("{error:#}").replace('\n', "; "))
    });
    let why = || {
        Some(format!(
            "no network namespace can be made: {}",
            MADE.as_ref().err()?
        ))
    };
    lacks_root().or_else(why)
}

/// Creates the network namespace `name`.
///
/// `ip` returns to its original namespace, which root of a user namespace may do only if
/// the user namespace owns that one too.
pub(super) fn add(name: &str) -> Result<()> {
    let tool = testbed()?.tool("ip");
    let mut unshare = Command::new("unshare");
    unshare.arg("--net").arg(tool.get_program());
    run(unshare, &["netns", "add", name]).map(drop)
}

pub(super) fn ip(args: &[&str]) -> Result<String> {
    run(testbed()?.tool("ip"), args)
}

fn run(mut ip: Command, args: &[&str]) -> Result<String> {
    let output = ip
        .args(args)
        .stdin(Stdio::null())
        .output()
        .context("running ip")?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    ensure!(
        output.status.success(),
        "ip {}: {}",
        args.join(" "),
        text(&output.stderr)
    );
    Ok(text(&output.stdout))
}
