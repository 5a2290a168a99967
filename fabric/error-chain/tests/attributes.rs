//! No error of this workspace includes its source in its own text: the chain would print it
//! twice.

use std::{fs, path::Path};

/// The `#[error(..)]` attributes of a file, each with the start of its variant.
fn attributes(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.split("#[error(").skip(1).filter_map(|rest| {
        let (attribute, variant) = rest.split_once(")]\n")?;
        let end = variant.find("\n    },").or(variant.find("),\n"));
        Some((attribute, &variant[..end.unwrap_or(variant.len())]))
    })
}

/// The fields of a variant that are marked as its source.
fn sources(variant: &str) -> impl Iterator<Item = &str> {
    let marks = ["#[source]", "#[from]"];
    let marked = marks
        .into_iter()
        .flat_map(|mark| variant.split(mark).skip(1));
    marked.filter_map(|rest| {
        let (name, _) = rest
            .trim_start()
            .trim_start_matches("pub ")
            .split_once(':')?;
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        (!name.is_empty() && name.chars().all(is_name)).then_some(name)
    })
}

/// Whether a format string, or an argument of it, shows `field`.
fn shows(attribute: &str, field: &str) -> bool {
    let open = format!("{{{field}");
    attribute
        .split(&open)
        .skip(1)
        .any(|rest| rest.starts_with(['}', ':']))
}

fn embeds_its_source((attribute, variant): &(&str, &str)) -> bool {
    let fields = variant.lines().next().unwrap_or_default();
    let unnamed = fields.contains("(#[from]") || fields.contains("(#[source]");
    shows(attribute, "source")
        || shows(attribute, "0") && unnamed
        || sources(variant).any(|field| shows(attribute, field))
}

fn search(directory: &Path, found: &mut Vec<String>, files: &mut usize) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() {
            if !name.starts_with(['.']) && !name.starts_with("target") {
                search(&path, found, files);
            }
        } else if name.ends_with(".rs") && name != "attributes.rs" {
            *files += 1;
            let text = fs::read_to_string(&path).unwrap();
            let bad = attributes(&text).filter(embeds_its_source);
            found.extend(bad.map(|(attribute, _)| format!("{}: {attribute}", path.display())));
        }
    }
}

#[test]
fn a_cause_is_in_the_chain_and_not_in_the_text() {
    let (mut found, mut files) = (Vec::new(), 0);
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let workspace = package.ancestors().nth(2).unwrap();
    search(workspace, &mut found, &mut files);
    assert!(files > 100, "{files} files in {}", workspace.display());
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn a_source_of_any_name_is_found() {
    let bad = |text: &str| attributes(text).filter(embeds_its_source).count();
    for text in [
        "#[error(\"no: {source}\")]\n    A { source: E },\n",
        "#[error(\"no: {0:?}\")]\n    A(#[source] E),\n",
        "#[error(\"no: {why}\")]\n    A {\n        #[source]\n        why: E,\n    },\n",
        "#[error(\"no: {why:#}\")]\n    A { x: u8, #[from] why: E },\n",
    ] {
        assert_eq!(bad(text), 1, "{text}");
    }
    for text in [
        "#[error(\"no: {whyever}\")]\n    A {\n        #[source]\n        why: E,\n        whyever: u8,\n    },\n",
        "#[error(\"no\")]\n    A(#[source] E),\n    #[error(\"{why}\")]\n    B { why: E },\n",
        "#[error(\"no: {0}\")]\n    A(u8),\n",
    ] {
        assert_eq!(bad(text), 0, "{text}");
    }
}
