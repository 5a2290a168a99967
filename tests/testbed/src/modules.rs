//! The kernel modules of the guest: the wanted ones and their dependencies, decompressed,
//! with modprobe's index files.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::{BufReader, Cursor};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::elf;

/// One decompressed module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Module {
    pub(crate) name: String,
    /// Relative to the kernel's module directory, without compression suffix.
    pub(crate) path: PathBuf,
    pub(crate) bytes: Vec<u8>,
    /// Names of its dependencies, from its `.modinfo`.
    pub(crate) depends: Vec<String>,
    pub(crate) aliases: Vec<String>,
}

/// Reads the wanted modules and their dependencies, in loading order: each module comes
/// after its dependencies.
pub(crate) fn collect(directory: &Path, wanted: &[&str]) -> Result<Vec<Module>> {
    let files = index(directory)?;
    let builtin = fs::read_to_string(directory.join("modules.builtin"))
        .with_context(|| format!("reading modules.builtin in {}", directory.display()))?;
    let builtin: Vec<String> = builtin
        .lines()
        .filter_map(|line| Some(module_name(Path::new(line))?.0))
        .collect();
    order(wanted, |name| {
        if builtin.iter().any(|builtin| builtin == name) {
            return Ok(None);
        }
        let file = files.get(name).with_context(|| {
            format!("the kernel in {} has no module {name}", directory.display())
        })?;
        load(directory, file).map(Some)
    })
}

/// Depth-first: a module follows its dependencies. `load` resolves a name; `None` if it is
/// built in.
fn order(
    wanted: &[&str],
    mut load: impl FnMut(&str) -> Result<Option<Module>>,
) -> Result<Vec<Module>> {
    enum Visit {
        Open(String),
        Close(Module),
    }
    let mut listed: Vec<Module> = Vec::new();
    let mut seen: Vec<String> = Vec::new();
    for name in wanted {
        let mut stack = vec![Visit::Open((*name).to_owned())];
        while let Some(visit) = stack.pop() {
            match visit {
                Visit::Close(module) => listed.push(module),
                Visit::Open(name) if seen.contains(&name) => {}
                Visit::Open(name) => {
                    let module = load(&name)?;
                    seen.push(name);
                    if let Some(module) = module {
                        let depends = module.depends.clone();
                        stack.push(Visit::Close(module));
                        stack.extend(depends.into_iter().map(Visit::Open));
                    }
                }
            }
        }
    }
    Ok(listed)
}

/// The text of `modules.dep`: each module's file and its dependencies, nearest first.
pub(crate) fn modules_dep(modules: &[Module]) -> String {
    let by_name: HashMap<&str, &Module> = modules
        .iter()
        .map(|module| (module.name.as_str(), module))
        .collect();
    modules
        .iter()
        .map(|module| {
            let mut needed: Vec<&Module> = Vec::new();
            let mut next: Vec<&Module> = vec![module];
            while let Some(module) = next.pop() {
                for name in &module.depends {
                    if let Some(&dependency) = by_name.get(name.as_str()) {
                        // The last occurrence counts: dependencies of others must be loaded
                        // first.
                        needed.retain(|other| other.name != dependency.name);
                        needed.push(dependency);
                        next.push(dependency);
                    }
                }
            }
            let needed: String = needed
                .iter()
                .map(|module| format!(" {}", module.path.display()))
                .collect();
            format!("{}:{needed}\n", module.path.display())
        })
        .collect()
}

/// The text of `modules.alias`.
pub(crate) fn modules_alias(modules: &[Module]) -> String {
    modules
        .iter()
        .flat_map(|module| {
            module
                .aliases
                .iter()
                .map(move |alias| format!("alias {alias} {}\n", module.name))
        })
        .collect()
}

/// The compression of a module's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Compression {
    None,
    Xz,
}

/// A module's name (with underscores, as in the kernel) from its file name.
fn module_name(path: &Path) -> Option<(String, Compression)> {
    let file = path.file_name()?.to_str()?;
    let (stem, compression) = match file.strip_suffix(".ko.xz") {
        Some(stem) => (stem, Compression::Xz),
        None => (file.strip_suffix(".ko")?, Compression::None),
    };
    Some((stem.replace('-', "_"), compression))
}

