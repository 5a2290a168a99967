//! Network namespaces, by the program `ip`.

use std::{
    process::{Command, Stdio},
    sync::LazyLock,
};

use anyhow::{Context, Result, ensure};

/// Why this cannot be run here, if so.
pub fn unable() -> Option<&'static str> {
    if !rustix::process::geteuid().is_root() {
        return Some("network namespaces need root");
    }
    static MADE: LazyLock<bool> = LazyLock::new(|| {
        let name = format!("fs-try-{}", std::process::id());
        let made = ip(&["netns", "add", &name]).is_ok();
        if made {
            // Of no use any more.
            let _ = ip(&["netns", "delete", &name]);
        }
        made
    });
    match *MADE {
        true => None,
        false => Some("network namespaces cannot be made here (`ip netns add`)"),
    }
}

pub(super) fn ip(args: &[&str]) -> Result<String> {
    let output = Command::new("ip")
        .args(args)
        .stdin(Stdio::null())
        .output()
        .context("running ip (package iproute2)")?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    ensure!(
        output.status.success(),
        "ip {}: {}",
        args.join(" "),
        text(&output.stderr)
    );
    Ok(text(&output.stdout))
}
