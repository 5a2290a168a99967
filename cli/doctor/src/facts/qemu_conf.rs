//! libvirt's `qemu.conf`: the few of its settings that matter here.

use std::collections::BTreeMap;

/// Settings, as `virConf` reads them: `key = value`, where a value is a number,
/// a quoted text, or a list of texts in brackets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct QemuConf(BTreeMap<String, Vec<String>>);

impl QemuConf {
    pub(crate) fn parse(text: &str) -> Self {
        let mut settings = BTreeMap::new();
        let mut lines = text.lines().map(without_comment);
        while let Some(line) = lines.next() {
            let Some((key, value)) = line.split_once('=') else {
                continue;
            };
            let mut value = value.trim().to_owned();
            while value.starts_with('[') && !value.ends_with(']') {
                let Some(more) = lines.next() else { break };
                value += more.trim();
            }
            settings.insert(key.trim().to_owned(), words(&value));
        }
        Self(settings)
    }

    /// All texts of a setting; `None` where it is not set.
    pub(crate) fn list(&self, key: &str) -> Option<&[String]> {
        self.0.get(key).map(Vec::as_slice)
    }

    /// The one text of a setting.
    pub(crate) fn word(&self, key: &str) -> Option<&str> {
        self.list(key)?.first().map(String::as_str)
    }
}

/// A line up to its comment, if that is not in a text.
fn without_comment(line: &str) -> &str {
    let mut quote = None;
    for (at, c) in line.char_indices() {
        match (quote, c) {
            (None, '#') => return line[..at].trim(),
            (None, '"' | '\'') => quote = Some(c),
            (Some(open), c) if open == c => quote = None,
            _ => {}
        }
    }
    line.trim()
}

fn words(value: &str) -> Vec<String> {
    let inside = value.trim_start_matches('[').trim_end_matches(']');
    let words = inside
        .split(',')
        .map(|word| word.trim().trim_matches(['"', '\'']));
    let words = words.filter(|word| !word.is_empty());
    words.map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_lists_and_comments() {
        let conf = QemuConf::parse(
            "# user = \"nobody\"\nuser = \"libvirt-qemu\" # \"Debian\"\n\
             security_driver = [ \"apparmor\", \"dac\" ]\nnamespaces = []\n\
             cgroup_device_acl = [\n  \"/dev/null\", \"/dev/full\", # both\n  \"/dev/kvm\"\n]\n\
             max_core = 1\nrubbish\nname = \"a # b\"\n",
        );
        assert_eq!(conf.word("user"), Some("libvirt-qemu"));
        assert_eq!(conf.list("security_driver").unwrap(), ["apparmor", "dac"]);
        assert_eq!(conf.list("namespaces").unwrap().len(), 0);
        let acl = ["/dev/null", "/dev/full", "/dev/kvm"];
        assert_eq!(conf.list("cgroup_device_acl").unwrap(), acl);
        assert_eq!(
            (conf.word("max_core"), conf.word("name")),
            (Some("1"), Some("a # b"))
        );
        assert_eq!(conf.list("group"), None);
        assert_eq!(QemuConf::parse("a = [ \"b\",").list("a").unwrap(), ["b"]);
    }
}
