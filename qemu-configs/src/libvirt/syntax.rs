//! Elements and their positions in the text.

use std::ops::Range;

use roxmltree::{Document, Node};

use super::DomainError;

/// A domain as text and as a tree.
pub(super) struct Source<'a> {
    pub(super) text: &'a str,
    pub(super) tree: Document<'a>,
}

impl<'a> Source<'a> {
    pub(super) fn parse(text: &'a str) -> Result<Self, DomainError> {
        match Document::parse(text) {
            Ok(tree) => Ok(Self { text, tree }),
            Err(error) => {
                let at = error.pos();
                // The position is printed first.
                let why = error.to_string().replace(&format!(" at {at}"), "");
                Err(DomainError::Malformed {
                    line: at.row,
                    column: at.col,
                    why,
                })
            }
        }
    }

    /// Line and column of a position.
    pub(super) fn position(&self, at: usize) -> (u32, u32) {
        let at = self.tree.text_pos_at(at);
        (at.row, at.col)
    }

    pub(super) fn position_of(&self, node: Node) -> (u32, u32) {
        self.position(node.range().start)
    }

    /// The end of the start tag (after its `>`), and whether it is the whole element.
    pub(super) fn start_tag(&self, node: Node) -> (usize, bool) {
        let range = node.range();
        let text = &self.text[range.clone()];
        let mut quote = None;
        let end = text.bytes().position(|byte| {
            match (quote, byte) {
                (Some(open), _) if open == byte => quote = None,
                (None, b'"' | b'\'') => quote = Some(byte),
                _ => {}
            }
            quote.is_none() && byte == b'>'
        });
        // The element was parsed, so its start tag ends.
        let tag = &text[..end.map_or(text.len(), |end| end + 1)];
        (range.start + tag.len(), tag.ends_with("/>"))
    }

    /// The name as it is written, with its prefix.
    pub(super) fn written_name(&self, node: Node) -> &'a str {
        let from = &self.text[node.range().start + 1..];
        let end = from.find(|c: char| c.is_ascii_whitespace() || c == '/' || c == '>');
        &from[..end.unwrap_or(from.len())]
    }

    /// The text between start and end tag. Empty for an empty-element tag.
    pub(super) fn inside(&self, node: Node) -> Range<usize> {
        let (start, empty) = self.start_tag(node);
        let end = node.range().end;
        if empty {
            return end..end;
        }
        let inside = &self.text[start..end];
        // An element that is not empty has an end tag.
        start..start + inside.rfind("</").unwrap_or(inside.len())
    }
}

/// The first child element of that name, in no namespace.
pub(super) fn child<'a, 'i>(node: Node<'a, 'i>, name: &str) -> Option<Node<'a, 'i>> {
    children(node, name).next()
}

/// Child elements of that name, in no namespace.
pub(super) fn children<'a, 'i>(
    node: Node<'a, 'i>,
    name: &str,
) -> impl Iterator<Item = Node<'a, 'i>> {
    node.children()
        .filter(move |child| child.is_element() && child.has_tag_name(name))
        .filter(|child| child.tag_name().namespace().is_none())
}

/// All text of an element, without white space around it.
pub(super) fn text_of(node: Node) -> String {
    let parts = node.children().filter_map(|child| match child.is_text() {
        true => child.text(),
        false => None,
    });
    parts.collect::<String>().trim().to_owned()
}

/// A value for an attribute in single quotes.
pub(super) fn attribute(value: &str) -> String {
    escape(value).replace('\'', "&apos;")
}

/// Text.
pub(super) fn escape(value: &str) -> String {
    let value = value.replace('&', "&amp;");
    value.replace('<', "&lt;").replace('>', "&gt;")
}
