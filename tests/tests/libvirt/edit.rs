//! Domains defined in libvirt, edited by `farside libvirt`.

use anyhow::{Result, ensure};

use crate::{domain::Domain, stage::Stage};

/// Size of each NVMe namespace.
const DRIVE: u64 = 64 << 20;

pub fn what_libvirt_wrote_anew_is_edited_again_and_undone(stage: &Stage) -> Result<()> {
    let _lender = stage.lend_two(DRIVE)?;
    let borrowers = || -> Result<[Option<String>; 2]> {
        let status = stage.cluster.status()?;
        Ok([
            status.lent("disk0")?.borrowed_by.clone(),
            status.lent("disk1")?.borrowed_by.clone(),
        ])
    };
    let web1 = || Some("web1".to_owned());
    let domain = Domain::define(stage, "web1", &["disk0"])?;
    let change = |xml: &str, words: &[&str]| -> Result<String> {
        let ended = stage.run_with(&[&["farside", "libvirt"], words].concat(), xml.as_bytes())?;
        ensure!(ended.status.success(), "{words:?}: {ended:?}");
        Ok(ended.stdout)
    };

    // libvirt has rearranged and completed the XML; farside still accepts it.
    let one = domain.xml()?;
    change(&one, &["--check", "-"])?;
    ensure!(change(&one, &["--edit", "-", "--device", "disk0"])? == one);

    let two = change(&one, &["--edit", "-", "--device", "disk1"])?;
    domain.redefine(&two)?;
    ensure!(change(&domain.xml()?, &["--edit", "-", "--device", "disk1"])? == domain.xml()?);
    stage.virsh(&["start", "--paused", "web1"])?;
    ensure!(borrowers()? == [web1(), web1()], "{:?}", borrowers()?);
    domain.destroy()?;
    stage.nothing_left_of("web1")?;

    domain.redefine(&change(
        &domain.xml()?,
        &["--remove", "-", "--device", "disk0"],
    )?)?;
    stage.virsh(&["start", "--paused", "web1"])?;
    ensure!(borrowers()? == [None, web1()], "{:?}", borrowers()?);
    domain.destroy()?;

    // Without the last device, it is an ordinary domain.
    domain.redefine(&change(&domain.xml()?, &["--remove", "-"])?)?;
    ensure!(!domain.xml()?.contains("urn:farside"), "{}", domain.xml()?);
    stage.virsh(&["start", "--paused", "web1"])?;
    ensure!(!stage.backend_runs("web1")?);
    ensure!(borrowers()? == [None, None], "{:?}", borrowers()?);
    domain.destroy()
}
