use super::*;

const MIB: u64 = 1 << 20;

fn id(text: &str) -> DeviceId {
    text.parse().unwrap()
}

fn nvme(options: &str) -> Table {
    toml::from_str(&format!(
        "borrowers = [\"user=root\"]\n[model.nvme]\n{options}"
    ))
    .unwrap()
}

fn volumes() -> (tempfile::TempDir, Volumes) {
    let directory = tempfile::tempdir().unwrap();
    let volumes = Volumes::new(directory.path().join("volumes")).unwrap();
    volumes.make_directory().unwrap();
    (directory, volumes)
}

fn ids(volumes: &Volumes) -> Vec<String> {
    let list = volumes.list().unwrap().0.into_iter();
    list.map(|volume| volume.id.to_string()).collect()
}

fn hidden(volumes: &Volumes) -> usize {
    let names = fs::read_dir(&volumes.directory).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name());
    names
        .filter(|name| name.to_string_lossy().starts_with('.') && name != LOCK)
        .count()
}

#[test]
fn volumes_are_created_grow_and_are_deleted() {
    let (_directory, volumes) = volumes();
    let locked = volumes.lock().unwrap();
    let limited = nvme("limits = { iops = 500 }");
    let volume = locked.create(&id("b"), 64 * MIB, limited).unwrap();
    assert_eq!((volume.size, volume.used), (64 * MIB, 0));
    let Model::Nvme(config) = &volume.model else {
        panic!("{volume:?}");
    };
    assert_eq!(config.limits.iops, Some(500));
    assert_eq!(config.image, volumes.directory.join("b/image"));
    assert_eq!(volume.borrowers.len(), 1);
    locked.create(&id("a"), 4096, nvme("")).unwrap();
    assert_eq!(ids(&volumes), ["a", "b"]);
    // The lender reads the same device from the table.
    let again: DeviceConfig = toml::from_str(&volume.table.to_string()).unwrap();
    let device = DeviceConfig {
        id: volume.id,
        source: volume.model.into(),
        borrowers: volume.borrowers,
    };
    assert_eq!(format!("{again:?}"), format!("{device:?}"));

    locked.grow(&id("b"), 65 * MIB).unwrap();
    assert_eq!(volumes.list().unwrap().0[1].size, 65 * MIB);
    locked.delete(&id("a")).unwrap();
    assert_eq!(ids(&volumes), ["b"]);
    assert_eq!(hidden(&volumes), 0);
}

#[test]
fn invalid_volumes_are_refused_and_nothing_changes() {
    let (_directory, volumes) = volumes();
    let locked = volumes.lock().unwrap();
    let refused = |size, table| {
        let error = locked.create(&id("x"), size, table).unwrap_err();
        assert!(
            ids(&volumes).is_empty() && hidden(&volumes) == 0,
            "{error:?}"
        );
        farside_error_chain::Chain(&error).to_string()
    };
    assert!(refused(0, nvme("")).contains("multiple of 4 KiB"));
    assert!(refused(1000, nvme("")).contains("1000 bytes"));
    let large = refused(1 << 60, nvme(""));
    assert!(large.contains("in all: choose a smaller size"), "{large}");
    let low = refused(MIB, nvme("limits = { iops = 1 }"));
    assert!(low.contains("at least 100"), "{low}");
    let unknown = refused(MIB, nvme("imge = 5"));
    assert!(unknown.contains("imge"), "{unknown}");
    let function = toml::from_str("vfio = { function = \"0000:03:00.0\" }").unwrap();
    assert!(refused(MIB, function).contains("is a `model`"));
    assert!(refused(MIB, Table::new()).contains("one source"));

    locked.create(&id("x"), MIB, nvme("")).unwrap();
    // As a killed command has left it.
    locked.create(&id("x"), MIB, nvme("")).unwrap();
    for (size, options) in [(2 * MIB, ""), (MIB, "cmb = 2097152")] {
        let twice = locked.create(&id("x"), size, nvme(options)).unwrap_err();
        assert!(matches!(twice, VolumeError::Exists { .. }), "{twice}");
    }
    fs::write(volumes.path(&id("x")).join(IMAGE), [1; MIB as usize]).unwrap();
    let written = locked.create(&id("x"), MIB, nvme("")).unwrap_err();
    assert!(matches!(written, VolumeError::Exists { .. }), "{written}");
    let shrinks = locked.grow(&id("x"), MIB / 2).unwrap_err().to_string();
    assert!(
        shrinks.contains("has 1 MiB") && shrinks.contains("shrink to 512 KiB"),
        "{shrinks}"
    );
    let large = locked.grow(&id("x"), 1 << 60).unwrap_err();
    assert!(matches!(large, VolumeError::TooLarge { .. }), "{large}");
    assert_eq!(volumes.list().unwrap().0[0].size, MIB);
    let missing = [
        locked.grow(&id("y"), MIB).unwrap_err(),
        locked.delete(&id("y")).unwrap_err(),
    ];
    for error in missing {
        assert!(matches!(error, VolumeError::Missing { .. }), "{error}");
    }
}

#[test]
fn a_volume_that_a_process_has_locked_is_not_deleted() {
    let (_directory, volumes) = volumes();
    let locked = volumes.lock().unwrap();
    locked.create(&id("x"), MIB, nvme("")).unwrap();
    let image = File::open(volumes.directory.join("x/image")).unwrap();
    image.lock_shared().unwrap();
    assert!(locked.is_in_use(&id("x")).unwrap());
    let error = locked.delete(&id("x")).unwrap_err();
    assert!(matches!(error, VolumeError::InUse { .. }), "{error}");
    assert_eq!(ids(&volumes), ["x"]);
    drop(image);
    locked.delete(&id("x")).unwrap();
}

