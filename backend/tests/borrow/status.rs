//! The status socket.

use std::{
    io::{Read, Write},
    os::unix::{fs::PermissionsExt, net::UnixStream},
};

use farside_backend_api::BackendReport;
use farside_devices::dma_test::VECTORS;

use crate::{
    guest::{Event, raise},
    host::{DEADLINE, DMA, Host, Served, dma_test},
    vmm::{DATA_EVENTFD, DATA_NONE, TRIGGER},
};

/// A report of many vectors exceeds a socket's buffer: it is not truncated, and a slow
/// reader does not delay others.
#[test]
fn a_long_report_reaches_a_slow_reader() {
    let ids = ["dma0", "dma1", "dma2", "dma3"];
    let host = Host::lending(Default::default(), |_| {
        ids.iter().map(|id| dma_test(id)).collect()
    });
    let served = Served::start(host.config("a", &ids));
    let event = Event::new();
    let mut vmms: Vec<_> = ids.iter().map(|id| served.client(id)).collect();
    for vmm in &mut vmms {
        for start in (0..u32::from(VECTORS)).step_by(16) {
            let fds = [&event; 16];
            vmm.set_irqs(2, DATA_EVENTFD | TRIGGER, start, 16, &fds)
                .unwrap();
        }
        // Without a lease the backend signals and counts them itself.
        vmm.set_irqs_bool(2, TRIGGER, 0, &[true; VECTORS as usize])
            .unwrap();
        // Eventfds for all devices at once would be many descriptors.
        vmm.set_irqs::<Event>(2, DATA_NONE | TRIGGER, 0, 0, &[])
            .unwrap();
    }
    let slow: Vec<_> = (0..20)
        .map(|_| UnixStream::connect(host.directory("a").join("status")).unwrap())
        .collect();
    // Devices are served meanwhile.
    vmms[0].reset().unwrap();
    raise(&mut vmms[0], 0);
    for mut slow in slow {
        slow.set_read_timeout(Some(DEADLINE)).unwrap();
        let mut report = Vec::new();
        slow.read_to_end(&mut report).unwrap();
        assert!(report.len() > 256 << 10, "{} bytes", report.len());
        let report = BackendReport::from_json(&report).unwrap();
        assert_eq!(report.devices.len(), ids.len());
        for device in report.devices {
            assert_eq!(device.interrupts.fired.len(), usize::from(VECTORS));
        }
    }
}

#[test]
fn peers_that_leave_or_talk_do_no_harm() {
    let host = Host::new();
    let served = host.serve(DMA);
    let path = host.directory("a").join("status");
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    for _ in 0..50 {
        let mut peer = UnixStream::connect(&path).unwrap();
        // The backend may have replied and closed the connection already.
        let _ = peer.write_all(b"GET / HTTP/1.1\r\n\r\n");
        drop(peer);
    }
    let status = served.full_status();
    assert_eq!(status.vm, "a");
    assert_eq!(status.pid, std::process::id());
    assert_eq!(status.devices[0].device, DMA);
}
