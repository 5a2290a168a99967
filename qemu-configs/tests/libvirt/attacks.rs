//! Malicious input for a parser, or for an editor that trusts one.

use std::time::{Duration, Instant};

use farside_qemu_configs::{DomainError, check_domain, read_domain, remove_all};

use crate::common::{VIRT_INSTALL, add, added_lines, socket};

/// Performs all operations on a domain; returns the result of adding.
fn all(xml: &str) -> Result<String, DomainError> {
    let _ = check_domain(xml, &socket);
    let _ = read_domain(xml);
    let added = add(xml, &["disk0"]);
    if let Ok(edited) = &added {
        assert_eq!(&remove_all(edited).expect("what was added"), xml);
    }
    added
}

fn domain(inside: &str) -> String {
    format!(
        "<domain type='kvm'><name>vm1</name><memory>1048576</memory>\
         <os><type machine='q35'>hvm</type></os>{inside}</domain>"
    )
}

/// Far above the normal duration on a loaded machine, and far below that of an algorithm
/// with quadratic complexity.
const LONG: Duration = Duration::from_secs(120);

#[test]
fn entities_that_grow_and_files_that_are_named() {
    let mut bomb = String::from("<!DOCTYPE domain [<!ENTITY a0 'ha'>\n");
    for n in 1..=40 {
        bomb += &format!("<!ENTITY a{n} '&a{};&a{};'>\n", n - 1, n - 1);
    }
    bomb += "]>\n";
    bomb += &domain("<title>&a40;</title>");
    let external = "<!DOCTYPE domain [<!ENTITY f SYSTEM 'file:///etc/passwd'>]>";
    let external = format!("{external}{}", domain("<title>&f;</title>"));
    let undeclared = domain("\n<title>&f;</title>");
    for (text, line) in [
        (&bomb, "line 1"),
        (&external, "line 1"),
        (&undeclared, "line 2"),
    ] {
        let error = all(text).expect_err("a refusal");
        assert!(matches!(error, DomainError::Malformed { .. }), "{error:?}");
        assert!(error.to_string().starts_with(line), "{error}");
    }
}

#[test]
fn domains_of_absurd_size() {
    let began = Instant::now();
    let wide = domain(&"<a/>\n".repeat(200_000));
    assert!(all(&wide).is_ok());
    let long = domain(&format!(
        "<!-- {} --><title>{}</title>",
        "x".repeat(4 << 20),
        "y".repeat(4 << 20)
    ));
    assert!(all(&long).is_ok());
    let attributes: String = (0..2_000).map(|n| format!(" a{n}='{n}'")).collect();
    assert!(all(&domain(&format!("<a{attributes}/>"))).is_ok());
    let arguments = "<q:arg value='-device'/><q:arg value='edu,addr=1'/>\n".repeat(20_000);
    let namespace = "http://libvirt.org/schemas/domain/qemu/1.0";
    let arguments = format!("<q:commandline xmlns:q='{namespace}'>{arguments}</q:commandline>");
    let _ = all(&domain(&arguments));
    let devices = "<disk><address type='pci' bus='0x01' slot='0x01'/></disk>\n".repeat(20_000);
    let _ = all(&domain(&format!("<devices>{devices}</devices>")));
    assert!(began.elapsed() < LONG, "{:?}", began.elapsed());
}

/// A thread with the minimum stack size: nesting must not consume stack.
#[test]
fn elements_within_elements() {
    let depth = 100_000;
    let nested = format!("{}{}", "<a>".repeat(depth), "</a>".repeat(depth));
    let open = "<a>".repeat(depth);
    let thread = std::thread::Builder::new().stack_size(1 << 20);
    let nested = thread.spawn(move || [all(&domain(&nested)).err(), all(&domain(&open)).err()]);
    let [nested, open] = nested.expect("a thread").join().expect("no panic");
    // A limit is acceptable.
    assert!(nested.is_none_or(|error| matches!(error, DomainError::Malformed { .. })));
    assert!(
        matches!(open, Some(DomainError::Malformed { .. })),
        "{open:?}"
    );
}

#[test]
fn other_encodings_and_stray_bytes() {
    // A byte order mark, as written by editors on Windows.
    let marked = format!("\u{feff}{VIRT_INSTALL}");
    let edited = all(&marked).expect("a byte order mark is no error");
    assert!(edited.starts_with('\u{feff}'));
    for (text, line) in [
        (VIRT_INSTALL.replace("web1", "web\u{0}1"), "line 7"),
        (VIRT_INSTALL.replace("<acpi/>", "<acpi/>\u{1}"), "line 22"),
        (format!("{VIRT_INSTALL}<domain/>"), "line 51"),
        (format!("x{VIRT_INSTALL}"), "line 1"),
        ("<".to_owned(), "line 1"),
        ("<domain".to_owned(), "line 1"),
        ("<!--".to_owned(), "line 1"),
    ] {
        let error = all(&text).expect_err("a refusal").to_string();
        assert!(error.starts_with(line), "{line}: {error}");
    }
}

#[test]
fn what_looks_like_ours_and_is_not() {
    // In comments, in text, in other namespaces.
    let decoys = "<!-- <metadata><f:vm xmlns:f='urn:farside:libvirt:1'/></metadata> -->\
         <description>&lt;qemu:arg value='-device'/> <![CDATA[<memoryBacking/>]]></description>\
         <o:memoryBacking xmlns:o='urn:o'><o:access mode='private'/></o:memoryBacking>\
         <metadata><vm xmlns='urn:farside:libvirt:9'><device id='x' port='0'/></vm></metadata>";
    let xml = domain(decoys);
    assert_eq!(read_domain(&xml), Ok(None));
    let edited = all(&xml).expect("a domain");
    assert!(edited.contains(decoys.split("</metadata>").nth(1).expect("a part")));
    assert_eq!(check_domain(&edited, &socket), Ok(vec![]));
}

#[test]
fn a_domain_with_nothing_in_it_to_hold_on_to() {
    // Without <devices> and white space, on one line; then with CRLF line ends.
    let edited = all(&domain("")).expect("a domain");
    assert_eq!(check_domain(&edited, &socket), Ok(vec![]));
    let windows = VIRT_INSTALL.replace('\n', "\r\n");
    let edited = all(&windows).expect("a domain");
    let unix = |text: &str| text.replace("\r\n", "\n");
    assert!(!added_lines(&unix(&windows), &unix(&edited)).is_empty());
}
