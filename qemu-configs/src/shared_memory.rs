//! Checks that a command line shares guest RAM with other processes.

use std::collections::BTreeMap;

/// The reason that guest RAM is not shared.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are what the messages name")]
pub enum SharedMemoryError {
    /// RAM is QEMU's private memory.
    #[error(
        "guest RAM is private to QEMU: add `-object \
         memory-backend-memfd,id=mem,size=SIZE,share=on` (SIZE as in -m) and \
         `memory-backend=mem` to -machine"
    )]
    NoBackend,
    /// The machine refers to a missing memory backend.
    #[error("{user} names the memory backend {id:?}, but no -object has that id")]
    UnknownBackend { user: &'static str, id: String },
    /// The memory backend is private.
    #[error("the memory backend {id:?} ({kind}) is private to QEMU: add share=on to its -object")]
    NotShared { id: String, kind: String },
}

/// Checks QEMU's arguments: all guest RAM must be in shared memory backends. Configuration files
/// are not read.
pub fn check_shared_memory(args: &[impl AsRef<str>]) -> Result<(), SharedMemoryError> {
    let mut backends = BTreeMap::new();
    let mut machine_memory = None;
    let mut users = Vec::new();
    for pair in args.windows(2) {
        let (option, value) = (pair[0].as_ref(), pair[1].as_ref());
        // QEMU accepts options with one dash or two.
        let option = option.strip_prefix("--").or(option.strip_prefix('-'));
        match option {
            Some("object") => {
                let object = Properties::parse(value, "qom-type");
                if let (Some(kind), Some(id)) = (object.get("qom-type"), object.get("id"))
                    && kind.starts_with("memory-backend-")
                {
                    let shared = object.switch("share").unwrap_or(shared_by_default(kind));
                    backends.insert(id.to_owned(), (kind.to_owned(), shared));
                }
            }
            Some("machine" | "M") => {
                let machine = Properties::parse(value, "type");
                // The last of several applies.
                if let Some(id) = machine.get("memory-backend") {
                    machine_memory = Some(("-machine", id.to_owned()));
                }
            }
            Some("numa") => {
                let node = Properties::parse(value, "type");
                if let Some(id) = node.get("memdev") {
                    users.push(("-numa", id.to_owned()));
                }
            }
            _ => {}
        }
    }
    users.extend(machine_memory);
    if users.is_empty() {
        return Err(SharedMemoryError::NoBackend);
    }
    for (user, id) in users {
        match backends.get(&id) {
            None => return Err(SharedMemoryError::UnknownBackend { user, id }),
            Some((kind, false)) => {
                let kind = kind.clone();
                return Err(SharedMemoryError::NotShared { id, kind });
            }
            Some((_, true)) => {}
        }
    }
    Ok(())
}

/// A backend's default for `share`.
fn shared_by_default(kind: &str) -> bool {
    matches!(kind, "memory-backend-memfd" | "memory-backend-shm")
}

/// An option's value: `type,key=value,…` with `,,` for a comma, or JSON.
pub(crate) struct Properties(BTreeMap<String, String>);

impl Properties {
    pub(crate) fn parse(value: &str, first_key: &str) -> Self {
        if value.starts_with('{') {
            return Self::parse_json(value);
        }
        let mut properties = BTreeMap::new();
        for (position, part) in split_commas(value).into_iter().enumerate() {
            let (key, value) = match part.split_once('=') {
                Some((key, value)) => (key.to_owned(), value.to_owned()),
                None if position == 0 => (first_key.to_owned(), part),
                // A switch without a value is on.
                None => (part, "on".to_owned()),
            };
            properties.insert(key, value);
        }
        Self(properties)
    }

    /// Not an object: no properties; QEMU reports the error.
    fn parse_json(value: &str) -> Self {
        let object: serde_json::Map<_, _> = serde_json::from_str(value).unwrap_or_default();
        let text = |value: serde_json::Value| match value {
            serde_json::Value::String(text) => text,
            other => other.to_string(),
        };
        Self(object.into_iter().map(|(k, v)| (k, text(v))).collect())
    }

    pub(crate) fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    pub(crate) fn switch(&self, key: &str) -> Option<bool> {
        self.get(key)
            .map(|value| matches!(value, "on" | "yes" | "true" | "y"))
    }
}

fn split_commas(value: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut chars = value.chars().peekable();
    while let Some(c) = chars.next() {
        if c == ',' && chars.next_if_eq(&',').is_none() {
            parts.push(String::new());
        } else if let Some(last) = parts.last_mut() {
            last.push(c);
        }
    }
    parts
}
