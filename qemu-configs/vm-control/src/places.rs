//! Executables.

use std::{env, path::PathBuf};

/// `farside` itself: `$FARSIDE_PROGRAM`, else the running executable if it has that name, else the
/// one in `PATH`.
pub(crate) fn farside() -> PathBuf {
    if let Some(program) = from_env("FARSIDE_PROGRAM") {
        return program;
    }
    match env::current_exe() {
        Ok(program) if program.file_name().is_some_and(|name| name == "farside") => program,
        _ => "farside".into(),
    }
}

/// `virsh`: `$FARSIDE_VIRSH`, else the one in `PATH`.
pub fn virsh() -> PathBuf {
    from_env("FARSIDE_VIRSH").unwrap_or_else(|| "virsh".into())
}

/// The default QEMU binary.
pub(crate) const QEMU: &str = "qemu-system-x86_64";

pub(crate) fn from_env(name: &str) -> Option<PathBuf> {
    env::var_os(name)
        .filter(|value| !value.is_empty())
        .map(PathBuf::from)
}