/// Every regular file below `directory`.
pub(crate) fn files_below(directory: PathBuf) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut directories = vec![directory];
    while let Some(directory) = directories.pop() {
        let entries =
            fs::read_dir(&directory).with_context(|| format!("listing {}", directory.display()))?;
        for entry in entries {
            let entry = entry.with_context(|| format!("listing {}", directory.display()))?;
            let kind = entry.file_type().context("asking for a file's type")?;
            if kind.is_dir() {
                directories.push(entry.path());
            } else if kind.is_file() {
                files.push(entry.path());
            }
        }
    }
    Ok(files)
}

/// Every module file below a directory, by module name.
fn index(directory: &Path) -> Result<BTreeMap<String, PathBuf>> {
    let files = files_below(directory.join("kernel"))?.into_iter();
    Ok(files
        .filter_map(|path| Some((module_name(&path)?.0, path)))
        .collect())
}

fn load(directory: &Path, file: &Path) -> Result<Module> {
    let context = || format!("module {}", file.display());
    let Some((name, compression)) = module_name(file) else {
        bail!("{} is not a module", file.display());
    };
    let raw = fs::read(file).with_context(context)?;
    let bytes = match compression {
        Compression::None => raw,
        Compression::Xz => {
            let mut bytes = Vec::new();
            lzma_rs::xz_decompress(&mut BufReader::new(Cursor::new(raw)), &mut bytes)
                .with_context(context)?;
            bytes
        }
    };
    let mut info = elf::module_info(&bytes).with_context(context)?;
    let depends = info
        .remove("depends")
        .unwrap_or_default()
        .iter()
        .flat_map(|names| names.split(','))
        .filter(|name| !name.is_empty())
        .map(|name| name.replace('-', "_"))
        .collect();
    let relative = file.strip_prefix(directory).unwrap_or(file);
    Ok(Module {
        name,
        path: match compression {
            Compression::None => relative.to_owned(),
            Compression::Xz => relative.with_extension(""),
        },
        bytes,
        depends,
        aliases: info.remove("alias").unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn module(name: &str, depends: &[&str]) -> Module {
        Module {
            name: name.to_owned(),
            path: format!("kernel/{name}.ko").into(),
            bytes: Vec::new(),
            depends: depends.iter().map(|&name| name.to_owned()).collect(),
            aliases: vec![format!("fs-{name}")],
        }
    }

    fn ordered() -> Vec<Module> {
        order(&["top", "side"], |name| {
            Ok(match name {
                "top" => Some(module("top", &["middle", "base", "builtin"])),
                "middle" => Some(module("middle", &["base"])),
                "base" => Some(module("base", &[])),
                "side" => Some(module("side", &["base"])),
                "builtin" => None,
                _ => bail!("no module {name}"),
            })
        })
        .unwrap()
    }

    #[test]
    fn modules_come_after_what_they_need() {
        let modules = ordered();
        let at = |name: &str| modules.iter().position(|m| m.name == name).unwrap();
        assert_eq!(modules.len(), 4);
        assert!(at("base") < at("middle") && at("middle") < at("top"));
        assert!(at("base") < at("side"));
    }

    #[test]
    fn modules_dep_lists_the_deepest_last() {
        let text = modules_dep(&ordered());
        assert!(
            text.contains("kernel/top.ko: kernel/middle.ko kernel/base.ko\n"),
            "{text}"
        );
        assert!(text.contains("kernel/base.ko:\n"), "{text}");
        assert!(modules_alias(&ordered()).contains("alias fs-side side\n"));
    }

    #[test]
    fn names_are_as_the_kernel_says_them() {
        let name = |path: &str| module_name(Path::new(path));
        assert_eq!(
            name("a/vfio-pci.ko.xz"),
            Some(("vfio_pci".into(), Compression::Xz))
        );
        assert_eq!(name("ext4.ko"), Some(("ext4".into(), Compression::None)));
        assert_eq!(name("modules.dep"), None);
    }
}
