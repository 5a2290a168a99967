use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use farside_pki::{
    issue::{self, Validity},
    revoke,
};

use super::*;
use crate::{
    Host, Level,
    checks::tests::says,
    facts::{Limit, Unit, look_at_certificates},
};

/// A host `rack1-a` with a lender, and the CA of its certificates.
struct Site {
    root: tempfile::TempDir,
}

impl Site {
    fn new(days: u32) -> Self {
        let site = Self {
            root: tempfile::tempdir().unwrap(),
        };
        issue::init(&site.ca(), "test CA", Validity::days(900), false).unwrap();
        let address = ["10.0.0.2".parse().unwrap()];
        let (ca, dir) = (site.ca(), site.pki());
        issue::issue(&ca, "rack1-a", &address, Validity::days(days), &dir, true).unwrap();
        site
    }

    fn ca(&self) -> PathBuf {
        self.root.path().join("ca")
    }

    fn pki(&self) -> PathBuf {
        self.root.path().join("pki")
    }

    fn facts_of(&self, hostname: &str, listen: &str) -> Facts {
        fs::create_dir_all(self.root.path().join("etc")).unwrap();
        fs::write(self.root.path().join("etc/hostname"), hostname).unwrap();
        let lender = format!(
            "listen = [\"{listen}\"]\ntls.directory = \"{}\"",
            self.pki().display()
        );
        let lender = Some(Ok(toml::from_str(&lender).unwrap()));
        let host = Host::at(self.root.path());
        Facts {
            certificates: look_at_certificates(&host, &[], lender.as_ref()),
            lender,
            ..Facts::default()
        }
    }

    fn facts(&self) -> Facts {
        self.facts_of("rack1-a", "tls:0.0.0.0:7410")
    }

    /// The only finding.
    #[track_caller]
    fn says(&self, level: Level, word: &str) -> Finding {
        says(judge(&self.facts()), level, word)
    }

    fn publish(&self, ca: &Path, certificates: &[PathBuf], days: u32) {
        revoke(ca, certificates, days).unwrap();
        fs::copy(ca.join(CA_CRL), self.pki().join(CA_CRL)).unwrap();
    }
}

#[test]
fn only_with_tls() {
    let root = tempfile::tempdir().unwrap();
    let lender = toml::from_str("listen = [\"tcp:127.0.0.1:7410\"]").unwrap();
    let looked = look_at_certificates(&Host::at(root.path()), &[], Some(&Ok(lender)));
    assert!(looked.is_empty(), "{looked:?}");
}

#[test]
fn dates() {
    let said = Site::new(90).says(Level::Ok, "server-cert.pem is valid until");
    assert!(said.what.contains("for rack1-a, 10.0.0.2"), "{said:?}");
    let site = Site::new(10);
    let mut facts = site.facts();
    facts.certificates[0].now = Date(Date::now().0 + 60);
    let what = "server-cert.pem (CN=rack1-a) expires on";
    let said = says(judge(&facts), Level::Note, what);
    assert!(said.what.ends_with("in 9 days"), "{said:?}");
    let fix = "farside pki issue rack1-a --address 10.0.0.2 --force ";
    assert!(said.fix[0].starts_with(fix), "{said:?}");

    let expired = Validity {
        from: std::time::UNIX_EPOCH,
        until: std::time::SystemTime::now() - std::time::Duration::from_secs(60),
    };
    issue::issue(&site.ca(), "rack1-a", &[], expired, &site.pki(), true).unwrap();
    let said = site.says(Level::Problem, "server-cert.pem (CN=rack1-a) expired on 2");
    assert!(said.fix[0].starts_with("farside pki issue rack1-a --force "));
    issue::init(&site.ca(), "test CA", expired, true).unwrap();
    issue::issue(
        &site.ca(),
        "rack1-a",
        &[],
        Validity::days(90),
        &site.pki(),
        true,
    )
    .unwrap();
    let said = site.says(Level::Problem, "ca-cert.pem (CN=test CA) expired on 2");
    assert!(said.fix[0].starts_with("farside pki init --force"));
}

