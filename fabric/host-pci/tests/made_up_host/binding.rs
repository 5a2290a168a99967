//! Binding functions to vfio-pci, and restoring their drivers.

use farside_host_pci::{Force, Former, PciError};
use rustix::io::Errno;

use crate::host::{MadeUpHost, bdf};

const DRIVE: &str = "0000:00:04.0";
const DEVICE: &str = "sys/bus/pci/devices/0000:00:04.0";

fn host() -> MadeUpHost {
    let host = MadeUpHost::new();
    host.function(DRIVE, [0x1b36, 0x0010], 0x01_0802, Some("nvme"));
    host
}

fn mounted(host: &MadeUpHost) {
    host.class_device(
        "block",
        "sys/devices/pci0000:00/0000:00:04.0/nvme/nvme0",
        "nvme0n1",
    );
    host.file("sys/class/block/nvme0n1/dev", "259:0\n");
    host.append(
        "proc/self/mountinfo",
        "40 22 259:0 / /mnt rw - ext4 /dev/nvme0n1 rw\n",
    );
}

#[test]
fn a_function_goes_to_vfio_pci_and_back_in_the_right_order() {
    let host = host();
    let binding = host.pci().bind_to_vfio(&bdf(DRIVE), Force::No).unwrap();
    assert_eq!(binding.former(), &Former::Driver("nvme".into()));
    assert_eq!(binding.before().dma_limit_bits(), Some(64));
    assert_eq!(host.driver_of(DRIVE).as_deref(), Some("vfio-pci"));
    assert_eq!(
        host.writes(),
        [
            format!("{DEVICE}/driver_override <- vfio-pci"),
            format!("{DEVICE}/driver/unbind <- {DRIVE}"),
            format!("sys/bus/pci/drivers_probe <- {DRIVE}"),
        ]
    );
    binding.restore().unwrap();
    assert_eq!(host.driver_of(DRIVE).as_deref(), Some("nvme"));
    assert_eq!(host.read(&format!("{DEVICE}/driver_override")), "(null)");
    assert_eq!(
        host.writes(),
        [
            format!("{DEVICE}/driver_override <- \\n"),
            format!("sys/bus/pci/drivers/vfio-pci/unbind <- {DRIVE}"),
            format!("sys/bus/pci/drivers_probe <- {DRIVE}"),
        ]
    );
}

#[test]
fn dropping_the_binding_gives_the_function_back() {
    let host = host();
    drop(host.pci().bind_to_vfio(&bdf(DRIVE), Force::No).unwrap());
    assert_eq!(host.driver_of(DRIVE).as_deref(), Some("nvme"));
}

#[test]
fn a_binding_that_is_left_stays() {
    let host = host();
    let binding = host.pci().bind_to_vfio(&bdf(DRIVE), Force::No).unwrap();
    binding.leave();
    assert_eq!(host.driver_of(DRIVE).as_deref(), Some("vfio-pci"));
}

#[test]
fn a_function_without_a_driver_has_none_afterwards() {
    let host = host();
    host.function("0000:00:05.0", [1, 2], 0x02_0000, None);
    let address = bdf("00:05.0");
    let binding = host.pci().bind_to_vfio(&address, Force::No).unwrap();
    assert_eq!(binding.former(), &Former::None);
    assert_eq!(host.driver_of("0000:00:05.0").as_deref(), Some("vfio-pci"));
    binding.restore().unwrap();
    assert_eq!(host.driver_of("0000:00:05.0"), None);
}

#[test]
fn after_a_kill_the_function_is_kept_and_later_goes_to_whatever_wants_it() {
    let host = host();
    let killed = host.pci().bind_to_vfio(&bdf(DRIVE), Force::No).unwrap();
    std::mem::forget(killed);
    host.writes();
    let binding = host.pci().bind_to_vfio(&bdf(DRIVE), Force::No).unwrap();
    drop(binding.leave_earlier());
    assert_eq!(host.driver_of(DRIVE).as_deref(), Some("vfio-pci"));
    let binding = host.pci().bind_to_vfio(&bdf(DRIVE), Force::No).unwrap();
    assert_eq!(binding.former(), &Former::Unknown);
    assert!(host.writes().is_empty(), "it is there already");
    binding.restore().unwrap();
    assert_eq!(host.driver_of(DRIVE).as_deref(), Some("nvme"));
    assert_eq!(host.read(&format!("{DEVICE}/driver_override")), "(null)");
}

