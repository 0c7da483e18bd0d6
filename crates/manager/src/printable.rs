//! Escaping of text from files and other ranks before it reaches a terminal.

use std::borrow::Cow;

/// Escapes control characters: text from files and other ranks may contain anything.
#[must_use]
pub fn printable(text: &str) -> Cow<'_, str> {
    let acts = |letter: char| (letter.is_control() && !matches!(letter, '\n' | '\t')) || reorders(letter);
    if !text.contains(acts) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        match acts(letter) {
            true => escaped.extend(letter.escape_default()),
            false => escaped.push(letter),
        }
    }
    Cow::Owned(escaped)
}

/// Returns whether a character changes the direction of text.
fn reorders(letter: char) -> bool {
    matches!(letter, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_that_act_on_a_terminal_are_escaped() {
        let plain = "two lines\n\tof `größe` 1×2 → ∇u";
        assert!(matches!(printable(plain), Cow::Borrowed(same) if same == plain));
        assert_eq!(printable("a\u{1b}[2Jb\u{7}\r"), "a\\u{1b}[2Jb\\u{7}\\r");
        assert_eq!(printable("\u{9b}31m\u{202e}txt"), "\\u{9b}31m\\u{202e}txt");
    }
}
