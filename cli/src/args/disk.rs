//! A disk on the command line of `farside lend`.

use std::path::PathBuf;

use farside_daemon::DeviceId;
use farside_fabric::parse_size;
use farside_lender::config::Limits;

use super::parse_id;

/// A disk to lend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Disk {
    pub(crate) id: DeviceId,
    pub(crate) image: PathBuf,
    pub(crate) read_only: bool,
    pub(crate) limits: Limits,
    /// Bytes of the controller memory buffer, of an NVMe device.
    pub(crate) cmb: Option<u64>,
    /// The guest writes doorbells without a trap, to an NVMe device.
    pub(crate) mapped_doorbells: bool,
    /// The file of reservations, of an NVMe device that shares its namespace.
    pub(crate) shared: Option<PathBuf>,
}

/// Options are read from the end, as a path may contain commas.
pub(super) fn parse_disk(text: &str) -> Result<Disk, String> {
    let mut rest = text;
    let (mut read_only, mut mapped_doorbells) = (false, false);
    let (mut limits, mut cmb, mut shared) = (Limits::default(), None, None);
    while let Some((before, option)) = rest.rsplit_once(',') {
        match option.split_once('=') {
            None if option == "read-only" => read_only = true,
            None if option == "mapped-doorbells" => mapped_doorbells = true,
            Some(("iops", number)) => {
                let wrong = |_| {
                    format!("{option}: give a number, or name a path that ends so in lender.toml")
                };
                limits.iops = Some(number.parse().map_err(wrong)?);
            }
            Some(("cmb", size)) => cmb = Some(parse_size(size)?),
            Some(("shared", path)) if !path.is_empty() => shared = Some(path.into()),
            Some(("bandwidth", size)) => limits.bandwidth = Some(parse_size(size)?),
            _ => break,
        }
        rest = before;
    }
    match rest.split_once('=') {
        Some((id, image)) if !id.is_empty() && !image.is_empty() => Ok(Disk {
            id: parse_id(id)?,
            image: image.into(),
            read_only,
            limits,
            cmb,
            mapped_doorbells,
            shared,
        }),
        _ => Err("give a device id and an image, as in disk0=/var/lib/farside/disk0.img".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_an_id_and_an_image() {
        let disk = |image: &str, read_only| Disk {
            id: "a".parse().unwrap(),
            image: image.into(),
            read_only,
            limits: Limits::default(),
            cmb: None,
            mapped_doorbells: false,
            shared: None,
        };
        assert_eq!(parse_disk("a=b=c"), Ok(disk("b=c", false)));
        assert_eq!(parse_disk("a=b,c,read-only"), Ok(disk("b,c", true)));
        let limited =
            parse_disk("a=b,c=1,bandwidth=20M,read-only,cmb=2M,shared=x,mapped-doorbells,iops=7");
        let limited = limited.unwrap();
        assert!(limited.mapped_doorbells);
        assert_eq!((limited.image, limited.read_only), ("b,c=1".into(), true));
        assert_eq!(limited.limits.iops, Some(7));
        assert_eq!(limited.limits.bandwidth, Some(20 << 20));
        assert_eq!(limited.cmb, Some(2 << 20));
        assert_eq!(limited.shared, Some("x".into()));
        for refused in ["a", "=b", "a=,read-only", "a=b,iops=x", "a=b,bandwidth=20X"] {
            assert!(parse_disk(refused).is_err(), "{refused}");
        }
    }
}
