use std::{
    fs::{self, Permissions},
    os::unix::fs::{PermissionsExt, chown, lchown, symlink},
};

use rustix::fs::mkfifoat;

use super::*;

const NOBODY: u32 = 65534;

#[test]
fn a_directory_that_every_user_may_write_to_is_refused() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("run");
    Directory::create(&directory, 0o700, Owner::Ours).unwrap();
    for (mode, good) in [
        (0o777, false),
        (0o702, false),
        (0o1777, true),
        (0o775, true),
    ] {
        fs::set_permissions(&directory, Permissions::from_mode(mode)).unwrap();
        let made = Directory::create(&directory, 0o700, Owner::Ours);
        assert_eq!(made.is_ok(), good, "{mode:o}: {made:?}");
        if let Err(error) = made {
            let error = error.to_string();
            assert!(error.contains("chmod o-w"), "{error}");
        }
    }
}

#[test]
fn a_parent_that_every_user_may_write_to_is_refused() {
    let parent = tempfile::tempdir().unwrap();
    let open = parent.path().join("open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, Permissions::from_mode(0o777)).unwrap();
    let link = parent.path().join("link");
    symlink(&open, &link).unwrap();
    for runtime in [&open, &link] {
        let path = runtime.join("vm/web1");
        let error = Directory::below(runtime, &path, Some(0o700), Owner::Ours);
        let error = error.unwrap_err().to_string();
        let named = format!("chmod o-w {}", open.display());
        assert!(error.contains(&named), "{error}");
        assert!(!open.join("vm").exists());
    }
}

#[test]
fn another_users_directories_and_links_are_refused() {
    let path = Path::new("/tmp/farside-1000");
    for kind in [FileType::Directory, FileType::Symlink] {
        let mode = kind.as_raw_mode() | 0o755;
        let check = |owner, user| check_for(user, path, owner, mode);
        check(1000, Some(1000)).unwrap();
        check(0, Some(1000)).unwrap();
        check(1000, None).unwrap();
        check(1000, Some(0)).unwrap_err();
        let error = check(NOBODY, Some(1000)).unwrap_err().to_string();
        assert!(error.contains("(uid 65534), not to uid 1000"), "{error}");
    }
}

#[test]
fn a_link_in_the_path_is_not_followed() {
    let parent = tempfile::tempdir().unwrap();
    let (base, precious) = (parent.path().join("run"), parent.path().join("etc"));
    fs::create_dir(&precious).unwrap();
    fs::create_dir_all(base.join("vm")).unwrap();
    for link in ["vm/web1", "link"] {
        symlink(&precious, base.join(link)).unwrap();
        for path in [base.join(link), base.join(link).join("deep")] {
            for (create, owner) in [
                (None, Owner::Ours),
                (None, Owner::AnyForRoot),
                (Some(0o700), Owner::Ours),
            ] {
                let error = Directory::below(&base, &path, create, owner).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::PermissionDenied);
                let error = error.to_string();
                assert!(error.contains(&format!("{link} is a symbolic")), "{error}");
            }
        }
    }
    assert_eq!(fs::read_dir(&precious).unwrap().count(), 0);
    mkfifoat(CWD, base.join("fifo"), 0o600.into()).unwrap();
    let error = Directory::below(&base, &base.join("fifo"), Some(0o700), Owner::Any);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("fifo is not a directory"), "{error}");
    // The operator may choose a link.
    let chosen = base.join("link");
    Directory::below(&chosen, &chosen.join("vm"), Some(0o700), Owner::Ours).unwrap();
    assert!(precious.join("vm").is_dir());
}

#[test]
fn root_listens_in_no_directory_of_another_user() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let parent = tempfile::tempdir().unwrap();
    let (base, vm) = (parent.path().join("run"), parent.path().join("run/vm"));
    fs::create_dir_all(&vm).unwrap();
    chown(&base, Some(NOBODY), None).unwrap();
    chown(&vm, Some(NOBODY), None).unwrap();
    let open = |owner| Directory::below(&base, &vm, None, owner);
    let error = open(Owner::Ours).unwrap_err().to_string();
    let said = format!("{} belongs to user ", vm.display());
    assert!(error.starts_with(&said), "{error}");
    let said = format!("(uid {NOBODY}), not to uid 0: remove it, or run this command as that");
    assert!(
        error.contains(&said) && error.contains("runuser -u "),
        "{error}"
    );
    open(Owner::AnyForRoot).unwrap();
    // That user makes a link to a directory of root's of its own directory.
    let precious = parent.path().join("etc");
    fs::create_dir(&precious).unwrap();
    fs::remove_dir(&vm).unwrap();
    symlink(&precious, &vm).unwrap();
    lchown(&vm, Some(NOBODY), None).unwrap();
    for owner in [Owner::Ours, Owner::AnyForRoot] {
        Directory::below(&base, &vm.join("web1"), Some(0o700), owner).unwrap_err();
    }
    assert_eq!(fs::read_dir(&precious).unwrap().count(), 0);
}
