//! The file, of two controllers.

use super::{
    super::{
        notifications::Notification,
        table::{Caller, Group, Host, Registration, Release},
    },
    *,
};

fn prepare(path: &Path, name: &str, boot: u8) -> Result<ReservationFile, FileError> {
    let file = ReservationFile::open(path)?;
    ReservationFile::prepare(&file, name, [boot; 16], "disk.img")?;
    ReservationFile::map(file, name)
}

fn open(path: &Path, name: &str) -> ReservationFile {
    prepare(path, name, 7).unwrap()
}

fn caller(controller: u16) -> Caller {
    Caller {
        host: Host::Named(controller.into(), true),
        controller,
    }
}

fn register(table: &mut Table) -> Result<(), crate::nvme::status::Status> {
    table.register(caller(0), Registration::Add { new: 1 })
}

fn count(file: &ReservationFile) -> u8 {
    file.read().unwrap().0.report(true).unwrap()[5]
}

#[test]
fn controllers_see_each_others_changes_and_keep_their_numbers() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("shared");
    let (one, two) = (open(&path, "one"), open(&path, "two"));
    assert_eq!((one.controller(), two.controller()), (0, 1));
    assert_eq!(open(&path, "one").controller(), 0);
    assert_eq!(one.controllers(), [0, 1]);
    assert_eq!(one.uuid(), two.uuid());
    assert_ne!(one.uuid(), [0; 16]);
    let before = two.version();
    let version = one.change(register).unwrap().unwrap();
    assert_eq!((version, two.version()), (before + 1, before + 1));
    // A change to nothing is none.
    let none = |_: &mut Table| Ok::<(), ()>(());
    assert_eq!(two.change(none).unwrap(), Ok(version));
    assert_eq!(two.read().unwrap(), one.read().unwrap());
    assert_eq!(count(&two), 1);
    // In flight, and checked when it was not yet registered.
    assert!(one.others_have_checked(version));
    two.set_busy(true);
    assert!(!one.others_have_checked(version));
    two.set_checked(version);
    assert!(one.others_have_checked(version));
    // A lender that starts again changes nothing of that; one whose worker has ended does.
    two.set_checked(0);
    open(&path, "two");
    assert!(!one.others_have_checked(version));
    ReservationFile::leave(&two.file, "two", false).unwrap();
    assert!(one.others_have_checked(version));
}

#[test]
fn what_belongs_to_no_named_host_goes_with_the_lease() {
    let directory = tempfile::tempdir().unwrap();
    let one = open(&directory.path().join("shared"), "one");
    let unnamed = Caller {
        host: Host::OfController {
            controller: 0,
            session: 0,
        },
        controller: 0,
    };
    let add = |table: &mut Table| table.register(unnamed, Registration::Add { new: 1 });
    one.change(add).unwrap().unwrap();
    ReservationFile::leave(&one.file, "one", false).unwrap();
    assert_eq!(count(&one), 1);
    ReservationFile::leave(&one.file, "one", true).unwrap();
    assert_eq!(count(&one), 0);
    let error = ReservationFile::leave(&one.file, "two", true).unwrap_err();
    assert!(matches!(error, FileError::Unknown));
}

#[test]
fn what_does_not_persist_goes_with_a_boot_of_the_host() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("shared");
    let one = open(&path, "one");
    one.change(register).unwrap().unwrap();
    assert_eq!(count(&open(&path, "one")), 1);
    let two = open(&path, "two");
    two.set_busy(true);
    assert!(!one.others_have_checked(one.version()));
    assert_eq!(count(&prepare(&path, "one", 8).unwrap()), 0);
    assert!(one.others_have_checked(one.version()));
    let persist = |table: &mut Table| {
        table.set_persists(true);
        register(table)
    };
    one.change(persist).unwrap().unwrap();
    assert_eq!(count(&prepare(&path, "one", 9).unwrap()), 1);
    assert!(one.read().unwrap().0.allows(caller(0).host, Group::Write));
}

#[test]
fn other_contents_and_images_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("shared");
    for other in ["notes".into(), "x".repeat(SIZE), "x".repeat(2 * SIZE)] {
        std::fs::write(&path, other).unwrap();
        assert!(matches!(prepare(&path, "one", 7), Err(FileError::Foreign)));
    }
    assert!(ReservationFile::open(directory.path()).is_err());
    std::fs::remove_file(&path).unwrap();
    let file = open(&path, "one").file;
    let other = ReservationFile::prepare(&file, "two", [7; 16], "other.img");
    assert!(matches!(other, Err(FileError::OtherImage)));
    // A table that is none.
    file.write_all_at(&[0xff; 300], copy(0)).unwrap();
    assert!(matches!(open(&path, "one").read(), Err(FileError::Invalid)));
    // Shortened by somebody.
    file.set_len(100).unwrap();
    assert!(matches!(prepare(&path, "one", 7), Err(FileError::Foreign)));
    let left = ReservationFile::leave(&file, "one", true);
    assert!(matches!(left, Err(FileError::Foreign)));
}

#[test]
fn a_lock_that_is_not_released_is_waited_for_a_moment() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("shared");
    let one = open(&path, "one");
    let other = ReservationFile::open(&path).unwrap();
    let lock = Lock::take(&other).unwrap();
    let none = |_: &mut Table| Ok::<(), ()>(());
    assert!(matches!(one.change(none), Err(FileError::Locked)));
    // A lender that has used it before starts all the same.
    open(&path, "one");
    drop(lock);
    assert_eq!(one.change(none).unwrap(), Ok(one.version()));
}

#[test]
fn as_many_devices_as_there_are_numbers_use_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("shared");
    for n in 0..MOST {
        assert_eq!(usize::from(open(&path, &n.to_string()).controller()), n);
    }
    let error = prepare(&path, "more", 7).unwrap_err();
    assert!(error.to_string().contains("32 devices"), "{error}");
}

#[test]
fn a_table_of_a_farside_without_notifications_is_read() {
    let directory = tempfile::tempdir().unwrap();
    let one = open(&directory.path().join("shared"), "one");
    let version = one.change(register).unwrap().unwrap();
    let table = one.read().unwrap().0;
    let contents = Contents(&one.file);
    let len: [u8; 2] = contents.bytes(copy(version)).unwrap();
    // Their last number, and how many there are.
    let shorter = u16::from_le_bytes(len) - 2;
    let absent: [u8; 2] = contents
        .bytes(copy(version) + 2 + u64::from(shorter))
        .unwrap();
    assert_eq!(absent, [0; 2]);
    one.file
        .write_all_at(&[0xff; 2], copy(version) + 2 + u64::from(shorter))
        .unwrap();
    one.file
        .write_all_at(&shorter.to_le_bytes(), copy(version))
        .unwrap();
    assert_eq!(one.read().unwrap(), (table, version));
    // From then on it has them.
    let clear = |table: &mut Table| {
        table.register(caller(1), Registration::Add { new: 2 })?;
        table.release(caller(1).host, 2, Release::Clear)
    };
    one.change(clear).unwrap().unwrap();
    let batch = one.read().unwrap().0.notifications(caller(0).host, Some(0));
    assert_eq!(batch.notifications, [Notification::ReservationPreempted]);
}
