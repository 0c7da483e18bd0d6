//! Long values in messages.

use std::borrow::Cow;

/// Largest number of characters of a value in a message.
const SHOWN: usize = 100;

/// Shortens a long value for a message to its beginning and its length.
pub(crate) fn shorten(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(SHOWN) {
        None => Cow::Borrowed(text),
        Some((end, _)) => Cow::Owned(format!("{}… ({} bytes)", &text[..end], text.len())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_values_are_cut() {
        assert_eq!(shorten(&"é".repeat(SHOWN)), "é".repeat(SHOWN));
        assert_eq!(shorten(&"é".repeat(50_000)), format!("{}… (100000 bytes)", "é".repeat(SHOWN)));
    }
}
