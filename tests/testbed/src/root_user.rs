//! Root for the installation of packages, mounts and network namespaces: the machine's
//! root, or a user namespace's.

use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Error};

use crate::command::output;

/// Maps root to the user, and all other users to the range that `/etc/subuid` grants:
/// packages have files and processes of several users.
const USER_NAMESPACE: [&str; 3] = ["--user", "--map-root-user", "--map-auto"];

/// Set-up of the new namespaces before the binary starts.
const ENTER: &str = include_str!("become_root.sh");

/// Restarts this binary as root of a user namespace, for the first lines of `main`. Returns
/// if it already is root, or if the machine does not allow such a namespace: see
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

/// Runs the command to be appended as root of a user namespace.
fn enter() -> Command {
    let mut unshare = Command::new("unshare");
    unshare
        .args(USER_NAMESPACE)
        .args(["--mount", "sh", "-c", ENTER, "become_root.sh"]);
    unshare
}

/// The reason why this process is not root after [`become_root`], if any.
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

/// In the format of a test's skip reason.
pub(crate) fn one_line(error: &Error) -> String {
    format!("{error:#}").replace('\n', "; ")
}

/// Creates a user namespace and leaves it.
fn user_namespace() -> Result<(), Error> {
    // Without other users first: if the kernel refuses, unshare would leave behind the
    // child that it has forked to run newuidmap, and that child holds the pipe open.
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
