//! The proof from outside: the host reads the lender's image itself, with e2fsprogs, after
//! guest and farside have ended.

use std::{
    io::Read,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context, Result};
use farside_testbed::Testbed;
use sha2::{Digest, Sha256};

/// The contents of the image.
#[derive(Clone, Debug, Default)]
pub(super) struct OutsideFacts {
    /// Bytes of the file that the guest wrote.
    pub(super) file_size: u64,
    /// SHA-256 of them.
    pub(super) sha256: String,
    /// fsck's complaints; empty if the file system is clean.
    pub(super) fsck: String,
}

/// Examines the image for `file`.
pub(super) fn examine(testbed: &Testbed, image: &Path, file: &str) -> Result<OutsideFacts> {
    let mut debugfs = testbed.tool("debugfs");
    debugfs.args(["-R", &format!("cat {file}")]).arg(image);
    let (file_size, sha256) = hash_output(debugfs)?;

    // -n: changes nothing; -f: checks even a file system that is marked clean.
    let mut fsck = testbed.tool("fsck.ext4");
    fsck.args(["-f", "-n"]).arg(image);
    let output = fsck.output().context("running fsck.ext4")?;
    let said = [output.stdout, output.stderr].concat();
    Ok(OutsideFacts {
        file_size,
        sha256,
        fsck: match output.status.success() {
            true => String::new(),
            false => String::from_utf8_lossy(&said).trim().to_owned(),
        },
    })
}

/// Length and SHA-256 of a command's output.
fn hash_output(mut command: Command) -> Result<(u64, String)> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .with_context(|| format!("starting {command:?}"))?;
    let mut stdout = child.stdout.take().context("no standard output")?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let mut len = 0;
    loop {
        let read = stdout.read(&mut buffer).context("reading from debugfs")?;
        if read == 0 {
            break;
        }
        hash.update(&buffer[..read]);
        len += read as u64;
    }
    child.wait().context("waiting for debugfs")?;
    let sha256 = hash.finalize();
    Ok((
        len,
        sha256.iter().map(|byte| format!("{byte:02x}")).collect(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_hashed_whole() {
        let mut command = Command::new("printf");
        command.arg("abc");
        let (len, sha256) = hash_output(command).unwrap();
        assert_eq!(len, 3);
        assert_eq!(
            sha256,
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }
}
