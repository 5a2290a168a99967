//! What the package brings, seen where no service runs.

use anyhow::{Context, Result, ensure};

use crate::stage::{Stage, install, sh};

/// Greatest exposure that `systemd-analyze security` may find, tenths.
const EXPOSURE: u32 = 20;

/// Every file, with its owner and mode, but for those that dpkg itself, the
/// linker and man keep about what is installed.
const LIST: &str = "find / -xdev \\( -path /proc -o -path /sys -o -path /dev -o -path /tmp \
    -o -path /run -o -path /package -o -path /var/lib/dpkg -o -path /var/cache -o -path /var/log \
    \\) -prune -o -printf '%p %u:%g %m\\n' | sort";

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

    // A library that nobody said is needed would be missing in a root this
    // small, and the program would not have started. The package says it, too.
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
    // Beside the user's own hook, not in its place.
    sh("test -x /etc/libvirt/hooks/qemu.d/farside && test ! -e /etc/libvirt/hooks/qemu")?;
    sh("getent passwd farside | grep -q nologin")?;
    let owner = sh("stat -c '%U:%G %a' /var/lib/farside")?;
    ensure!(owner.trim() == "farside:farside 750", "{owner}");

    sh("cp /usr/share/doc/farside/examples/vm.toml /etc/farside/vm/web1.toml")?;
    sh("cp /usr/share/doc/farside/examples/lender.toml /etc/farside/lender.toml")?;
    generator(&sh)?;
    units(&sh)?;

    sh("rm /etc/farside/vm/web1.toml /etc/farside/lender.toml")?;
    sh("dpkg --purge farside")?;
    let after = sh(LIST)?;
    let left: Vec<&str> = after
        .lines()
        .filter(|line| !before.lines().any(|old| old == *line))
        // Its numbers may be in use for files of the administrator: Debian's
        // packages leave their users.
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

/// The devices of a description come into its socket unit; a description that is
/// wrong costs no other VM its own.
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
    sh(
        "rm -r /etc/farside/vm/broken.toml && cp -r /tmp/units/. /etc/systemd/system && rm -r /tmp/units",
    )?;
    Ok(())
}

fn units(sh: &dyn Fn(&str) -> Result<String>) -> Result<()> {
    let units = "farside@web1.service farside@web1.socket farside-lender.service \
                 farside-lender.socket";
    let said = sh(&format!("systemd-analyze verify --man=yes {units} 2>&1"))?;
    ensure!(!said.contains("farside"), "systemd-analyze verify: {said}");
    for unit in ["farside@.service", "farside-lender.service"] {
        let said = sh(&format!(
            "systemd-analyze security --no-pager --offline=true --threshold={EXPOSURE} \
             /usr/lib/systemd/system/{unit} 2>&1"
        ))?;
        let overall = said
            .lines()
            .find(|line| line.contains("Overall exposure"))
            .with_context(|| format!("no verdict: {said}"))?;
        println!("{}", overall.trim());
    }
    sh("rm -r /etc/systemd/system/farside@web1.socket.d")?;
    Ok(())
}
