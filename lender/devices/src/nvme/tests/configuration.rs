//! Settings, and the errors of invalid ones.

use std::{fs, os::unix::fs::PermissionsExt};

use farside_pci::BarKind;

use super::world::{Driver, image};
use crate::{
    Device,
    block::{EngineChoice, ImageError},
    nvme::{Config, ConfigError, Nvme},
};

fn refusal(config: &Config) -> String {
    match Nvme::open("disk0", config) {
        Ok(_) => panic!("accepted {config:?}"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn toml_has_defaults_and_refuses_unknown_keys() {
    let config: Config = toml::from_str("image = \"a.img\"").unwrap();
    assert_eq!(config, Config::new("a.img"));
    assert_eq!((config.block_size, config.queues), (512, 64));
    let config: Config = toml::from_str(
        "image = \"a.img\"\nread-only = true\nblock-size = 4096\nserial = \"S1\"\nengine = \"io-uring\"",
    )
    .unwrap();
    assert!(config.read_only);
    assert_eq!(config.engine, EngineChoice::IoUring);
    let error = toml::from_str::<Config>("image = \"a.img\"\nsize = 5").unwrap_err();
    assert!(error.to_string().contains("unknown field `size`"));
}

#[test]
fn settings_out_of_range_are_named() {
    let (_directory, path) = image(1 << 20);
    let mut config = Config::new(&path);
    config.block_size = 1024;
    assert!(refusal(&config).contains("block-size = 1024"));
    let mut config = Config::new(&path);
    for queues in [0, 256] {
        config.queues = queues;
        assert!(refusal(&config).contains(&format!("queues = {queues}")));
    }
    let mut config = Config::new(&path);
    for serial in ["", "123456789012345678901", "ümlaut", " x", "a\nb"] {
        config.serial = Some(serial.to_owned());
        assert!(refusal(&config).contains("serial"), "{serial:?}");
    }
}

#[test]
fn images_that_cannot_be_used_are_named_with_the_way_out() {
    let (directory, path) = image(1 << 20);
    let missing = refusal(&Config::new(directory.path().join("none.img")));
    assert!(missing.contains("none.img: no such file"), "{missing}");
    assert!(refusal(&Config::new(directory.path())).contains("is a directory"));
    assert!(refusal(&Config::new("/dev/null")).contains("neither a regular file"));

    let odd = directory.path().join("odd.img");
    fs::write(&odd, [0; 700]).unwrap();
    let text = refusal(&Config::new(&odd));
    assert!(
        text.contains("700 bytes") && text.contains("512 bytes"),
        "{text}"
    );
    fs::write(&odd, []).unwrap();
    assert!(refusal(&Config::new(&odd)).contains("is empty"));

    fs::set_permissions(&path, fs::Permissions::from_mode(0o444)).unwrap();
    assert!(refusal(&Config::new(&path)).contains("read-only = true"));
    let mut config = Config::new(&path);
    config.read_only = true;
    let _first = Nvme::open("disk0", &config).unwrap();
    let _second = Nvme::open("disk1", &config).unwrap();
}

#[test]
fn an_image_has_one_user() {
    let (_directory, path) = image(1 << 20);
    let config = Config::new(&path);
    let first = Nvme::open("disk0", &config).unwrap();
    match Nvme::open("disk1", &config) {
        Err(ConfigError::Image(ImageError::InUse { .. })) => {}
        _ => panic!("opened twice"),
    }
    drop(first);
    Nvme::open("disk1", &config).unwrap();
}

#[test]
fn description_is_that_of_an_nvme_endpoint() {
    let driver = Driver::off(|_| {});
    let description = driver.nvme.description();
    let config = &description.config;
    assert_eq!(config.len(), 4096);
    assert_eq!(config[0x09..0x0c], [0x02, 0x08, 0x01]);
    let bar = description.bars[0].as_ref().unwrap();
    assert_eq!(bar.size, 16 << 10);
    assert_eq!(
        bar.kind,
        BarKind::Memory64 {
            prefetchable: false
        }
    );
    assert!(description.intx && description.msix_vectors == 65);
    assert_eq!(description.summary, "farside NVMe, 16 MiB");
    // Every capability is reachable, and MSI-X is at its place in the BAR.
    let mut at = usize::from(config[0x34]);
    let mut ids = Vec::new();
    while at != 0 {
        ids.push(config[at]);
        if config[at] == 0x11 {
            assert_eq!(config[at + 2], 64);
            assert_eq!(config[at + 4..at + 8], 0x2000u32.to_le_bytes());
            assert_eq!(config[at + 8..at + 12], 0x3000u32.to_le_bytes());
        }
        if config[at] == 0x10 {
            assert_ne!(config[at + 7] & 0x10, 0, "function-level reset");
        }
        at = config[at + 1].into();
    }
    assert_eq!(ids, [0x01, 0x10, 0x11]);
}

#[test]
fn serial_derives_from_the_id() {
    let serial = |id: &str| Config::new("x").serial_for(id);
    assert_eq!(serial("disk0"), "disk0");
    let long = serial("a-device-id-that-is-longer-than-the-field");
    assert!(
        long.len() <= 20 && long.starts_with("adeviceidth-"),
        "{long}"
    );
    assert_ne!(long, serial("a-device-id-that-is-longer-than-the-other"));
}
