//! The package's contents, without running services.

use anyhow::{Result, ensure};

use crate::{
    exposure,
    stage::{Stage, install, sh},
};

/// Every file, with its owner and mode, except those that apt, dpkg, the linker and man
/// keep about installed packages.
const LIST: &str = "find / -xdev \\( -path /proc -o -path /sys -o -path /dev -o -path /tmp \
    -o -path /run -o -path /package -o -path /var/lib/dpkg -o -path /var/lib/apt \
    -o -path /var/cache -o -path /var/log \\) -prune -o -printf '%p %u:%g %m\\n' | sort";

pub fn it_brings_what_is_needed_and_goes_without_a_trace(stage: &Stage) -> Result<()> {
    let inside = stage.enter()?;
    let sh = |script: &str| sh(&inside, script);
    let before = sh(LIST)?;
    install(&inside)?;

    let version = sh("farside --version")?;
    let packed = sh("dpkg-query --show --showformat '${Version}' farside")?;
    let number = version.trim().strip_prefix("farside ").unwrap_or_default();
    ensure!(
        !number.is_empty() && packed.starts_with(number),
        "program {version}, package {packed}"
    );

    // With an undeclared library dependency, the binary would not have started in a root
    // this small. The package declares it, too.
    let depends = sh("dpkg-query --show --showformat '${Depends}' farside")?;
    ensure!(
        depends.contains("libc6 (>= ") && depends.contains("systemd"),
        "Depends: {depends}"
    );

    for (page, has) in [
        ("farside", "farside-serve(1)"),
        ("farside-serve", "--socket-group"),
    ] {
        let text = sh(&format!("man --warnings {page} 2>&1 | col -b"))
            .or_else(|_| sh(&format!("man --warnings {page} 2>&1")))?;
        ensure!(text.contains(has), "man {page} has no {has}:\n{text}");
        ensure!(!text.contains("warning:"), "man {page}:\n{text}");
    }
    let completion = sh(
        "bash -c '. /usr/share/bash-completion/completions/farside; \
         complete -p farside'",
    )?;
    ensure!(completion.contains("_farside"), "{completion}");
    sh("test -s /usr/share/zsh/vendor-completions/_farside && \
        test -s /usr/share/fish/vendor_completions.d/farside.fish")?;
    // Beside the user's hook, not in its place.
    sh("test -x /etc/libvirt/hooks/qemu.d/farside && test ! -e /etc/libvirt/hooks/qemu")?;
    sh("getent passwd farside | grep -q nologin && getent passwd farside-qemu | grep -q nologin")?;
    let owner = sh("stat -c '%U:%G %a' /var/lib/farside")?;
    ensure!(owner.trim() == "farside:farside 750", "{owner}");

    sh("cp /usr/share/doc/farside/examples/vm.toml /etc/farside/vm/web1.toml")?;
    sh("cp /usr/share/doc/farside/examples/lender.toml /etc/farside/lender.toml")?;
    generator(&sh)?;
    units(&sh)?;
    doctor(&sh)?;
    lends_and_serves(&sh)?;

    sh("rm /etc/farside/vm/web1.toml /etc/farside/lender.toml")?;
    sh("apt-get purge --yes farside")?;
    let after = sh(LIST)?;
    let left: Vec<&str> = after
        .lines()
        .filter(|line| !before.lines().any(|old| old == *line))
        // Its ids may be in use for files of the administrator: Debian's packages keep
        // their users on removal.
        .filter(|line| {
            let path = line.split(' ').next().unwrap_or_default();
            let users = ["passwd", "shadow", "group", "gshadow"];
            !users
                .iter()
                .any(|file| path.strip_suffix('-').unwrap_or(path) == format!("/etc/{file}"))
        })
        .collect();
    ensure!(left.is_empty(), "left after purge:\n{}", left.join("\n"));
    Ok(())
}

