//! Issued files, and what is said of unusable ones.

use std::{
    fs::{self, Permissions},
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
};

use farside_pki::{
    CA_CERT, CA_CRL, Certificate, Credentials, Date, PkiError, RevocationList, Side,
    issue::{self, Validity},
    revoke,
};

fn ca() -> tempfile::TempDir {
    let ca = tempfile::tempdir().unwrap();
    issue::init(ca.path(), "test CA", Validity::days(2), false).unwrap();
    ca
}

fn host(ca: &Path, force: bool) -> Result<std::path::PathBuf, PkiError> {
    let dir = ca.join("rack1-a");
    let address = ["10.0.0.2".parse().unwrap(), "fd00::2".parse().unwrap()];
    issue::issue(ca, "rack1-a", &address, Validity::days(1), &dir, force)?;
    Ok(dir)
}

#[test]
fn an_issued_certificate_has_the_hosts_names_and_its_key_is_private() {
    let ca = ca();
    let dir = host(ca.path(), false).unwrap();
    let of = |name: &str| Certificate::of_file(&dir.join(name)).unwrap().remove(0);
    let [server, client] = [Side::Server, Side::Client].map(|side| of(side.files().certificate));
    assert_eq!(server.subject, "CN=rack1-a");
    assert_eq!(server.issuer, "CN=test CA");
    assert_eq!(server.host().as_deref(), Some("rack1-a"));
    assert_eq!(server.all_names(), "rack1-a, 10.0.0.2, fd00::2");
    assert_eq!(client.all_names(), "rack1-a");
    assert_eq!(
        (&server.uses[..], &client.uses[..]),
        (&["server"][..], &["client"][..])
    );
    assert!(server.key != client.key && server.key.len() == 64);
    assert!(of(CA_CERT).is_ca && !server.is_ca);
    for side in [Side::Server, Side::Client] {
        Credentials::load(&dir, side).unwrap();
        let mode = fs::metadata(dir.join(side.files().key)).unwrap().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
    let mode = fs::metadata(ca.path().join("ca-key.pem")).unwrap().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert!(!dir.join("ca-key.pem").exists());
}

#[test]
fn nothing_is_replaced_without_force() {
    let ca = ca();
    let dir = host(ca.path(), false).unwrap();
    let key = dir.join("server-key.pem");
    let before = fs::read(&key).unwrap();
    let error = host(ca.path(), false).unwrap_err();
    assert!(
        matches!(&error, PkiError::Exists { path } if *path == key),
        "{error}"
    );
    let error = issue::init(ca.path(), "other", Validity::days(1), false).unwrap_err();
    assert!(matches!(error, PkiError::Exists { .. }), "{error}");
    assert!(fs::read(&key).unwrap() == before);
    // A daemon of the key's group goes on reading it.
    fs::set_permissions(&key, Permissions::from_mode(0o640)).unwrap();
    host(ca.path(), true).unwrap();
    assert!(fs::read(&key).unwrap() != before);
    assert_eq!(fs::metadata(&key).unwrap().mode() & 0o777, 0o640);
    Credentials::load(&dir, Side::Server).unwrap();
}

#[test]
fn what_cannot_be_issued_is_named() {
    let ca = ca();
    for name in ["", "a b", "*.rack1", "../x", "a/b"] {
        let error = issue::issue(ca.path(), name, &[], Validity::days(1), ca.path(), true);
        assert!(matches!(error, Err(PkiError::Name(_))), "{name}");
    }
    let other = tempfile::tempdir().unwrap();
    issue::init(other.path(), "other CA", Validity::days(1), false).unwrap();
    fs::copy(
        other.path().join("ca-key.pem"),
        ca.path().join("ca-key.pem"),
    )
    .unwrap();
    let error = host(ca.path(), false).unwrap_err();
    assert!(matches!(error, PkiError::Mismatch { .. }), "{error}");
}

#[test]
fn unusable_files_are_named() {
    type Spoil = fn(&Path);
    let cases: [(&str, Spoil, &str); 7] = [
        (
            "client-key.pem",
            |path| fs::set_permissions(path, Permissions::from_mode(0o644)).unwrap(),
            "every user can read",
        ),
        (
            "client-key.pem",
            |path| fs::write(path, "x").unwrap(),
            "is invalid",
        ),
        (
            "client-key.pem",
            |path| fs::remove_file(path).unwrap(),
            "cannot read",
        ),
        (
            "client-cert.pem",
            |path| fs::write(path, "").unwrap(),
            "has no certificate",
        ),
        (
            "ca-cert.pem",
            |path| fs::remove_file(path).unwrap(),
            "cannot read",
        ),
        (
            "ca-crl.pem",
            |path| fs::write(path, "").unwrap(),
            "no revocation list",
        ),
        (
            "client-key.pem",
            |path| {
                fs::copy(path.with_file_name("server-key.pem"), path).unwrap();
            },
            "does not belong to",
        ),
    ];
    let ca = ca();
    for (file, spoil, words) in cases {
        let dir = host(ca.path(), true).unwrap();
        Credentials::load(&dir, Side::Client).unwrap();
        spoil(&dir.join(file));
        let error = Credentials::load(&dir, Side::Client)
            .unwrap_err()
            .to_string();
        let path = dir.join(file).display().to_string();
        assert!(error.contains(words) && error.contains(&path), "{error}");
        fs::remove_dir_all(&dir).unwrap();
    }
}

#[test]
fn a_ca_revokes_what_it_has_issued() {
    let ca = ca();
    let dir = host(ca.path(), false).unwrap();
    let file = ca.path().join(CA_CRL);
    assert_eq!(RevocationList::of_file(&file).unwrap(), []);
    let certificate = dir.join(Side::Client.files().certificate);
    revoke(ca.path(), std::slice::from_ref(&certificate), 3).unwrap();
    let list = RevocationList::of_file(&file).unwrap().remove(0);
    assert_eq!(list.issuer, "CN=test CA");
    let expires = list.next_update.unwrap();
    assert!(Date(Date::now().0 + 2 * 24 * 3600) < expires, "{expires}");
    // The host's own certificate, once it has the list.
    Credentials::load(&dir, Side::Client).unwrap();
    fs::copy(&file, dir.join(CA_CRL)).unwrap();
    let error = Credentials::load(&dir, Side::Client).unwrap_err();
    assert!(error.to_string().contains("is revoked"), "{error}");

    let other = tempfile::tempdir().unwrap();
    issue::init(other.path(), "other CA", Validity::days(2), false).unwrap();
    let error = revoke(other.path(), &[certificate], 3).unwrap_err();
    assert!(error.to_string().contains("CN=test CA"), "{error}");
    assert!(!other.path().join(CA_CRL).exists());
}
