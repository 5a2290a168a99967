//! `farside status` without a lender or backend, and its log.

use std::{
    fs::{self, File},
    path::Path,
    process::Command,
};

/// The log of `farside status` with these environment variables.
fn status(dir: &Path, args: &[&str], variables: &[(&str, &str)]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_farside"))
        .arg("status")
        .args(args)
        .env("FARSIDE_RUNTIME_DIR", dir)
        .env_remove("FARSIDE_LOG")
        .env_remove("RUST_LOG_STYLE")
        .envs(variables.iter().copied())
        .output()
        .expect("the binary starts");
    assert!(!output.status.success(), "{output:?}");
    String::from_utf8(output.stderr).expect("UTF-8")
}

#[test]
fn an_entry_that_is_no_vm_is_skipped_unless_it_is_named() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir_all(dir.path().join("vm/.x")).unwrap();
    File::create(dir.path().join("vm/file")).unwrap();
    let log = status(dir.path(), &[], &[]);
    assert!(log.contains("neither a backend nor a lender"), "{log}");
    let log = status(dir.path(), &["--vm", ".x"], &[]);
    assert!(log.contains("VM name \".x\""), "{log}");
}

#[test]
fn the_log_style_is_the_environment_s() {
    let dir = tempfile::tempdir().unwrap();
    let invalid = ("FARSIDE_LOG", "banana");
    let style = |style| status(dir.path(), &[], &[invalid, ("RUST_LOG_STYLE", style)]);
    assert!(style("always").contains('\u{1b}'));
    assert!(!style("never").contains('\u{1b}'));
}
