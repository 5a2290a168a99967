//! Edits a text in place.

use std::ops::Range;

/// Replacements in a text, ordered by position, then by insertion.
#[derive(Default)]
pub(super) struct Splices(Vec<(Range<usize>, String)>);

impl Splices {
    pub(super) fn insert(&mut self, at: usize, text: String) {
        self.0.push((at..at, text));
    }

    pub(super) fn replace(&mut self, range: Range<usize>, text: &str) {
        self.0.push((range, text.to_owned()));
    }

    pub(super) fn apply(mut self, text: &str) -> String {
        self.0.sort_by_key(|(range, _)| range.start);
        let mut out = String::with_capacity(text.len());
        let mut at = 0;
        for (range, new) in self.0 {
            debug_assert!(at <= range.start, "replacements overlap");
            out.push_str(&text[at..range.start]);
            out.push_str(&new);
            at = range.end;
        }
        out.push_str(&text[at..]);
        out
    }
}

/// The layout of a text at some position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    /// The line ending. Empty if the text is a single line.
    eol: &'static str,
    /// Indentation of this level.
    indent: String,
    step: String,
}

impl Layout {
    /// The layout of the root element's children: `inside` is the text between its tags.
    pub(super) fn of_root(inside: &str) -> Self {
        let white = leading_white(inside);
        let Some(eol) = eol_of(white) else {
            return Self::one_line();
        };
        let indent = indent_of(white);
        let step = if indent.is_empty() { "  " } else { indent };
        Self {
            eol,
            indent: indent.to_owned(),
            step: step.to_owned(),
        }
    }

    fn one_line() -> Self {
        Self {
            eol: "",
            indent: String::new(),
            step: String::new(),
        }
    }

    /// The layout of the level below.
    pub(super) fn deeper(&self) -> Self {
        let indent = format!("{}{}", self.indent, self.step);
        Self {
            indent,
            ..self.clone()
        }
    }

    /// The layout of an existing element's children, with `inside` between its tags.
    pub(super) fn within(&self, inside: &str) -> Self {
        let white = leading_white(inside);
        let Some(eol) = eol_of(white) else {
            return Self::one_line();
        };
        if white.len() == inside.len() {
            // No existing children to follow.
            return Self {
                eol,
                ..self.deeper()
            };
        }
        Self {
            eol,
            indent: indent_of(white).to_owned(),
            step: self.step.clone(),
        }
    }

    /// The line break and indentation before an element.
    pub(super) fn line(&self) -> String {
        format!("{}{}", self.eol, self.indent)
    }
}

fn leading_white(text: &str) -> &str {
    &text[..text.len() - text.trim_start_matches([' ', '\t', '\r', '\n']).len()]
}

/// The last line ending in white space.
fn eol_of(white: &str) -> Option<&'static str> {
    let (before, _) = white.rsplit_once('\n')?;
    Some(if before.ends_with('\r') { "\r\n" } else { "\n" })
}

/// The spaces and tabs at the end: a lone carriage return is no part of an indentation.
fn indent_of(white: &str) -> &str {
    white.rsplit(['\r', '\n']).next().unwrap_or_default()
}

/// `element` with the line break and indentation before it.
pub(super) fn with_its_line(text: &str, element: Range<usize>) -> Range<usize> {
    let before = &text[..element.start];
    let trimmed = before.trim_end_matches([' ', '\t']);
    let start = match trimmed.strip_suffix('\n') {
        Some(line) => line.strip_suffix('\r').unwrap_or(line).len(),
        None => element.start,
    };
    start..element.end
}
