//! Commands of root where a user with fewer rights has replaced a directory by a link.

use std::{
    fs,
    os::unix::fs::{lchown, symlink},
    path::Path,
    process::Command,
};

const NOBODY: u32 = 65534;

/// Runs `farside`, which fails, and returns what it prints as errors.
fn refused(directory: &Path, args: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_farside"))
        .args(args)
        .env("FARSIDE_CONFIG_DIR", directory.join("etc"))
        .env("FARSIDE_STATE_DIR", directory.join("state"))
        .env("FARSIDE_RUNTIME_DIR", directory.join("run"))
        .output()
        .expect("the binary starts");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{said}");
    said
}

#[test]
fn a_command_does_not_create_files_behind_a_planted_link() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    for name in ["etc/vm", "state", "run", "precious"] {
        fs::create_dir_all(at(name)).expect("a directory");
    }
    fs::write(at("etc/vm/web1.toml"), "memory = \"1 GiB\"\n").expect("written");
    let link = at("state/vm");
    symlink(at("precious"), &link).expect("a link");
    // Only root may; a link of this user is refused, too.
    let _ = lchown(&link, Some(NOBODY), None);
    let said = refused(directory.path(), &["start", "web1"]);
    assert!(said.contains("state/vm is a symbolic link"), "{said}");
    let created = fs::read_dir(at("precious")).expect("a directory").count();
    assert_eq!(created, 0, "{said}");
}

#[test]
fn a_volume_is_not_made_behind_a_planted_link() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    for name in ["etc", "state", "srv", "run", "precious"] {
        fs::create_dir(at(name)).expect("a directory");
    }
    // Below the state directory for any user, and elsewhere for root.
    let is_root = lchown(at("srv"), Some(NOBODY), None).is_ok();
    let planted = [
        (true, "state/volumes", "state/volumes is a symbolic link"),
        (is_root, "srv/volumes", "contains `..` or a symbolic link"),
        (is_root, "srv/real", "users other than root could replace"),
    ];
    fs::create_dir(at("srv/real")).expect("a directory");
    for (is_refused, volumes, why) in planted {
        if !is_refused {
            continue;
        }
        if !at(volumes).exists() {
            symlink(at("precious"), at(volumes)).expect("a link");
            let _ = lchown(at(volumes), Some(NOBODY), None);
        }
        let volumes = at(volumes).display().to_string();
        let create = ["volume", "create", "disk0", "1M", "--directory", &volumes];
        let said = refused(directory.path(), &create);
        assert!(said.contains(why), "{said}");
        for name in ["precious", "srv/real"] {
            let created = fs::read_dir(at(name)).expect("a directory").count();
            assert_eq!(created, 0, "{said}");
        }
    }
}
