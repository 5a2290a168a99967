//! Bus-master enable is refused: the log has the reason, and the device does no DMA.

use anyhow::ensure;
use farside_fabric::FaultReason;
use farside_tests::{BOOT, Borrow, Cluster, DmaTester, Guest, MIB, testbed};
use libtest_mimic::Completion;

use crate::{check, passed};

/// Sets bus-master enable and returns the reason of its refusal from the backend's log.
fn refused(cluster: &Cluster, guest: &Guest<'_>) -> anyhow::Result<String> {
    let tester = DmaTester::new(guest)?;
    tester.set_bus_master(true)?;
    ensure!(!tester.bus_master()?, "bus-master enable reads as set");
    let Borrow { last_error, .. } = check::closed(cluster, guest.name(), "dma0")?;
    let page = guest.alloc_page(4096)?;
    let answer = tester.fill(page.gpa, 4096, 0x1111_1111)?;
    ensure!(answer.faulted && answer.moved == 0, "{answer:?}");
    ensure!(guest.read_page(page, 0, 4096)? == vec![0; 4096]);
    let reason = cluster.status()?.lent("dma0")?.faults.last().cloned();
    ensure!(
        reason
            .as_ref()
            .is_some_and(|fault| fault.reason == FaultReason::BusMasterDisabled),
        "{reason:?}"
    );
    last_error.ok_or_else(|| anyhow::anyhow!("no reason is given"))
}

pub fn private_guest_ram_is_refused_with_the_option_to_add(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    let (_lender, _image) = cluster.lend_disk(64 * MIB)?;
    let backend = cluster.serve("a", &["disk0", "dma0"]).start()?;
    let private = ["-machine", "q35", "-m", "512M", "-name", "a"];
    let guest = own_qemu(cluster, &private, &["disk0", "dma0"])?;
    let error = refused(cluster, &guest)?;
    let expected = "is not shared with the backend: start QEMU with `-object \
        memory-backend-memfd,id=mem,size=SIZE,share=on -machine memory-backend=mem`";
    ensure!(error.contains(expected), "{error}");
    ensure!(backend.log().contains(expected), "{}", backend.log());
    // The guest's driver finds a controller that does no DMA, and gives up on it; by
    // default after a minute.
    guest.sh("echo 2 >/sys/module/nvme_core/parameters/admin_timeout; modprobe nvme")?;
    let disk = cluster.status()?.borrow("a", "disk0")?;
    ensure!(disk.is_closed() && disk.last_error.is_some(), "{disk:?}");
    passed()
}

/// A guest in a QEMU that was started directly, without the checks of `farside qemu`.
fn own_qemu<'a>(
    cluster: &'a Cluster,
    machine: &[&str],
    devices: &[&str],
) -> anyhow::Result<Guest<'a>> {
    let testbed = testbed()?;
    let mut args: Vec<String> = machine.iter().map(|&arg| arg.to_owned()).collect();
    args.extend(testbed.accel().args().map(str::to_owned));
    for id in devices {
        let socket = cluster.directory().join("vm/a").join(format!("{id}.sock"));
        let device = serde_json::json!({
            "driver": "vfio-user-pci",
            "socket": { "type": "unix", "path": socket.to_str() },
        });
        args.extend(["-device".to_owned(), device.to_string()]);
    }
    let vm = testbed.vm("a").base(testbed.qemu(), args);
    let vm = vm.lean().without_module("nvme").launch()?;
    let guest = Guest::adopt(cluster, vm);
    guest.wait_agent(BOOT)?;
    Ok(guest)
}

pub fn a_guest_too_large_for_the_window_is_told_what_fits(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    let text = "name = \"small\"\n[fabric]\nbar-size = 536870912\nlut-entries = 64\n\
                [[device]]\nid = \"dma0\"\nmodel.dma-test = {}\n";
    let config = cluster.file("lender.toml", text)?;
    let _lender = cluster.lend(&["--config", &config.display().to_string()])?;
    let backend = cluster.serve("a", &["dma0"]).start()?;
    let says = |error: &str| -> anyhow::Result<()> {
        for part in [
            "of 1 GiB",
            "128",
            "of at most 512 MiB fits",
            "bar-size to 1 GiB",
        ] {
            ensure!(error.contains(part), "no {part:?} in: {error}");
        }
        Ok(())
    };
    // Before the VM boots, if farside starts it.
    match cluster.guest("a").memory(1024 * MIB).start() {
        Ok(_) => anyhow::bail!("a guest that does not fit was started"),
        Err(error) => says(&format!("{error:#}").replace("over 1 GiB", "of 1 GiB"))?,
    }
    // At bus-master enable, if it does not.
    let by_hand = [
        "-machine",
        "q35,memory-backend=mem",
        "-m",
        "1G",
        "-object",
        "memory-backend-memfd,id=mem,size=1G,share=on",
    ];
    let guest = own_qemu(cluster, &by_hand, &["dma0"])?;
    let error = refused(cluster, &guest)?;
    says(&error)?;
    ensure!(backend.log().contains(&error), "{}", backend.log());
    drop(guest);
    cluster.wait_free("dma0")?;
    // A guest that fits can use it.
    let guest = cluster.guest("a").memory(512 * MIB).boot()?;
    DmaTester::new(&guest)?.set_bus_master(true)?;
    check::open(cluster, &guest, "dma0", 1)?;
    passed()
}

pub fn memory_that_may_not_be_locked_is_refused(cluster: &Cluster) -> anyhow::Result<Completion> {
    let (_lender, _image) = cluster.lend_disk(64 * MIB)?;
    let limit = "--memlock=65536:65536";
    // Root may lock any amount, unless it drops CAP_IPC_LOCK.
    let wrapper = match rustix::process::geteuid().is_root() {
        true => vec![
            "setpriv",
            "--bounding-set=-ipc_lock",
            "--inh-caps=-ipc_lock",
            "prlimit",
            limit,
        ],
        false => vec!["prlimit", limit],
    };
    for tool in wrapper
        .iter()
        .filter(|word| ["setpriv", "prlimit"].contains(word))
    {
        if std::process::Command::new(tool)
            .arg("--version")
            .output()
            .is_err()
        {
            return Ok(Completion::ignored_with(format!(
                "{tool} (util-linux) is not installed"
            )));
        }
    }
    let wrapped = |pin: &'static str| {
        cluster
            .serve("a", &["dma0"])
            .args(&["--pin", pin])
            .under(&wrapper)
            .start()
    };
    let backend = wrapped("require")?;
    let guest = cluster.guest("a").boot()?;
    let error = refused(cluster, &guest)?;
    for part in ["memlock", "64 KiB", "512 MiB"] {
        ensure!(error.contains(part), "no {part:?} in: {error}");
    }
    guest.kill_qemu()?;
    drop(backend);
    cluster.wait_free("dma0")?;

    // For an ordinary user: memory is populated but not locked, with one log line.
    let backend = wrapped("prefer")?;
    let guest = cluster.guest("a").boot()?;
    let tester = DmaTester::new(&guest)?;
    for _ in 0..2 {
        tester.set_bus_master(true)?;
        let borrow = check::open(cluster, &guest, "dma0", 1)?;
        ensure!(borrow.bytes_locked <= 65536, "{borrow:?}");
        tester.set_bus_master(false)?;
        check::closed(cluster, "a", "dma0")?;
    }
    let log = backend.log();
    ensure!(log.matches("memlock").count() == 1, "{log}");
    passed()
}
