//! A cluster: three hosts with members of etcd, lenders, and a borrower, at one switch.

use std::{fs, path::PathBuf, process::Command};

use anyhow::{Context, Result};
use farside_tests::{Daemon, SHORT, testbed};

use crate::stage::{Host, ROOT};

/// Bytes of an image.
const IMAGE: u64 = 16 << 20;

/// The port of lenders.
const PORT: u16 = 7410;

/// Hosts and their addresses; those of etcd's members first.
const HOSTS: [(&str, &str); 7] = [
    ("m1", "10.98.0.1"),
    ("m2", "10.98.0.2"),
    ("m3", "10.98.0.3"),
    ("lender1", "10.98.0.4"),
    ("lender2", "10.98.0.5"),
    ("lender3", "10.98.0.6"),
    ("borrower", "10.98.0.7"),
];

pub const MEMBERS: usize = 3;

pub struct Cluster {
    // Dropped in this order.
    members: Vec<Option<Daemon>>,
    pub lenders: Vec<Daemon>,
    pub hosts: Vec<Host>,
    switch: Host,
    etcd: PathBuf,
    /// The logs of members that were killed.
    old: Vec<String>,
}

impl Cluster {
    /// Hosts, and no process on them.
    pub fn new() -> Result<Self> {
        let etcd = testbed()?.etcd(&farside_testbed::Progress::auto())?;
        let switch = Host::new("switch")?;
        switch.ip(&["link", "add", "bridge", "type", "bridge"])?;
        switch.ip(&["link", "set", "bridge", "up"])?;
        let site = tempfile::tempdir()?;
        let ca = site.path().display().to_string();
        switch.farside(&["pki", "init", "--directory", &ca])?;
        let mut hosts = Vec::new();
        for (name, address) in HOSTS {
            let host = Host::new(name)?;
            let pid = host.pid();
            switch.ip(&[
                "link", "add", name, "type", "veth", "peer", "name", "wire", "netns", &pid,
            ])?;
            switch.ip(&["link", "set", name, "master", "bridge", "up"])?;
            host.ip(&["address", "add", &format!("{address}/24"), "dev", "wire"])?;
            host.ip(&["link", "set", "wire", "up"])?;
            host.ip(&["link", "set", "lo", "up"])?;
            host.certify(site.path(), address)?;
            let members: Vec<_> = HOSTS[..MEMBERS]
                .iter()
                .map(|(_, address)| format!("\"https://{address}:2379\""))
                .collect();
            let text = format!("[etcd]\nendpoints = [{}]\n", members.join(", "));
            fs::write(host.path("etc/host.toml"), text)?;
            hosts.push(host);
        }
        Ok(Self {
            members: (0..MEMBERS).map(|_| None).collect(),
            lenders: Vec::new(),
            hosts,
            switch,
            etcd,
            old: Vec::new(),
        })
    }

    pub fn host(&self, name: &str) -> &Host {
        let index = HOSTS.iter().position(|(host, _)| *host == name);
        &self.hosts[index.expect("a host of the list")]
    }

    pub fn address(name: &str) -> String {
        let address = HOSTS.iter().find(|(host, _)| *host == name);
        let (_, address) = address.expect("a host of the list");
        format!("tls:{address}:{PORT}")
    }

    /// Starts a member of etcd, or starts it again.
    pub fn start_member(&mut self, index: usize) -> Result<()> {
        let (name, address) = HOSTS[index];
        let peers = HOSTS[..MEMBERS]
            .iter()
            .map(|(name, address)| format!("{name}=http://{address}:2380"));
        let pki = |file: &str| format!("{ROOT}/etc/pki/{file}");
        let client = format!("https://{address}:2379");
        let peer = format!("http://{address}:2380");
        let mut command: Command = self.hosts[index].command(&self.etcd);
        command
            .args(["--name", name, "--data-dir", &format!("{ROOT}/etcd")])
            .args(["--listen-client-urls", &client])
            .args(["--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer])
            .args(["--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &peers.collect::<Vec<_>>().join(",")])
            .args([
                "--trusted-ca-file",
                &pki("ca-cert.pem"),
                "--client-cert-auth",
            ])
            .args(["--cert-file", &pki("server-cert.pem")])
            .args(["--key-file", &pki("server-key.pem")])
            // Its gateway is a client of its own.
            .args(["--client-cert-file", &pki("client-cert.pem")])
            .args(["--client-key-file", &pki("client-key.pem")])
            .arg("--unsafe-no-fsync");
        self.members[index] = Some(Daemon::start(name, command)?);
        Ok(())
    }

    /// Waits until a member serves clients.
    pub fn wait_member(&self, index: usize) -> Result<()> {
        let member = self.members[index].as_ref().context("it does not run")?;
        member
            .wait_log("serving client traffic securely", SHORT)
            .map(drop)
    }

    /// SIGKILL.
    pub fn kill_member(&mut self, index: usize) -> Result<()> {
        let mut member = self.members[index].take().context("it does not run")?;
        member.kill()?;
        self.old.push(member.log());
        Ok(())
    }

    /// Cuts a host off, without a word, or joins it again.
    pub fn cut(&self, name: &str, cut: bool) -> Result<()> {
        let state = if cut { "down" } else { "up" };
        self.switch.ip(&["link", "set", name, state]).map(drop)
    }

    /// A lender's command line.
    pub fn lend(&self, name: &str, devices: &[String]) -> Result<Vec<String>> {
        let mut args: Vec<String> = ["lend", "--name", name, "--listen", &Self::address(name)]
            .map(str::to_owned)
            .to_vec();
        args.extend(["--borrower", "host=borrower"].map(str::to_owned));
        for device in devices {
            let image = format!("{device}.img");
            fs::File::create(self.host(name).path(&image))?.set_len(IMAGE)?;
            args.extend(["--nvme".to_owned(), format!("{device}={ROOT}/{image}")]);
        }
        Ok(args)
    }

    /// Starts a lender, which may not come to lend.
    pub fn start_lender(&self, name: &str, devices: &[String]) -> Result<Daemon> {
        let args = self.lend(name, devices)?;
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        self.host(name).start(name, &args)
    }

    /// The logs, for a test that fails.
    pub fn story(&self) -> String {
        let lenders = self.lenders.iter().map(Daemon::log);
        let members = self.members.iter().flatten().map(Daemon::log);
        // etcd logs much.
        let tail = |log: String| -> String {
            let lines: Vec<&str> = log.lines().collect();
            lines[lines.len().saturating_sub(15)..].join("\n")
        };
        let members = members.chain(self.old.iter().cloned()).map(tail);
        lenders
            .chain(members)
            .map(|log| format!("---\n{log}\n"))
            .collect()
    }
}
