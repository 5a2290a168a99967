//! Virtual functions.

use farside_host_pci::{Force, PciError};
use farside_pci::Bdf;
use rustix::io::Errno;

use crate::host::{MadeUpHost, bdf};

const PF: &str = "0000:00:05.0";
const DIR: &str = "sys/bus/pci/devices/0000:00:05.0";

fn host() -> MadeUpHost {
    let host = MadeUpHost::new();
    host.function(PF, [0x8086, 0x10c9], 0x02_0000, Some("igb"));
    host.file(&format!("{DIR}/sriov_totalvfs"), "7\n");
    host.file(&format!("{DIR}/sriov_numvfs"), "0\n");
    host.file(&format!("{DIR}/sriov_drivers_autoprobe"), "1\n");
    host
}

fn vfs(host: &MadeUpHost) -> Vec<Bdf> {
    host.pci().vfs(&bdf(PF)).unwrap()
}

#[test]
fn virtual_functions_are_made_away_from_the_hosts_drivers_and_removed() {
    let host = host();
    let created = host.pci().create_vfs(&bdf(PF), 2, Force::No).unwrap();
    assert_eq!(created.vfs(), [bdf("00:10.0"), bdf("00:10.1")]);
    assert!(created.were_created());
    assert_eq!(
        host.writes(),
        [
            format!("{DIR}/sriov_drivers_autoprobe <- 0"),
            format!("{DIR}/sriov_numvfs <- 2"),
            format!("{DIR}/sriov_drivers_autoprobe <- 1"),
        ]
    );
    let vf = host.pci().function(&created.vfs()[0]).unwrap();
    assert_eq!(vf.physfn, Some(bdf(PF)));
    let selected = host.pci().select(&format!("vfs-of:{PF}").parse().unwrap());
    assert_eq!(selected.unwrap().len(), 2);
    created.remove().unwrap();
    assert_eq!(vfs(&host), []);
}

#[test]
fn virtual_functions_are_listed_by_index_not_by_name() {
    let host = host();
    host.file(&format!("{DIR}/sriov_totalvfs"), "16\n");
    let created = host.pci().create_vfs(&bdf(PF), 12, Force::No).unwrap();
    let listed = vfs(&host);
    assert_eq!(listed[2], bdf("00:10.2"));
    assert_eq!(listed[10], bdf("00:11.2"));
    drop(created);
    assert_eq!(vfs(&host), [], "the drop removes them");
}

#[test]
fn more_than_the_device_has_is_refused_with_the_limit() {
    let host = host();
    for wanted in [0, 8, u32::MAX] {
        let error = host
            .pci()
            .create_vfs(&bdf(PF), wanted, Force::Yes)
            .unwrap_err();
        assert!(matches!(error, PciError::TooManyVfs { total: 7, .. }));
        assert!(error.to_string().contains("1 to 7"), "{error}");
    }
    assert!(host.writes().is_empty());
}

#[test]
fn a_function_without_sriov_is_refused() {
    let host = host();
    host.function("0000:00:06.0", [1, 2], 0x01_0802, Some("nvme"));
    let refused = |address: &str| {
        let result = host.pci().create_vfs(&bdf(address), 1, Force::No);
        match result {
            Err(error @ PciError::NoSriov { .. }) => error.to_string(),
            other => panic!("{other:?}"),
        }
    };
    assert!(refused("00:06.0").contains("CONFIG_PCI_IOV"));
    let created = host.pci().create_vfs(&bdf(PF), 1, Force::No).unwrap();
    assert!(refused("00:10.0").contains("itself a virtual function, of 0000:00:05.0"));
    drop(created);
    host.file(&format!("{DIR}/sriov_totalvfs"), "0\n");
    assert!(refused(PF).contains("sriov_totalvfs is 0"));
    host.file(&format!("{DIR}/sriov_totalvfs"), "7\n");
    host.remove(&format!("{DIR}/driver"));
    assert!(refused(PF).contains("no driver"));
}

#[test]
fn just_as_many_are_kept_and_not_removed() {
    let host = host();
    let by_hand = host.pci().create_vfs(&bdf(PF), 2, Force::No).unwrap();
    by_hand.leave();
    host.writes();
    let kept = host.pci().create_vfs(&bdf(PF), 2, Force::No).unwrap();
    assert_eq!(kept.vfs().len(), 2);
    assert!(!kept.were_created());
    kept.remove().unwrap();
    assert!(host.writes().is_empty());
    assert_eq!(vfs(&host).len(), 2);
}

#[test]
fn another_number_goes_through_zero_and_back() {
    let host = host();
    host.pci()
        .create_vfs(&bdf(PF), 2, Force::No)
        .unwrap()
        .leave();
    host.writes();
    let created = host.pci().create_vfs(&bdf(PF), 3, Force::No).unwrap();
    assert_eq!(created.vfs().len(), 3);
    assert_eq!(
        host.writes()[1..3],
        [
            format!("{DIR}/sriov_numvfs <- 0"),
            format!("{DIR}/sriov_numvfs <- 3"),
        ]
    );
    drop(created);
    assert_eq!(vfs(&host).len(), 2, "as many as before");
}

#[test]
fn virtual_functions_in_use_are_not_taken_away() {
    let host = host();
    host.pci()
        .create_vfs(&bdf(PF), 2, Force::No)
        .unwrap()
        .leave();
    host.writes();
    host.class_device("net", "sys/devices/pci0000:00/0000:00:10.1/net", "vf1");
    host.file("sys/class/net/vf1/flags", "0x1003\n");
    let error = host.pci().create_vfs(&bdf(PF), 3, Force::No).unwrap_err();
    assert!(matches!(error, PciError::VfsInUse { .. }), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("0000:00:10.1") && text.contains("vf1 is up"),
        "{text}"
    );
    assert!(host.writes().is_empty());
}

#[test]
fn virtual_functions_that_a_vmm_may_have_are_not_taken_away() {
    let host = host();
    host.pci()
        .create_vfs(&bdf(PF), 1, Force::No)
        .unwrap()
        .leave();
    host.link(
        "sys/bus/pci/devices/0000:00:10.0/driver",
        "sys/bus/pci/drivers/vfio-pci",
    );
    let error = host.pci().create_vfs(&bdf(PF), 3, Force::No).unwrap_err();
    assert!(
        error.to_string().contains("is bound to vfio-pci"),
        "{error}"
    );
}

#[test]
fn when_the_kernel_makes_fewer_they_are_removed_again() {
    let host = host();
    host.limit_vfs(1);
    let error = host.pci().create_vfs(&bdf(PF), 4, Force::No).unwrap_err();
    assert!(
        matches!(
            error,
            PciError::VfsMissing {
                wanted: 4,
                found: 1,
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(
        host.writes().last().unwrap(),
        &format!("{DIR}/sriov_numvfs <- 0")
    );
}

#[test]
fn when_the_kernel_refuses_the_reason_is_told_and_autoprobe_is_as_before() {
    for (errno, why) in [
        (Errno::NOENT, "cannot make virtual functions"),
        (Errno::NOMEM, "pci=realloc"),
        (Errno::IO, "sriov_numvfs"),
    ] {
        let host = host();
        host.refuse_writes(&format!("{DIR}/sriov_numvfs"), errno);
        let error = host.pci().create_vfs(&bdf(PF), 2, Force::No).unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
        assert_eq!(host.read(&format!("{DIR}/sriov_drivers_autoprobe")), "1");
    }
}
