//! Network namespaces, made with the test bed's `ip`.

use std::{
    fs::File,
    net::TcpListener,
    os::fd::AsFd,
    process::{Command, Stdio},
    sync::LazyLock,
};

use anyhow::{Context, Result, ensure};
use farside_testbed::lacks_root;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

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

/// A socket that listens in the network namespace `name`.
pub(super) fn listen(name: &str, address: &str) -> Result<TcpListener> {
    let namespace = File::open(format!("/run/netns/{name}"))?;
    let address = (address.to_owned(), 0);
    // A namespace is a thread's.
    let listening = std::thread::spawn(move || {
        let kind = Some(LinkNameSpaceType::Network);
        move_into_link_name_space(namespace.as_fd(), kind)?;
        TcpListener::bind(address)
    });
    let listening = listening.join().ok().context("a thread has panicked")?;
    listening.with_context(|| format!("listening in {name}"))
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