/// Of a directory that has other entries, or whose user puts links and FIFOs into it.
#[test]
fn what_is_no_volumes_is_left_alone() {
    let (directory, volumes) = volumes();
    let locked = volumes.lock().unwrap();
    let precious = directory.path().join("precious");
    fs::create_dir(&precious).unwrap();
    for name in [TABLE, IMAGE, "other"] {
        fs::write(precious.join(name), "model.nvme = {}").unwrap();
    }
    let at = |name: &str| volumes.directory.join(name);
    for name in ["plain", "plain/deep", ".x y.deleted", ".mozilla new"] {
        fs::create_dir(at(name)).unwrap();
    }
    fs::write(at("file"), "").unwrap();
    for link in ["link", ".link.new"] {
        std::os::unix::fs::symlink(&precious, at(link)).unwrap();
    }
    fs::create_dir(at(".full.new")).unwrap();
    fs::write(at(".full.new/notes"), "").unwrap();
    for name in ["plain", "file", "link"] {
        let deleted = locked.delete(&id(name)).unwrap_err();
        assert!(matches!(deleted, VolumeError::Missing { .. }), "{deleted}");
        let created = locked.create(&id(name), MIB, nvme("")).unwrap_err();
        assert!(
            matches!(created, VolumeError::NotAVolume { .. }),
            "{created}"
        );
    }
    locked.create(&id("x"), MIB, nvme("")).unwrap();
    fs::write(at("x/notes"), "").unwrap();
    let notes = locked.delete(&id("x")).unwrap_err();
    assert!(
        notes
            .to_string()
            .contains("x/notes does not belong to a volume"),
        "{notes}"
    );
    fs::remove_file(at("x/notes")).unwrap();
    // A medium that is elsewhere, or none.
    let image = at("x/image");
    fs::remove_file(&image).unwrap();
    std::os::unix::fs::symlink(precious.join(IMAGE), &image).unwrap();
    locked.grow(&id("x"), 2 * MIB).unwrap_err();
    fs::remove_file(&image).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, &image, 0o600.into()).unwrap();
    locked.grow(&id("x"), 2 * MIB).unwrap_err();
    let (others, errors) = volumes.list().unwrap();
    assert_eq!((others.len(), errors.len()), (0, 1), "{errors:?}");
    assert!(
        errors[0]
            .1
            .to_string()
            .contains("x/image does not belong to a volume"),
        "{errors:?}"
    );
    locked.delete(&id("x")).unwrap();
    drop(locked);
    volumes.lock().unwrap();
    assert_eq!(
        (hidden(&volumes), fs::read_dir(&precious).unwrap().count()),
        (4, 3)
    );
    assert!(fs::read(precious.join(IMAGE)).unwrap().len() < 100);
}

#[test]
fn a_process_waits_for_another_one_that_changes_volumes() {
    let (_directory, volumes) = volumes();
    let locked = volumes.lock().unwrap();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| volumes.lock().unwrap().create(&id("x"), MIB, nvme("")));
        locked.create(&id("y"), MIB, nvme("")).unwrap();
        drop(locked);
        waits.join().unwrap().unwrap();
    });
    assert_eq!(ids(&volumes), ["x", "y"]);
}

#[test]
fn a_directory_that_is_not_the_lenders_is_refused() {
    let relative = Volumes::new("volumes".into()).unwrap_err();
    assert!(relative.to_string().contains("absolute path"), "{relative}");
    let (_directory, volumes) = volumes();
    let of_nobody = std::os::unix::fs::chown(&volumes.directory, Some(65534), None);
    match of_nobody {
        Ok(()) => {
            let foreign = volumes.make_directory().unwrap_err();
            let text = farside_error_chain::Chain(&foreign).to_string();
            assert!(text.contains("nobody"), "{text}");
        }
        // Only root may.
        Err(_) => assert!(Volumes::new("/".into()).unwrap().make_directory().is_err()),
    }
}

/// A process that is killed before a volume has its name, or after it has lost it.
#[test]
fn a_killed_process_leaves_a_volume_or_none() {
    let (_directory, volumes) = volumes();
    let locked = volumes.lock().unwrap();
    locked.create(&id("x"), MIB, nvme("")).unwrap();
    locked.create(&id("y"), MIB, nvme("")).unwrap();
    drop(locked);
    for end in [NEW, DELETED] {
        fs::rename(volumes.path(&id("y")), volumes.beside(&id("y"), end)).unwrap();
        assert_eq!((ids(&volumes), hidden(&volumes)), (vec!["x".into()], 1));
        let locked = volumes.lock().unwrap();
        assert_eq!(hidden(&volumes), 0);
        locked.create(&id("y"), MIB, nvme("")).unwrap();
    }
    // Other hidden entries are somebody else's.
    fs::create_dir(volumes.directory.join(".snapshots")).unwrap();
    volumes.lock().unwrap();
    assert_eq!((ids(&volumes).len(), hidden(&volumes)), (2, 1));
}

#[test]
fn a_table_that_is_edited_wrongly_is_named() {
    let (_directory, volumes) = volumes();
    let locked = volumes.lock().unwrap();
    locked.create(&id("x"), MIB, nvme("")).unwrap();
    let table = volumes.path(&id("x")).join(TABLE);
    for wrong in [
        "",
        "model = 5",
        "model.nvme = 5",
        "model.dma-test = {}",
        "[",
        "model.nvme = { cmb = true }",
    ] {
        fs::write(&table, wrong).unwrap();
        let (others, errors) = volumes.list().unwrap();
        let text = errors[0].1.to_string();
        assert!(
            others.is_empty() && text.contains("x/device.toml is invalid"),
            "{wrong:?}: {text}"
        );
    }
    // It can still be deleted.
    locked.delete(&id("x")).unwrap();
}
