//! Lines as real kernels printed them.

use super::*;
use proptest::prelude::*;

fn bdf(text: &str) -> Bdf {
    text.parse().unwrap()
}

#[track_caller]
fn fault(line: &str, device: Option<Bdf>) -> KernelDmaFault {
    match parse_message(line, device) {
        Some(KernelEvent::Fault(fault)) => {
            assert_eq!(fault.line, line);
            fault
        }
        other => panic!("{line}: {other:?}"),
    }
}

#[track_caller]
fn expect(line: &str, device: &str, iova: u64, access: Access, reason: &str) {
    let fault = fault(line, None);
    assert_eq!(fault.bdf, bdf(device), "{line}");
    assert_eq!(fault.iova, iova, "{line}");
    assert_eq!(fault.access, access, "{line}");
    assert_eq!(fault.reason, reason, "{line}");
}

#[test]
fn intel_of_today_names_the_domain() {
    expect(
        "DMAR: [DMA Write NO_PASID] Request device [0000:00:04.0] fault addr 0x200010000 [fault reason 0x05] PTE Write access is not set",
        "0000:00:04.0",
        0x2_0001_0000,
        Access::Write,
        "[fault reason 0x05] PTE Write access is not set",
    );
}

#[test]
fn intel_without_a_domain() {
    expect(
        "DMAR: [DMA Read NO_PASID] Request device [2f:00.1] fault addr 0x7ebb0000 [fault reason 0x06] PTE Read access is not set",
        "0000:2f:00.1",
        0x7ebb_0000,
        Access::Read,
        "[fault reason 0x06] PTE Read access is not set",
    );
    expect(
        "DMAR: [DMA Write PASID 0x1] Request device [7a:02.0] fault addr 0x7f81c968d000 [fault reason 0x71] SM: Present bit in first-level paging entry is clear",
        "0000:7a:02.0",
        0x7f81_c968_d000,
        Access::Write,
        "[fault reason 0x71] SM: Present bit in first-level paging entry is clear",
    );
}

#[test]
fn intel_with_the_pasid_after_the_device() {
    expect(
        "DMAR: [DMA Read] Request device [04:00.0] PASID ffffffff fault addr 76406000 [fault reason 06] PTE Read access is not set",
        "0000:04:00.0",
        0x7640_6000,
        Access::Read,
        "[fault reason 06] PTE Read access is not set",
    );
}

#[test]
fn intel_of_long_ago() {
    expect(
        "DMAR: [DMA Read] Request device [00:02.0] fault addr 8900a000 [fault reason 05] PTE Write access is not set",
        "0000:00:02.0",
        0x8900_a000,
        Access::Read,
        "[fault reason 05] PTE Write access is not set",
    );
    expect(
        "dmar: DMAR:[DMA Write] Request device [02:00.0] fault addr 6df84000 ",
        "0000:02:00.0",
        0x6df8_4000,
        Access::Write,
        "",
    );
}

#[test]
fn intel_interrupt_remapping() {
    let line = "DMAR: [INTR-REMAP] Request device [0000:00:04.0] fault index 0x1f [fault reason 0x26] Blocked an interrupt request due to source-id verification failure";
    let Some(KernelEvent::BlockedInterrupt(blocked)) = parse_message(line, None) else {
        panic!("not understood");
    };
    assert_eq!(blocked.bdf, bdf("0000:00:04.0"));
    assert_eq!(blocked.index, 0x1f);
    assert!(blocked.reason.contains("source-id"));
}

#[test]
fn amd_with_the_device_in_the_event() {
    expect(
        "AMD-Vi: Event logged [IO_PAGE_FAULT device=04:00.0 domain=0x000e address=0x10b4a01e0 flags=0x0070]",
        "0000:04:00.0",
        0x1_0b4a_01e0,
        Access::Write,
        "IO_PAGE_FAULT",
    );
    expect(
        "AMD-Vi: Event logged [IO_PAGE_FAULT device=0001:04:00.0 domain=0x000e address=0x000000000637c000 flags=0x0050]",
        "0001:04:00.0",
        0x0637_c000,
        Access::Read,
        "IO_PAGE_FAULT",
    );
    expect(
        "iommu ivhd0: AMD-Vi: Event logged [IO_PAGE_FAULT device=04:00.0 domain=0x000e address=0x1000 flags=0x0020]",
        "0000:04:00.0",
        0x1000,
        Access::Write,
        "IO_PAGE_FAULT",
    );
}

#[test]
fn amd_with_the_device_before_the_event() {
    expect(
        "vfio-pci 0000:04:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0013 address=0xffffc02000 flags=0x0020]",
        "0000:04:00.0",
        0xff_ffc0_2000,
        Access::Write,
        "IO_PAGE_FAULT",
    );
}

