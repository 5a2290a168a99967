//! The tools to build a kernel besides a C compiler: the machine's, or, if one is missing,
//! packages of the machine's Debian release, unpacked without being installed.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::apt::{self, Wanted};
use crate::progress::Progress;

/// Printed if a tool is missing.
pub(super) const INSTALL: &str = "building a kernel needs the packages bc, bison, flex, gcc, \
     libelf-dev, m4, make and xz-utils";

/// Tools, which have the names of their packages.
const PROGRAMS: &[&str] = &["bc", "bison", "flex", "m4", "make"];
const PACKAGES: &[&str] = &["bc", "bison", "flex", "libelf-dev", "m4", "make"];

/// Their dependencies that every machine with a compiler has.
const INSTALLED: &[&str] = &[
    "libc6",
    "libc6-dev",
    "libc-dev",
    "libgcc-s1",
    "libgcc-12-dev",
];

const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";

/// Tools to build with.
#[derive(Debug)]
pub(super) struct Tools {
    /// Root of the unpacked packages; `None` if the machine has all tools.
    root: Option<PathBuf>,
}

impl Tools {
    /// Checks the machine's tools, and unpacks the missing ones into `directory`.
    pub(super) fn prepare(directory: &Path, progress: &Progress) -> Result<Self> {
        ensure!(has_program("gcc"), "gcc is not installed; {INSTALL}");
        let mut missing: Vec<&str> = PROGRAMS
            .iter()
            .copied()
            .filter(|program| !has_program(program))
            .collect();
        if !has_libelf() {
            missing.push("libelf-dev");
        }
        if missing.is_empty() {
            return Ok(Self { root: None });
        }
        let root = directory.join("root");
        let done = directory.join("done");
        if !done.exists() {
            progress.note(&format!(
                "This machine lacks {}: unpacking packages",
                missing.join(", ")
            ));
            let suite = fs::read_to_string("/etc/os-release")
                .ok()
                .and_then(|text| debian_suite(&text));
            let suite = suite
                .with_context(|| format!("this machine lacks {}; {INSTALL}", missing.join(", ")))?;
            let wanted = Wanted {
                suites: &[suite],
                packages: PACKAGES,
                installed: INSTALLED,
            };
            let packages = apt::download(&directory.join("apt"), &wanted, progress)?;
            apt::unpack(&packages, &root, progress)?;
            fs::write(&done, "").with_context(|| format!("writing {}", done.display()))?;
        }
        Ok(Self { root: Some(root) })
    }

    /// Makes `make` use them. Sets the variables by which unpacked tools find their files,
    /// which are not at the paths that they were built for.
    pub(super) fn apply(&self, command: &mut Command) {
        let Some(root) = &self.root else {
            return;
        };
        let bin = root.join("usr/bin");
        let libraries = root.join(LIBRARIES);
        command
            .env("PATH", before(&bin, env::var_os("PATH")))
            .env(
                "LD_LIBRARY_PATH",
                before(&libraries, env::var_os("LD_LIBRARY_PATH")),
            )
            .env("BISON_PKGDATADIR", root.join("usr/share/bison"))
            .env("M4", bin.join("m4"));
        let include = root.join("usr/include");
        // The static archives: a binary linked to the shared libraries would not find them
        // at run time.
        let mut link = format!("-L{}", libraries.display());
        for library in ["libelf.a", "libz.a", "libzstd.a"] {
            if libraries.join(library).exists() {
                link += &format!(" -l:{library}");
            }
        }
        command
            .arg(format!("HOSTCFLAGS=-I{}", include.display()))
            .arg(format!("LIBELF_FLAGS=-I{}", include.display()))
            .arg(format!("LIBELF_LIBS={link}"));
    }
}

/// A search path with one more directory at its front.
fn before(directory: &Path, path: Option<OsString>) -> OsString {
    let mut all = directory.as_os_str().to_owned();
    if let Some(path) = path.filter(|path| !path.is_empty()) {
        all.push(":");
        all.push(path);
    }
    all
}

fn has_program(name: &str) -> bool {
    env::split_paths(&env::var_os("PATH").unwrap_or_default())
        .any(|directory| directory.join(name).is_file())
}

/// Whether a binary that uses libelf can be linked.
fn has_libelf() -> bool {
    let compiler = Command::new("gcc")
        .args(["-x", "c", "-", "-o", "/dev/null", "-lelf"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let Ok(mut compiler) = compiler else {
        return false;
    };
    let program = b"#include <gelf.h>\nint main(void) { return elf_version(EV_CURRENT) == 0; }\n";
    let written = match compiler.stdin.take() {
        Some(mut stdin) => stdin.write_all(program).is_ok(),
        None => false,
    };
    compiler.wait().is_ok_and(|status| status.success()) && written
}

/// The suite of a Debian machine, from its `os-release`.
fn debian_suite(os_release: &str) -> Option<String> {
    let value = |name: &str| {
        os_release.lines().find_map(|line| {
            let value = line.strip_prefix(name)?.strip_prefix('=')?;
            Some(value.trim_matches('"').to_owned())
        })
    };
    (value("ID").as_deref() == Some("debian"))
        .then(|| value("VERSION_CODENAME"))
        .flatten()
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::*;

    #[test]
    fn the_suite_is_that_of_a_debian_machine() {
        let debian = "NAME=\"Debian GNU/Linux\"\nVERSION_CODENAME=bookworm\nID=debian\n";
        assert_eq!(debian_suite(debian).as_deref(), Some("bookworm"));
        let other = "ID=ubuntu\nID_LIKE=debian\nVERSION_CODENAME=noble\n";
        assert_eq!(debian_suite(other), None);
        assert_eq!(debian_suite("ID=debian\n"), None);
    }

    #[test]
    fn unpacked_tools_come_first() {
        let path = |path: Option<&str>| before(Path::new("/t"), path.map(OsString::from));
        assert_eq!(path(Some("/a:/b")), "/t:/a:/b");
        assert_eq!(path(Some("")), "/t");
        assert_eq!(path(None), "/t");
    }

    #[test]
    fn the_machines_own_tools_are_used_as_they_are() {
        let mut command = Command::new("make");
        Tools { root: None }.apply(&mut command);
        assert_eq!(command.get_args().count() + command.get_envs().count(), 0);
        let root = tempfile::tempdir().unwrap();
        let libraries = root.path().join(LIBRARIES);
        fs::create_dir_all(&libraries).unwrap();
        fs::write(libraries.join("libelf.a"), "").unwrap();
        let tools = Tools {
            root: Some(root.path().to_owned()),
        };
        tools.apply(&mut command);
        let args: Vec<&OsStr> = command.get_args().collect();
        let link = format!("LIBELF_LIBS=-L{} -l:libelf.a", libraries.display());
        assert!(args.contains(&OsStr::new(&link)), "{args:?}");
    }
}
