use std::os::unix::fs::PermissionsExt;

use farside_devices::{nvme::Nvme, virtio::VirtioBlk};

use super::*;

#[test]
fn the_hint_for_a_write_protected_image_is_configuration_that_works() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("disk \"0\".img");
    std::fs::write(&image, [0; 4096]).unwrap();
    std::fs::set_permissions(&image, PermissionsExt::from_mode(0o444)).unwrap();
    fn text(error: impl std::fmt::Display) -> String {
        error.to_string()
    }
    let open = |model: &Model| match model {
        Model::Nvme(config) => Nvme::open("disk0", config).map(drop).map_err(text),
        Model::VirtioBlk(config) => VirtioBlk::open("disk0", config).map(drop).map_err(text),
        Model::VirtioNet(_) | Model::DmaTest(_) => unreachable!(),
    };
    let models = [
        Model::nvme(image.clone(), false),
        Model::virtio_blk(image, false),
    ];
    for model in models {
        let error = open(&model).unwrap_err();
        let hint = error.split('`').nth(1).unwrap();
        let text = format!("[[device]]\nid = 'disk0'\n{hint}");
        let config: Config = toml::from_str(&text).unwrap();
        match &config.device[0].source {
            Source::Model(model) => open(model).unwrap(),
            Source::Vfio(_) | Source::VfioUser(_) => unreachable!(),
        }
    }
}

#[test]
fn a_lender_has_its_hosts_name_where_that_is_one() {
    let long = format!("rack1.{}", "x".repeat(50));
    for (host, name) in [
        ("rack1", "rack1"),
        ("(none)", "lender"),
        ("", "lender"),
        (&long, "rack1"),
    ] {
        assert_eq!(lender_name(host), name, "{host}");
    }
}

#[test]
fn a_name_that_is_no_file_name_is_refused() {
    for (name, good) in [
        ("rack1-a", true),
        ("../rack1", false),
        ("a/b", false),
        ("", false),
    ] {
        let text = format!("name = {name:?}\n[[device]]\nid = 'a'\nmodel.dma-test = {{}}");
        let parsed = toml::from_str::<Config>(&text);
        assert_eq!(parsed.is_ok(), good, "{name:?}: {parsed:?}");
    }
}

fn error(device: &str) -> String {
    let config = toml::from_str::<Config>(&format!("[[device]]\nid = \"a\"\n{device}"));
    config.unwrap_err().to_string()
}

#[test]
fn errors_name_the_key() {
    let two = error("model.nvme = { image = \"/a\" }\nmodel.dma-test = {}");
    assert!(two.contains("one model: `nvme`"), "{two}");
    let unknown = error("model.nvme = { image = \"/a\", read-onyl = true }");
    assert!(unknown.contains("`read-onyl`"), "{unknown}");
    let unknown = error("model.nvm = { image = \"/a\" }");
    assert!(
        unknown.contains("`nvm`, expected one of `nvme`, `virtio-blk`, `virtio-net`, `dma-test`"),
        "{unknown}"
    );
}

#[test]
fn a_rom_is_the_functions_own_a_file_or_none() {
    let rom = |more: &str| {
        let table = format!("function = \"0000:03:00.0\"\n{more}");
        toml::from_str::<VfioConfig>(&table).map(|it| it.rom)
    };
    assert_eq!(rom(""), Ok(RomConfig::Own));
    assert_eq!(rom("rom = true"), Ok(RomConfig::Own));
    assert_eq!(rom("rom = false"), Ok(RomConfig::Hidden));
    assert_eq!(
        rom("rom = \"/a.rom\""),
        Ok(RomConfig::File("/a.rom".into()))
    );
    let error = rom("rom = 5").unwrap_err().to_string();
    assert!(error.contains("true, false or a path"), "{error}");
}

#[test]
fn devices_are_kept_for_ten_minutes_or_as_configured() {
    for (text, seconds) in [
        ("", 600),
        ("keep-at-most = 0", 0),
        ("keep-at-most = 90", 90),
    ] {
        let config: Config = toml::from_str(text).unwrap();
        assert_eq!(config.keep_at_most, seconds, "{text}");
    }
    for bad in [
        "keep-at-most = -1",
        "keep-at-most = \"5 min\"",
        "keep-for = 5",
    ] {
        let error = toml::from_str::<Config>(bad).unwrap_err().to_string();
        assert!(error.contains("keep-"), "{error}");
    }
}

#[test]
fn a_second_device_of_one_id_gets_its_own_hint() {
    let twice = "[[device]]\nid = \"a\"\nmodel.dma-test = {}\n".repeat(2);
    let config: Config = toml::from_str(&twice).unwrap();
    assert_eq!(
        config.check().unwrap_err().to_string(),
        "device id \"a\" is used twice: give each device its own"
    );
}

#[test]
fn sizes_have_units_or_are_bytes() {
    for size in ["\"32 GiB\"", "\"32G\"", "34359738368"] {
        let config: Config = toml::from_str(&format!("[fabric]\nbar-size = {size}\n")).unwrap();
        assert_eq!(config.fabric.bar_size, 32 << 30, "{size}");
    }
    let error = toml::from_str::<Config>("[fabric]\nalignment = \"4X\"").unwrap_err();
    assert!(error.to_string().contains("4G"), "{error}");
}