#[test]
fn after_a_kill_between_two_writes_the_former_driver_gets_it_back() {
    let host = host();
    host.file(&format!("{DEVICE}/driver_override"), "vfio-pci\n");
    let binding = host.pci().bind_to_vfio(&bdf(DRIVE), Force::No).unwrap();
    assert_eq!(binding.former(), &Former::Driver("nvme".into()));
    binding.restore().unwrap();
    assert_eq!(host.driver_of(DRIVE).as_deref(), Some("nvme"));
}

#[test]
fn what_the_administrator_gave_to_vfio_pci_stays_there() {
    let host = MadeUpHost::new();
    host.function(DRIVE, [1, 2], 0x01_0802, Some("vfio-pci"));
    let binding = host.pci().bind_to_vfio(&bdf(DRIVE), Force::No).unwrap();
    assert_eq!(binding.former(), &Former::Kept("vfio-pci".into()));
    binding.restore().unwrap();
    assert_eq!(host.driver_of(DRIVE).as_deref(), Some("vfio-pci"));
    assert!(host.writes().is_empty());
}

#[test]
fn an_override_of_the_administrators_is_put_back() {
    let host = host();
    host.file(&format!("{DEVICE}/driver_override"), "nvme\n");
    drop(host.pci().bind_to_vfio(&bdf(DRIVE), Force::No).unwrap());
    assert_eq!(host.read(&format!("{DEVICE}/driver_override")), "nvme");
    assert_eq!(host.driver_of(DRIVE).as_deref(), Some("nvme"));
}

#[test]
fn what_is_in_use_is_refused_unless_forced() {
    let host = host();
    mounted(&host);
    let error = host.pci().bind_to_vfio(&bdf(DRIVE), Force::No).unwrap_err();
    assert!(matches!(error, PciError::Busy { .. }));
    let text = error.to_string();
    assert!(text.contains("nvme0n1 is mounted at /mnt"), "{text}");
    assert!(host.writes().is_empty(), "nothing was touched");
    let binding = host.pci().bind_to_vfio(&bdf(DRIVE), Force::Yes).unwrap();
    assert_eq!(host.driver_of(DRIVE).as_deref(), Some("vfio-pci"));
    drop(binding);
}

#[test]
fn a_network_interface_that_is_up_is_refused() {
    let host = MadeUpHost::new();
    host.function("0000:00:05.0", [0x8086, 0x10c9], 0x02_0000, Some("igb"));
    host.class_device("net", "sys/devices/pci0000:00/0000:00:05.0/net", "enp0s5");
    host.file("sys/class/net/enp0s5/flags", "0x1003\n");
    let error = host
        .pci()
        .bind_to_vfio(&bdf("00:05.0"), Force::No)
        .unwrap_err();
    assert!(error.to_string().contains("enp0s5 is up"), "{error}");
    assert_eq!(host.driver_of("0000:00:05.0").as_deref(), Some("igb"));
}

fn vfio_pci_missing(prepare: impl Fn(&MadeUpHost)) -> String {
    let host = host();
    host.remove("sys/bus/pci/drivers/vfio-pci");
    prepare(&host);
    let error = host.pci().bind_to_vfio(&bdf(DRIVE), Force::No).unwrap_err();
    assert!(matches!(error, PciError::VfioPciMissing { .. }), "{error}");
    assert!(host.writes().is_empty(), "nothing was touched");
    error.to_string()
}

