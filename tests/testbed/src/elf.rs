//! Parses ELF files: the libraries that a binary loads, and the metadata of a kernel
//! module.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use goblin::elf::Elf;

/// Search path of Debian's loader.
pub(crate) const LIBRARY_DIRECTORY: &str = "usr/lib/x86_64-linux-gnu";
/// The loader itself, as binaries name it.
pub(crate) const LOADER: &str = "usr/lib64/ld-linux-x86-64.so.2";

/// The dynamic section of one file.
#[derive(Debug, Default, Clone)]
struct Needs {
    libraries: Vec<String>,
    /// Its additional library directories, relative to the root.
    directories: Vec<PathBuf>,
}

fn needs(path: &Path) -> Result<Needs> {
    let bytes = fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    let elf = Elf::parse(&bytes).with_context(|| format!("{} as ELF", path.display()))?;
    Ok(Needs {
        libraries: elf.libraries.iter().map(|&name| name.to_owned()).collect(),
        directories: elf
            .runpaths
            .iter()
            .chain(&elf.rpaths)
            .flat_map(|paths| paths.split(':'))
            .map(|path| PathBuf::from(path.trim_start_matches('/')))
            .collect(),
    })
}

/// The libraries (relative to `root`) that these binaries need, directly or indirectly.
pub(crate) fn library_closure(root: &Path, programs: &[&str]) -> Result<BTreeSet<PathBuf>> {
    closure(
        programs.iter().map(PathBuf::from).collect(),
        |file| needs(&root.join(file)),
        |file| root.join(file).exists(),
    )
}

fn closure(
    mut open: Vec<PathBuf>,
    needs: impl Fn(&Path) -> Result<Needs>,
    exists: impl Fn(&Path) -> bool,
) -> Result<BTreeSet<PathBuf>> {
    let mut found = BTreeSet::new();
    while let Some(file) = open.pop() {
        let Needs {
            libraries,
            directories,
        } = needs(&file)?;
        for library in libraries {
            let path = directories
                .iter()
                .map(PathBuf::as_path)
                .chain([Path::new(LIBRARY_DIRECTORY)])
                .map(|directory| directory.join(&library))
                .find(|path| exists(path))
                .with_context(|| {
                    format!(
                        "{} needs {library}, which no package brought",
                        file.display()
                    )
                })?;
            if found.insert(path.clone()) {
                open.push(path);
            }
        }
    }
    Ok(found)
}

/// A kernel module's `.modinfo` section: values by key.
pub(crate) fn module_info(bytes: &[u8]) -> Result<BTreeMap<String, Vec<String>>> {
    let elf = Elf::parse(bytes).context("module as ELF")?;
    let section = elf
        .section_headers
        .iter()
        .find(|header| elf.shdr_strtab.get_at(header.sh_name) == Some(".modinfo"))
        .and_then(|header| bytes.get(header.file_range()?))
        .context("the module has no .modinfo")?;
    Ok(parse_modinfo(section))
}

fn parse_modinfo(section: &[u8]) -> BTreeMap<String, Vec<String>> {
    let mut info: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for field in section.split(|byte| *byte == 0) {
        let field = String::from_utf8_lossy(field);
        if let Some((key, value)) = field.split_once('=') {
            info.entry(key.to_owned())
                .or_default()
                .push(value.to_owned());
        }
    }
    info
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closure_follows_libraries_and_their_own_directories() {
        let lib = |name: &str| Path::new(LIBRARY_DIRECTORY).join(name);
        let private = lib("private/libp.so");
        let needs = |file: &Path| {
            let libraries: &[&str] = match file.file_name().unwrap().to_str().unwrap() {
                "prog" => &["liba.so", "libc.so"],
                "liba.so" => &["libp.so", "libc.so"],
                "libp.so" => &["liba.so"],
                _ => &[],
            };
            Ok(Needs {
                libraries: libraries.iter().map(|&name| name.to_owned()).collect(),
                directories: vec![lib("private")],
            })
        };
        let exists = |file: &Path| {
            [&lib("liba.so"), &lib("libc.so"), &private]
                .iter()
                .any(|path| path.as_path() == file)
        };
        let found = closure(vec!["usr/bin/prog".into()], needs, exists).unwrap();
        assert_eq!(
            found,
            [lib("liba.so"), lib("libc.so"), private.clone()].into()
        );
        let error = closure(vec!["prog".into()], needs, |_| false).unwrap_err();
        assert!(error.to_string().contains("needs liba.so"), "{error}");
    }

    #[test]
    fn modinfo_keeps_repeated_keys() {
        let info = parse_modinfo(b"alias=fs-a\0alias=fs-b\0depends=x,y\0\0");
        assert_eq!(info["alias"], ["fs-a", "fs-b"]);
        assert_eq!(info["depends"], ["x,y"]);
    }
}
