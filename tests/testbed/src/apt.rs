//! A private apt: fetches packages of a release that the machine does not run, into the
//! cache, as any user, checking signatures, from the mirror that the machine's apt uses.

use std::collections::HashSet;
use std::env;
use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::command::output;
use crate::progress::Progress;
use crate::recipe;

/// Names a Debian mirror if the machine's apt has none.
const MIRROR_VARIABLE: &str = "FARSIDE_DEBIAN_MIRROR";
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
const INSTALL_APT: &str = "the test bed is made of Debian packages, so it needs apt and dpkg (on Debian and Ubuntu: \
     packages apt and dpkg)";

/// The packages to fetch.
#[derive(Debug)]
pub(crate) struct Wanted<'a> {
    /// The suites to take packages from, such as `trixie` and `trixie-backports`.
    pub(crate) suites: &'a [String],
    /// Packages, fetched with their dependencies.
    pub(crate) packages: &'a [&'a str],
    /// Packages assumed to be installed.
    pub(crate) installed: &'a [&'a str],
}

/// Fetches packages into `directory`, which is used for these alone, and returns the package
/// files.
pub(crate) fn download(
    directory: &Path,
    wanted: &Wanted<'_>,
    progress: &Progress,
) -> Result<Vec<PathBuf>> {
    let config = configure(directory, wanted)?;
    let apt = |args: &[&str]| {
        let mut command = Command::new("apt-get");
        command.env("APT_CONFIG", &config).args(args);
        command.env("LC_ALL", "C");
        command
    };

    let task = progress.spinner("Fetching the package lists");
    output(&mut apt(&["-qq", "update"]), INSTALL_APT).context(
        "fetching Debian's package lists failed; check that the machine reaches the mirror of \
         its own apt (`apt-get update`)",
    )?;
    task.done();

    // apt lists only the files that it has yet to fetch: so query with an empty archive.
    let mut install = vec!["install", "--yes"];
    install.extend(wanted.packages);
    let nothing = directory.join("nothing");
    fs::create_dir_all(nothing.join("partial"))
        .with_context(|| format!("creating {}", nothing.display()))?;
    let from_nothing = format!("Dir::Cache::archives={}", nothing.display());
    let listing = output(
        apt(&install).args(["-qq", "--print-uris", "-o", &from_nothing]),
        INSTALL_APT,
    )
    .context("choosing packages failed")?;
    let names = file_names(&listing);

    let task = progress.bar("Downloading Debian packages", 100);
    let mut child = apt(&install)
        .args(["-qq", "--download-only", "-o", "APT::Status-Fd=1"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("running apt-get")?;
    let stdout = child.stdout.take().context("apt-get has no output")?;
    for line in BufReader::new(stdout).lines() {
        if let Some(percent) = download_percent(&line.context("reading apt-get's status")?) {
            task.set(percent);
        }
    }
    let result = child.wait_with_output().context("waiting for apt-get")?;
    ensure!(
        result.status.success(),
        "downloading Debian packages failed:\n{}",
        String::from_utf8_lossy(&result.stderr).trim_end()
    );
    task.done();
    // Files of a former recipe are not needed any more.
    let archives = directory.join("archives");
    let (wanted, stale): (Vec<PathBuf>, Vec<PathBuf>) =
        package_files(&archives)?.into_iter().partition(|path| {
            path.file_name()
                .is_some_and(|name| names.contains(&*name.to_string_lossy()))
        });
    for file in stale {
        fs::remove_file(&file).with_context(|| format!("removing {}", file.display()))?;
    }
    ensure!(
        !wanted.is_empty() && wanted.len() == names.len(),
        "apt-get fetched {} of {} packages",
        wanted.len(),
        names.len()
    );
    Ok(wanted)
}

/// Unpacks packages into `root`.
pub(crate) fn unpack(packages: &[PathBuf], root: &Path, progress: &Progress) -> Result<()> {
    let task = progress.bar("Unpacking packages", packages.len() as u64);
    for (done, package) in packages.iter().enumerate() {
        task.set(done as u64);
        output(
            Command::new("dpkg-deb").arg("-x").arg(package).arg(root),
            INSTALL_APT,
        )
        .with_context(|| format!("unpacking {}", package.display()))?;
    }
    task.done();
    Ok(())
}

/// Writes the configuration of the private apt and returns its path.
fn configure(directory: &Path, wanted: &Wanted<'_>) -> Result<PathBuf> {
    for sub in ["lists/partial", "archives/partial"] {
        let path = directory.join(sub);
        fs::create_dir_all(&path).with_context(|| format!("creating {}", path.display()))?;
    }
    let write = |name: &str, text: &str| {
        let path = directory.join(name);
        fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
        Ok::<_, anyhow::Error>(path)
    };
    write("status", &installed(wanted.installed))?;
    write("preferences", &preferences(recipe::FROM_BACKPORTS))?;
    let source = Source::of_this_machine()?;
    write(
        "farside.sources",
        &format!(
            "Types: deb\nURIs: {}\nSuites: {}\nComponents: main\nArchitectures: amd64\n\
             Signed-By: {KEYRING}\nTargets: Packages\n",
            source.mirror,
            wanted.suites.join(" "),
        ),
    )?;
    write("apt.conf", &config(directory, &source.settings))
}

/// The source of Debian's packages, and the machine's network settings for it.
#[derive(Debug)]
pub(crate) struct Source {
    mirror: String,
    settings: Vec<String>,
}

impl Source {
    /// As in the configuration of the machine's apt.
    pub(crate) fn of_this_machine() -> Result<Self> {
        ensure!(
            Path::new(KEYRING).exists(),
            "{KEYRING} is missing, so signatures cannot be checked; install the package \
             debian-archive-keyring"
        );
        let machine = output(
            Command::new("apt-config").args(["dump", "--format", "%F \"%v\";%n"]),
            INSTALL_APT,
        )?;
        Ok(Self {
            mirror: mirror()?,
            settings: settings(&machine),
        })
    }

    /// Settings of apt, each `NAME "VALUE";`.
    pub(crate) fn settings(&self) -> &[String] {
        &self.settings
    }

    /// A line of `sources.list`.
    pub(crate) fn line(&self, suite: &str) -> String {
        let mirror = &self.mirror;
        format!("deb [signed-by={KEYRING}] {mirror} {suite} main")
    }
}

/// The settings for access to mirrors (proxies, certificates), without hooks.
fn settings(machine: &str) -> Vec<String> {
    let kept = [
        "Acquire::http",
        "Acquire::https",
        "Acquire::ftp",
        "Acquire::Check-",
    ];
    machine
        .lines()
        .filter(|line| kept.iter().any(|prefix| line.starts_with(prefix)))
        .map(str::to_owned)
        .collect()
}

/// The private apt's configuration: the machine's settings, and separate directories.
fn config(directory: &Path, settings: &[String]) -> String {
    let mut text: String = settings.iter().map(|line| format!("{line}\n")).collect();
    let directory = directory.display();
    let own = [
        ("Dir::Etc::main", "/dev/null".to_owned()),
        ("Dir::Etc::parts", "/dev/null".to_owned()),
        (
            "Dir::Etc::sourcelist",
            format!("{directory}/farside.sources"),
        ),
        ("Dir::Etc::sourceparts", "/dev/null".to_owned()),
        ("Dir::Etc::preferences", format!("{directory}/preferences")),
        ("Dir::Etc::preferencesparts", "/dev/null".to_owned()),
        ("Dir::Etc::trusted", "/dev/null".to_owned()),
        ("Dir::Etc::trustedparts", "/dev/null".to_owned()),
        ("Dir::State", directory.to_string()),
        ("Dir::State::lists", format!("{directory}/lists")),
        ("Dir::State::status", format!("{directory}/status")),
        ("Dir::Cache", directory.to_string()),
        ("Dir::Cache::archives", format!("{directory}/archives")),
        // Saves 90 MB of indexes, which take a second to make.
        ("Dir::Cache::pkgcache", String::new()),
        ("Dir::Cache::srcpkgcache", String::new()),
        ("Dir::Log", directory.to_string()),
        ("APT::Architecture", "amd64".to_owned()),
        ("APT::Install-Recommends", "false".to_owned()),
        // The cache may be readable by the user only, and the lock is this process's.
        ("APT::Sandbox::User", String::new()),
        ("Debug::NoLocking", "true".to_owned()),
        // A list that cannot be fetched is an error, not a warning.
        ("APT::Update::Error-Mode", "any".to_owned()),
        ("Acquire::Languages", "none".to_owned()),
        ("Acquire::Retries", "3".to_owned()),
    ];
    for (name, value) in own {
        writeln!(text, "{name} \"{value}\";").expect("a String takes all");
    }
    text.push_str("#clear APT::Architectures;\nAPT::Architectures { \"amd64\"; };\n");
    text
}

/// Prefers these source packages from backports.
pub(crate) fn preferences(backports: &[&str]) -> String {
    let sources: Vec<String> = backports
        .iter()
        .map(|source| format!("src:{source}"))
        .collect();
    format!(
        "Package: {}\nPin: release n={}-backports\nPin-Priority: 900\n",
        sources.join(" "),
        recipe::RELEASE
    )
}

/// A dpkg status file in which only these packages are installed.
fn installed(packages: &[&str]) -> String {
    packages
        .iter()
        .map(|package| {
            format!(
                "Package: {package}\nStatus: install ok installed\nVersion: 999:1\n\
                 Architecture: amd64\nMulti-Arch: allowed\nMaintainer: nobody\n\
                 Description: taken for installed\n\n"
            )
        })
        .collect()
}

/// The machine's mirror of the Debian archive.
fn mirror() -> Result<String> {
    if let Ok(mirror) = env::var(MIRROR_VARIABLE)
        && !mirror.is_empty()
    {
        return Ok(mirror);
    }
    // Package lists identify a mirror's archive, and a fresh machine or a container image
    // may have none.
    let listing = index_targets(&[])?;
    if let Some(mirror) = debian_mirror(&listing) {
        return Ok(mirror.to_owned());
    }
    let lists = tempfile::tempdir().context("creating a directory")?;
    let own = [
        format!("Dir::State::lists={}", lists.path().display()),
        format!("Dir::Cache={}", lists.path().display()),
        "Debug::NoLocking=true".to_owned(),
        "APT::Sandbox::User=".to_owned(),
    ];
    let options: Vec<&str> = own.iter().flat_map(|option| ["-o", option]).collect();
    // Mirrors of other archives may be unreachable.
    let updated = output(
        Command::new("apt-get")
            .args(&options)
            .args(["-qq", "update"]),
        INSTALL_APT,
    );
    match debian_mirror(&index_targets(&options)?) {
        Some(mirror) => Ok(mirror.to_owned()),
        None => {
            updated.context("fetching the package lists of this machine's apt failed")?;
            bail!(
                "this machine's apt configuration names no mirror of the Debian archive; name one \
                 with {MIRROR_VARIABLE}=URI"
            )
        }
    }
}

fn index_targets(options: &[&str]) -> Result<String> {
    output(
        Command::new("apt-get").args(options).args([
            "indextargets",
            "--format",
            "$(CREATED_BY)|$(ORIGIN)|$(LABEL)|$(REPO_URI)",
        ]),
        INSTALL_APT,
    )
}

fn debian_mirror(listing: &str) -> Option<&str> {
    listing.lines().find_map(|line| {
        let uri = line.strip_prefix("Packages|Debian|Debian|")?;
        (!uri.is_empty()).then_some(uri)
    })
}

/// The file names in what `apt-get --print-uris` prints: `'URI' name size hash`.
fn file_names(listing: &str) -> HashSet<String> {
    listing
        .lines()
        .filter(|line| line.starts_with('\''))
        .filter_map(|line| line.split_whitespace().nth(1))
        .map(str::to_owned)
        .collect()
}

/// The percentage in a line of apt's status: `dlstatus:item:percent:text`.
fn download_percent(line: &str) -> Option<u64> {
    let percent = line.strip_prefix("dlstatus:")?.split(':').nth(1)?;
    percent.parse::<f64>().ok().map(|percent| percent as u64)
}

fn package_files(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut files: Vec<PathBuf> = fs::read_dir(directory)
        .and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect())
        .with_context(|| format!("listing {}", directory.display()))?;
    files.retain(|path| path.extension().is_some_and(|extension| extension == "deb"));
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machines_hooks_are_left_behind() {
        let machine = "APT::Update::Post-Invoke:: \"rm -f x\";\n\
                       Acquire::http::Proxy \"http://proxy.invalid:3128\";\n";
        let text = config(Path::new("/c"), &settings(machine));
        assert!(text.contains("proxy.invalid"));
        assert!(!text.contains("Post-Invoke"));
        assert!(text.contains("Dir::State::status \"/c/status\";"));
    }

    #[test]
    fn the_mirror_is_the_one_of_the_main_archive() {
        let listing = "DEP-11|Debian|Debian|http://a.invalid/\n\
                       Packages|Debian|Debian-Security|http://b.invalid/\n\
                       Packages|Other|Other|http://c.invalid/\n\
                       Packages|Debian|Debian|http://d.invalid/\n";
        assert_eq!(debian_mirror(listing), Some("http://d.invalid/"));
        assert_eq!(
            debian_mirror("Packages|Ubuntu|Ubuntu|http://e.invalid/"),
            None
        );
    }

    #[test]
    fn apts_output_is_read() {
        let listing = "'http://m.invalid/p/fio_3_amd64.deb' fio_3_amd64.deb 12 SHA256:0\nnoise\n";
        assert_eq!(file_names(listing), ["fio_3_amd64.deb".to_owned()].into());
        assert_eq!(download_percent("dlstatus:3:41.6:Retrieving"), Some(41));
        assert_eq!(download_percent("pmstatus:x:1:y"), None);
    }
}