#[test]
fn amd_with_the_device_in_the_records_mark_only() {
    let line =
        "AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0007 address=0xffffc02000 flags=0x0000]";
    assert_eq!(parse_message(line, None), None);
    let fault = fault(line, Some(bdf("0000:07:00.0")));
    assert_eq!(fault.bdf, bdf("0000:07:00.0"));
    assert_eq!(fault.access, Access::Read);
}

#[test]
fn arm_that_names_the_device() {
    expect(
        "arm-smmu-v3 arm-smmu-v3.0.auto: event: F_TRANSLATION client: 0000:04:00.0 sid: 0x400 ssid: 0x0 iova: 0x8000001000 ipa: 0x0",
        "0000:04:00.0",
        0x80_0000_1000,
        Access::Unknown,
        "F_TRANSLATION",
    );
    for line in [
        "arm-smmu-v3 arm-smmu-v3.0.auto: event: F_TRANSLATION client: (unassigned sid) sid: 0x1 ssid: 0x0 iova: 0x1000 ipa: 0x0",
        "arm-smmu-v3 arm-smmu-v3.0.auto: event 0x10 received:",
    ] {
        assert_eq!(parse_message(line, None), None);
    }
}

#[test]
fn only_an_iommus_suppressed_lines_count() {
    let count = |line| parse_message(line, None);
    assert_eq!(
        count("dmar_fault: 2930 callbacks suppressed"),
        Some(KernelEvent::Suppressed(2930))
    );
    assert_eq!(
        count("amd_iommu_report_page_fault: 3 callbacks suppressed"),
        Some(KernelEvent::Suppressed(3))
    );
    assert_eq!(count("net_ratelimit: 3 callbacks suppressed"), None);
    assert_eq!(count("dmar_fault: -3 callbacks suppressed"), None);
}

#[test]
fn lines_that_only_look_alike_are_not_faults() {
    for line in [
        "",
        "DMAR: DRHD: handling fault status reg 3",
        "DMAR: [DMA Write NO_PASID] Request device [0000:00:44.0] fault addr 0x1 [fault reason 0x05]",
        "DMAR: [DMA Write NO_PASID] Request device [0000:00:04.0] fault addr zzz",
        "DMAR: [DMA Write NO_PASID] Request device [0000:00:04.0] fault addr 0x11111111111111111",
        "DMAR: [DMA Write NO_PASID",
        "AMD-Vi: Event logged [INV_DEVICE device=04:00.0",
        "vfio-pci 0000:04:00.0: enabling device (0000 -> 0003)",
        // A device's own name, which the kernel quotes.
        "usb 1-1: Product: DMAR: [DMA Write NO_PASID] Request device [0000:00:04.0] fault addr 0x1000 [x]",
        "usb 1-1: Product: dmar: DMAR:[DMA Write] Request device [02:00.0] fault addr 6df84000 ",
        "usb 1-1: Product: AMD-Vi: Event logged [IO_PAGE_FAULT device=04:00.0 domain=0x1 address=0x1000 flags=0x0]",
        "x AMD-Vi: Event logged [IO_PAGE_FAULT device=04:00.0 domain=0x1 address=0x1000 flags=0x0]",
    ] {
        assert_eq!(parse_message(line, None), None, "{line}");
    }
}

#[test]
fn a_long_line_is_cut_between_characters() {
    let line = format!(
        "DMAR: [DMA Read NO_PASID] Request device [00:04.0] fault addr 0x1000 [x] {}",
        "é".repeat(5000)
    );
    let Some(KernelEvent::Fault(fault)) = parse_message(&line, None) else {
        panic!("not understood");
    };
    assert!(fault.line.len() <= MAX_LINE && fault.reason.len() <= MAX_LINE);
}

proptest! {
    #[test]
    fn no_text_makes_it_panic(text: String) {
        let _ = parse_message(&text, None);
    }

    #[test]
    fn no_torn_line_makes_it_panic(
        text in r"(dmar: )?(DMAR:|AMD-Vi: Event logged|arm-smmu-v3 x: event:)? ?(\[|\[DMA (Read|Write)|INTR-REMAP)?[\] =:a-fx0-9.é]{0,60}",
    ) {
        let _ = parse_message(&text, None);
    }

    #[test]
    fn every_intel_fault_is_read_as_it_was_printed(
        bus: u8, device in 0u8..32, function in 0u8..8, iova: u64, write: bool,
    ) {
        let kind = if write { "Write" } else { "Read" };
        let line = format!(
            "DMAR: [DMA {kind} NO_PASID] Request device [0000:{bus:02x}:{device:02x}.{function}] fault addr {iova:#x} [fault reason 0x05] r"
        );
        let fault = fault(&line, None);
        prop_assert_eq!(fault.bdf, Bdf::new(0, bus, device, function).unwrap());
        prop_assert_eq!(fault.iova, iova);
        prop_assert_eq!(fault.access == Access::Write, write);
    }
}
