//! Root for what installs packages, mounts or makes network namespaces: the
//! machine's, or that of a user namespace.

use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Error};

use crate::command::output;

/// Maps root to the user, and all other users to those that `/etc/subuid` grants:
/// packages have files and processes of several users.
const USER_NAMESPACE: [&str; 3] = ["--user", "--map-root-user", "--map-auto"];

/// What the new namespace needs before the program starts.
const ENTER: &str = include_str!("become_root.sh");

/// Restarts this program as root of a user namespace, for the first lines of `main`.
/// Returns if it is root already, or if the machine allows no such namespace: see
/// [`lacks_root`].
pub fn become_root() {
    if lacks_root().is_none() || user_namespace().is_err() {
        return;
    }
    let Ok(program) = std::env::current_exe() else {
        return;
    };
    let error = enter()
        .arg(program)
        .args(std::env::args_os().skip(1))
        .exec();
    log::warn!("cannot run unshare: {error}");
}

/// Runs the program that is to be appended as root of a user namespace.
fn enter() -> Command {
    let mut unshare = Command::new("unshare");
    unshare
        .args(USER_NAMESPACE)
        .args(["--mount", "sh", "-c", ENTER, "become_root.sh"]);
    unshare
}

/// Why this process is not root after [`become_root`]; None if it is.
pub fn lacks_root() -> Option<String> {
    if rustix::process::geteuid().is_root() {
        return None;
    }
    let why = match user_namespace() {
        Ok(()) => "this process has not entered a user namespace".to_owned(),
        Err(error) => one_line(&error),
    };
    Some(format!("needs root, or a user namespace: {why}"))
}

/// As a test's reason is printed.
pub(crate) fn one_line(error: &Error) -> String {
    format!("{error:#}").replace('\n', "; ")
}

/// Makes one and leaves it.
fn user_namespace() -> Result<(), Error> {
    // Without other users first: where the kernel refuses, unshare would leave the child
    // behind that it has forked to run newuidmap, and that keeps our pipe open.
    let mut unshare = Command::new("unshare");
    unshare.args(["--user", "--map-root-user", "--mount", "true"]);
    output(&mut unshare, "it is in the package util-linux")
        .context("the kernel allows none, or not in a chroot")?;
    if let Err(error) = Command::new("newuidmap").output() {
        return Err(error).context("cannot run newuidmap, which is in the package uidmap");
    }
    output(enter().arg("true"), "it is in the package util-linux")
        .map(drop)
        .context(
            "it takes a range of this user in /etc/subuid and in /etc/subgid, and a kernel that \
             allows it and a tmpfs on /run",
        )
}
