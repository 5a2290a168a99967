//! Binaries of the unpacked packages, runnable on the host: wrappers that start them with
//! the loader and libraries that they were built for. The system's QEMU is used if it has
//! the required features.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::cache::{self, Cache};
use crate::command::output;
use crate::debian::Debian;
use crate::{elf, recipe};

const QEMU: &str = "qemu-system-x86_64";
/// The first version with `vfio-user-pci`.
const OLDEST_QEMU: (u32, u32) = (10, 1);
const DEVICE: &str = "\"vfio-user-pci\"";

/// The location of runnable binaries.
#[derive(Debug, Clone)]
pub(crate) struct Host {
    pub(crate) qemu: PathBuf,
    /// As printed by QEMU.
    pub(crate) qemu_version: String,
    /// Directory of the wrappers.
    pub(crate) bin: PathBuf,
}

impl Host {
    pub(crate) fn prepare(cache: &Cache, debian: &Debian) -> Result<Self> {
        let root = debian.root();
        let scripts = wrappers(&root)?;
        let key = cache::key(scripts.iter().map(|(name, text)| format!("{name}\n{text}")));
        let wrapped = Path::new(QEMU);
        let bin = cache.entry("bin", &key, |directory| {
            for (name, text) in &scripts {
                let path = directory.join(name);
                fs::write(&path, text)
                    .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o755)))
                    .with_context(|| format!("writing {}", path.display()))?;
            }
            // Running QEMU takes longer than reading the cached version.
            let version = version(&directory.join(wrapped)).context("trying QEMU")?;
            fs::write(directory.join("version"), version).context("writing QEMU's version")
        })?;
        if let Some(version) = usable_system_qemu() {
            log::info!("using the system's own QEMU: {version}");
            return Ok(Host {
                qemu: QEMU.into(),
                qemu_version: version,
                bin,
            });
        }
        Ok(Host {
            qemu: bin.join(wrapped),
            qemu_version: fs::read_to_string(bin.join("version"))
                .context("reading QEMU's version")?,
            bin,
        })
    }
}

/// The system's QEMU, if it is new enough and has the device.
fn usable_system_qemu() -> Option<String> {
    let version = version(Path::new(QEMU)).ok()?;
    if parse_version(&version)? < OLDEST_QEMU {
        return None;
    }
    let devices = output(Command::new(QEMU).args(["-device", "help"]), "").ok()?;
    devices.contains(DEVICE).then_some(version)
}

fn version(qemu: &Path) -> Result<String> {
    let text = output(Command::new(qemu).arg("--version"), "install QEMU")?;
    Ok(text.lines().next().unwrap_or_default().to_owned())
}

fn parse_version(text: &str) -> Option<(u32, u32)> {
    let number = text.strip_prefix("QEMU emulator version ")?;
    let mut parts = number.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// Name and text of each wrapper.
fn wrappers(root: &Path) -> Result<Vec<(String, String)>> {
    let qemu_options: String = ["qemu", "seabios"]
        .iter()
        .map(|directory| format!(" -L {}", quoted(&root.join("usr/share").join(directory))))
        .collect();
    let mut scripts = vec![(
        QEMU.to_owned(),
        wrapper(root, &format!("usr/bin/{QEMU}"), &qemu_options),
    )];
    let name = |path: &str| path.rsplit('/').next().unwrap_or(path).to_owned();
    for tool in recipe::HOST_TOOLS {
        scripts.push((name(tool), wrapper(root, tool, "")));
    }
    let modules: String = perl_modules(root)?
        .iter()
        .map(|directory| format!(" -I {}", quoted(directory)))
        .collect();
    for script in recipe::HOST_SCRIPTS {
        let options = format!("{modules} {}", quoted(&root.join(script)));
        scripts.push((name(script), wrapper(root, recipe::PERL, &options)));
    }
    Ok(scripts)
}

/// Perl's module directories: by default it searches `/`, whose modules may be of another
/// version.
fn perl_modules(root: &Path) -> Result<Vec<PathBuf>> {
    let libraries = root.join("usr/lib/x86_64-linux-gnu");
    let perl = libraries.join("perl");
    let version = fs::read_dir(&perl)
        .with_context(|| format!("listing {}", perl.display()))?
        .flatten()
        .map(|entry| entry.file_name())
        .filter(|name| name.as_encoded_bytes()[0].is_ascii_digit())
        .max()
        .with_context(|| format!("no Perl in {}", perl.display()))?;
    Ok(vec![
        root.join("usr/share/perl5"),
        libraries.join("perl-base"),
        perl.join(&version),
        root.join("usr/share/perl").join(&version),
    ])
}

fn wrapper(root: &Path, program: &str, options: &str) -> String {
    wrapper_of(root, &root.join(program), options)
}

/// A script that starts `program` with the loader and the libraries below `root`.
pub(crate) fn wrapper_of(root: &Path, program: &Path, options: &str) -> String {
    let libraries = root.join("usr/lib/x86_64-linux-gnu");
    format!(
        "#!/bin/sh\n# {program}, with the loader and libraries it was made for.\n\
         QEMU_MODULE_DIR={modules} exec {loader} --library-path {libraries} \\\n  \
         {program}{options} \"$@\"\n",
        program = quoted(program),
        modules = quoted(&libraries.join("qemu")),
        loader = quoted(&root.join(elf::LOADER)),
        libraries = quoted(&libraries),
    )
}

/// A path as one word of a shell command.
pub(crate) fn quoted(path: &Path) -> String {
    format!("'{}'", path.display().to_string().replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers() {
        let parse = |text| parse_version(text).unwrap();
        let debian = parse("QEMU emulator version 11.1.3 (Debian 1:11.1.3+ds-1~bpo13+1)");
        assert_eq!(debian, (11, 1));
        assert!(parse("QEMU emulator version 7.2.22") < OLDEST_QEMU);
        assert!(parse("QEMU emulator version 10.0.8") < OLDEST_QEMU);
        assert!(parse("QEMU emulator version 10.1.0") >= OLDEST_QEMU);
        assert_eq!(parse_version("bash: not found"), None);
    }

    #[test]
    fn odd_paths_stay_one_word() {
        assert_eq!(quoted(Path::new("/a b/it's")), r"'/a b/it'\''s'");
    }
}