#[test]
fn a_missing_driver_says_which_module_or_option_is_missing() {
    let kernel = |host: &MadeUpHost, modules: &str| {
        host.file("proc/sys/kernel/osrelease", "7.2.12-test\n");
        host.file("lib/modules/7.2.12-test/modules.dep", modules);
    };
    let loadable = vfio_pci_missing(|host| {
        kernel(
            host,
            "kernel/drivers/vfio/pci/vfio-pci.ko.xz: kernel/a.ko\n",
        );
    });
    assert!(loadable.contains("run `modprobe vfio-pci`"), "{loadable}");
    assert!(!loadable.contains("CONFIG_VFIO_PCI"), "{loadable}");
    let absent = vfio_pci_missing(|host| kernel(host, "kernel/a.ko:\n"));
    assert!(absent.contains("without CONFIG_VFIO_PCI"), "{absent}");
    assert!(absent.contains("7.2.12-test"), "{absent}");
    let unknown = vfio_pci_missing(|_| {});
    assert!(unknown.contains("modprobe vfio-pci"), "{unknown}");
    assert!(unknown.contains("CONFIG_VFIO_PCI"), "{unknown}");
}

#[test]
fn without_an_iommu_nothing_is_touched() {
    let host = host();
    host.remove("sys/kernel/iommu_groups");
    host.remove(&format!("{DEVICE}/iommu_group"));
    let error = host
        .pci()
        .bind_to_vfio(&bdf(DRIVE), Force::Yes)
        .unwrap_err();
    assert!(matches!(error, PciError::NoIommu { .. }), "{error}");
    assert!(host.writes().is_empty());
}

#[test]
fn bridges_are_refused() {
    let host = MadeUpHost::new();
    host.function("0000:00:01.0", [1, 2], 0x06_0400, Some("pcieport"));
    host.header_type("sys/devices/pci0000:00/0000:00:01.0", 1);
    host.function("0000:00:1f.0", [1, 2], 0x06_0100, None);
    for address in ["00:01.0", "00:1f.0"] {
        let error = host
            .pci()
            .bind_to_vfio(&bdf(address), Force::Yes)
            .unwrap_err();
        assert!(matches!(error, PciError::NotLendable { .. }), "{error}");
    }
}

#[test]
fn when_vfio_pci_does_not_take_it_the_former_driver_has_it_again() {
    let host = host();
    host.make_unwilling("vfio-pci");
    let error = host.pci().bind_to_vfio(&bdf(DRIVE), Force::No).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, PciError::WrongDriver { .. }), "{text}");
    assert!(
        text.contains("vfio-pci") && text.contains("no driver"),
        "{text}"
    );
    assert_eq!(host.driver_of(DRIVE).as_deref(), Some("nvme"));
    assert_eq!(host.read(&format!("{DEVICE}/driver_override")), "(null)");
}

#[test]
fn when_the_kernel_refuses_a_write_the_error_names_file_and_cause() {
    for file in [
        format!("{DEVICE}/driver_override"),
        format!("{DEVICE}/driver/unbind"),
        "sys/bus/pci/drivers_probe".to_owned(),
    ] {
        let host = host();
        host.refuse_writes(&file, Errno::PERM);
        let error = host.pci().bind_to_vfio(&bdf(DRIVE), Force::No).unwrap_err();
        let text = farside_error_chain::Chain(&error).to_string();
        assert!(text.contains(&file) && text.contains("ermitted"), "{text}");
        assert_eq!(host.driver_of(DRIVE).as_deref(), Some("nvme"), "{file}");
    }
}

#[test]
fn a_former_driver_that_does_not_probe_is_bound_by_name() {
    let host = host();
    let binding = host.pci().bind_to_vfio(&bdf(DRIVE), Force::No).unwrap();
    host.refuse_writes("sys/bus/pci/drivers_probe", Errno::INVAL);
    binding.restore().unwrap();
    assert_eq!(host.driver_of(DRIVE).as_deref(), Some("nvme"));
}

#[test]
fn a_former_driver_that_is_gone_is_an_error() {
    let host = host();
    let binding = host.pci().bind_to_vfio(&bdf(DRIVE), Force::No).unwrap();
    host.remove("sys/bus/pci/drivers/nvme");
    let error = binding.restore().unwrap_err();
    assert!(error.to_string().contains("drivers/nvme/bind"), "{error}");
    assert_eq!(host.driver_of(DRIVE), None);
}

#[test]
fn a_function_that_was_unplugged_needs_no_giving_back() {
    let host = host();
    let binding = host.pci().bind_to_vfio(&bdf(DRIVE), Force::No).unwrap();
    host.remove(DEVICE);
    binding.restore().unwrap();
}
