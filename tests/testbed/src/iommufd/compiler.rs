//! The compiler and `kbuild` that Debian built the kernel with, from packages that are
//! unpacked without being installed, on a machine with an older libc.

use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::elf;
use crate::host::quoted;
use crate::modules::files_below;

/// Dependencies that compiling modules does not need.
pub(super) const NOT_NEEDED: &[&str] =
    &["binutils", "libssl3t64", "linux-base", "pahole", "xz-utils"];

/// Directories with binaries that the build runs.
const BINARIES: &[&str] = &["usr/bin", "usr/libexec", "usr/lib"];

/// Replaces each binary by a script that starts it with the loader and libraries that it was
/// made for: they start each other by path.
pub(super) fn make_runnable(root: &Path) -> Result<()> {
    let mut found = 0;
    for directory in BINARIES {
        for file in files_below(root.join(directory))? {
            if is_program(&file)? {
                wrap(root, &file)?;
                found += 1;
            }
        }
    }
    ensure!(found > 0, "the packages brought no binaries");
    // The compiler's name for it.
    let bin = root.join("usr/bin");
    symlink("x86_64-linux-gnu-as", bin.join("as")).context("linking the assembler")
}

/// Whether a file is an executable ELF file and no library.
fn is_program(path: &Path) -> Result<bool> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    if name.ends_with(".so") || name.contains(".so.") {
        return Ok(false);
    }
    let context = || format!("reading {}", path.display());
    let mode = fs::metadata(path)
        .with_context(context)?
        .permissions()
        .mode();
    if mode & 0o100 == 0 {
        return Ok(false);
    }
    let mut magic = Vec::new();
    let file = File::open(path).with_context(context)?;
    file.take(4).read_to_end(&mut magic).with_context(context)?;
    Ok(magic == b"\x7fELF")
}

fn wrap(root: &Path, program: &Path) -> Result<()> {
    let mut binary = program.as_os_str().to_owned();
    binary.push(".elf");
    let binary = PathBuf::from(binary);
    fs::rename(program, &binary)
        .and_then(|()| fs::write(program, script(root, &binary)))
        .and_then(|()| fs::set_permissions(program, fs::Permissions::from_mode(0o755)))
        .with_context(|| format!("making {} runnable", program.display()))
}

/// Keeps the script's name as the binary's: by it the compiler and `make` find themselves.
fn script(root: &Path, binary: &Path) -> String {
    format!(
        "#!/bin/sh\nexec {loader} --library-path {libraries} --argv0 \"$0\" {binary} \"$@\"\n",
        loader = quoted(&root.join(elf::LOADER)),
        libraries = quoted(&root.join(elf::LIBRARY_DIRECTORY)),
        binary = quoted(binary),
    )
}

/// `PATH` with that directory first.
pub(super) fn search_path(first: &Path) -> OsString {
    let mut all = first.as_os_str().to_owned();
    if let Some(path) = env::var_os("PATH").filter(|path| !path.is_empty()) {
        all.push(":");
        all.push(path);
    }
    all
}

/// `make` with the headers of that kernel.
pub(super) fn make(root: &Path, release: &str) -> Result<Command> {
    let headers = root
        .join("usr/src")
        .join(format!("linux-headers-{release}"));
    let modules = root.join("usr/lib/modules").join(release);
    let source = fs::canonicalize(modules.join("source"))
        .with_context(|| format!("the packages brought no headers of Linux {release}"))?;
    let bin = root.join("usr/bin");
    let mut command = Command::new(bin.join("make"));
    command
        .env_clear()
        .env("LC_ALL", "C")
        .env("PATH", search_path(&bin))
        .arg("-C")
        .arg(&headers)
        // The Makefile in `headers` has absolute paths.
        .arg("-f")
        .arg(source.join("Makefile"))
        .arg(format!("KBUILD_OUTPUT={}", headers.display()));
    Ok(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn binaries_become_scripts_and_libraries_stay() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, mode: u32, bytes: &[u8]| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, bytes).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        };
        let elf = b"\x7fELF binary";
        let others: [(&str, u32, &[u8]); 3] = [
            ("usr/bin/script", 0o755, b"#!/bin/sh\n"),
            ("usr/libexec/gcc/plugin.so", 0o755, elf),
            ("usr/lib/object.o", 0o644, elf),
        ];
        write("usr/bin/gcc", 0o755, elf);
        for (path, mode, bytes) in others {
            write(path, mode, bytes);
        }
        make_runnable(root.path()).unwrap();
        let read = |path: &str| fs::read(root.path().join(path)).unwrap();
        assert_eq!(read("usr/bin/gcc.elf"), elf);
        let script = String::from_utf8(read("usr/bin/gcc")).unwrap();
        let binary = quoted(&root.path().join("usr/bin/gcc.elf"));
        assert!(script.contains(&binary), "{script}");
        assert!(script.contains("--argv0 \"$0\""), "{script}");
        for (path, _, bytes) in others {
            assert_eq!(read(path), bytes, "{path}");
        }
    }
}