/// The devices of a configuration are in its socket unit; an invalid configuration does not
/// affect those of other VMs.
fn generator(sh: &dyn Fn(&str) -> Result<String>) -> Result<()> {
    sh("echo 'devices = [' > /etc/farside/vm/broken.toml; mkdir /tmp/units")?;
    let said = sh(
        "/usr/lib/systemd/system-generators/farside-generator /tmp/units 2>&1 \
         && echo succeeded || true",
    )?;
    ensure!(
        said.contains("broken") && !said.contains("succeeded"),
        "{said}"
    );
    let drop_in = sh("cat /tmp/units/farside@web1.socket.d/*.conf")?;
    ensure!(
        drop_in.contains("\nListenStream=/run/farside/vm/web1/disk0.sock\n"),
        "{drop_in}"
    );
    // Network access where the configuration has TCP addresses, nowhere else.
    let list = "cd /tmp/units && ls -d *.service.d 2> /dev/null | sort || true";
    let networked = sh(list)?;
    ensure!(networked.is_empty(), "{networked}");
    sh("set -e
         rm -r /etc/farside/vm/broken.toml /tmp/units
         sed 's/web1/web2/' /etc/farside/vm/web1.toml > /etc/farside/vm/web2.toml
         echo 'lenders = [\"tls:10.0.0.2:7410\"]' >> /etc/farside/vm/web2.toml
         sed -i '1i listen = [\"tls:10.0.0.2:7410\"]' /etc/farside/lender.toml
         mkdir /tmp/units
         /usr/lib/systemd/system-generators/farside-generator /tmp/units
         cp -r /tmp/units/. /etc/systemd/system")?;
    let networked = sh(list)?;
    ensure!(
        networked == "farside-lender.service.d\nfarside@web2.service.d\n",
        "{networked}"
    );
    let drop_in = sh("cat /tmp/units/farside@web2.service.d/*.conf")?;
    ensure!(drop_in.contains("\nIPAddressAllow=10.0.0.2\n"), "{drop_in}");
    sh("rm -r /tmp/units")?;
    Ok(())
}

fn units(sh: &dyn Fn(&str) -> Result<String>) -> Result<()> {
    let units = "farside@web1.service farside@web1.socket farside@web2.service \
                 farside@web2.socket farside-lender.service farside-lender.socket \
                 farside-vfio.service farside.target farside-qemu@web1.service farside-qemu@web1.socket";
    sh("cp /usr/share/doc/farside/examples/farside-qemu@.* /etc/systemd/system")?;
    let said = sh(&format!("systemd-analyze verify --man=yes {units} 2>&1"))?;
    ensure!(!said.contains("farside"), "systemd-analyze verify: {said}");
    // With drop-ins: web2 and the lender have access to the network, the lender to VFIO.
    sh(
        "install -m 644 /usr/share/doc/farside/examples/lender-vfio.conf \
        /etc/systemd/system/farside-lender.service.d/vfio.conf",
    )?;
    for unit in [
        "farside@web1.service",
        "farside@web2.service",
        "farside-lender.service",
        "farside-vfio.service",
        "farside-qemu@web1.service",
    ] {
        exposure::is_small(sh, &format!("--offline=true --root=/ {unit}"))?;
    }
    sh(
        "rm -r /etc/systemd/system/farside*.d /etc/systemd/system/farside-qemu@.* \
            /etc/farside/vm/web2.toml
        cp /usr/share/doc/farside/examples/lender.toml /etc/farside/lender.toml",
    )?;
    Ok(())
}

/// It reports the missing QEMU, and the package that provides it.
fn doctor(sh: &dyn Fn(&str) -> Result<String>) -> Result<()> {
    let said = sh("farside doctor --timeout 60 2>&1 || test $? = 1")?;
    let problem = said.lines().find(|line| line.starts_with("problem  qemu"));
    ensure!(
        problem.is_some() && said.contains("fix: apt-get install qemu-system-x86"),
        "{said}"
    );
    Ok(())
}

/// Without systemd, as the user that the package created.
fn lends_and_serves(sh: &dyn Fn(&str) -> Result<String>) -> Result<()> {
    let said = sh("set -eu
         install -o farside -g farside -m 600 /dev/null /var/lib/farside/disk0.img
         truncate -s 64M /var/lib/farside/disk0.img
         export FARSIDE_RUNTIME_DIR=/run/farside FARSIDE_STATE_DIR=/var/lib/farside
         user='setpriv --reuid=farside --regid=farside --clear-groups'
         # $1: a question; $2: where the answer goes; $3: who has to live meanwhile.
         answered() {
             timeout 120 sh -c \"until farside $1 > $2 2> /dev/null; do kill -0 $3 || exit 1; done\"
         }
         $user farside lend --config /etc/farside/lender.toml > /tmp/lend.log 2>&1 &
         lend=$!
         answered devices /tmp/devices $lend
         $user farside serve --vm web1 --config /etc/farside/vm/web1.toml > /tmp/serve.log 2>&1 &
         serve=$!
         answered 'status --vm web1' /tmp/status $serve
         cat /tmp/devices /tmp/status
         kill $serve; wait $serve
         kill $lend; wait $lend
         echo left: $(find /run/farside -type s)
         rm /var/lib/farside/disk0.img")
    .map_err(|error| match sh("tail -n 20 /tmp/*.log") {
        Ok(logs) => error.context(logs),
        Err(_) => error,
    })?;
    ensure!(
        said.matches("disk0").count() >= 2 && said.ends_with("left:\n"),
        "{said}"
    );
    Ok(())
}