#[test]
fn another_ca_and_another_host() {
    let site = Site::new(90);
    for (hostname, listen) in [
        ("rack1-a.example.org", "tls:0.0.0.0:7410"),
        ("other", "tls:10.0.0.2:7410"),
        ("other", "tls:Rack1-A:7410"),
    ] {
        let found = judge(&site.facts_of(hostname, listen));
        says(found, Level::Ok, "is valid until");
    }
    let found = judge(&site.facts_of("rack1-b", "tls:10.0.0.9:7410"));
    let said = says(
        found,
        Level::Note,
        "none of which is this host (rack1-b, 10.0.0.9)",
    );
    let fix = "farside pki issue rack1-a --address 10.0.0.2 --address 10.0.0.9 --force ";
    assert!(said.fix[0].starts_with(fix), "{said:?}");
    issue::init(&site.ca(), "other CA", Validity::days(90), true).unwrap();
    fs::copy(site.ca().join(CA_CERT), site.pki().join(CA_CERT)).unwrap();
    site.says(Level::Problem, "is not issued by a CA in ca-cert.pem");
    fs::remove_file(site.pki().join("server-cert.pem")).unwrap();
    site.says(Level::Problem, "cannot read");
}

#[test]
fn revocation_lists() {
    let site = Site::new(90);
    site.publish(&site.ca(), &[], 90);
    site.says(Level::Ok, "is valid until");
    site.publish(&site.ca(), &[], 10);
    let said = site.says(Level::Note, "the revocation list of CN=test CA in");
    assert!(said.fix[0].starts_with("farside pki revoke "), "{said:?}");
    let mut facts = site.facts();
    facts.certificates[0].now = Date(Date::now().0 + 11 * DAY);
    says(judge(&facts), Level::Note, "which is past");

    let other = Site::new(90);
    issue::init(&other.ca(), "other CA", Validity::days(90), true).unwrap();
    site.publish(&other.ca(), &[], 90);
    site.says(Level::Problem, "no revocation list of the CA CN=test CA");
}

#[test]
fn modes_of_files() {
    let site = Site::new(90);
    let key = site.pki().join("server-key.pem");
    let set = |mode| fs::set_permissions(&key, Permissions::from_mode(mode)).unwrap();
    set(0o644);
    let said = site.says(Level::Problem, "every user can read the private key");
    assert_eq!(said.fix[0], format!("chmod o= {}", key.display()));
    set(0o602);
    let said = site.says(Level::Problem, "every user may write to");
    assert_eq!(said.fix, [format!("chmod o-w {}", key.display())]);

    // The unit's user is another one.
    set(0o600);
    let mut facts = site.facts();
    let unit = Unit {
        path: "/u".into(),
        memlock: Limit::None,
        user: "farside".into(),
        binds: false,
    };
    facts.systemd.runs = true;
    facts.systemd.backend = Some(unit.clone());
    facts.systemd.lender = Some(unit);
    facts.users = Users::parse("farside:x:4242:4243::/:\n", "tls:x:4244:farside\n");
    let said = says(
        judge(&facts),
        Level::Problem,
        "user farside cannot read the private key",
    );
    assert!(said.fix[0].starts_with("chgrp 4243 "), "{said:?}");
    for (mode, uid, gid, granted) in [
        (0o640, 0, 4243, true),
        (0o640, 0, 4244, true),
        (0o600, 0, 4243, false),
        (0o400, 4242, 0, true),
        (0o040, 4242, 4243, false),
    ] {
        for file in &mut facts.certificates[0].files {
            if file.path == key {
                (file.mode, file.uid, file.gid) = (mode, uid, gid);
            }
        }
        let level = judge(&facts)[0].level;
        assert_eq!(level == Level::Ok, granted, "{mode:o} {uid} {gid}");
    }
}
