//! Lines for standard output and standard error.

use std::borrow::Cow;
use std::io::Write;

/// Writes a line to standard output. Nobody reads on after `| head`: that is no error.
pub(crate) fn line(text: &str) {
    let _ = writeln!(std::io::stdout().lock(), "{}", harmless(text));
}

/// Writes a line to standard error.
pub(crate) fn complain(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{}", harmless(text));
}

/// Escapes what would act on a terminal: names and words of files and of other ranks may hold anything.
fn harmless(text: &str) -> Cow<'_, str> {
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

/// Returns whether a character changes the order in which others are shown.
fn reorders(letter: char) -> bool {
    matches!(letter, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_acts_on_a_terminal_is_escaped() {
        let plain = "two lines\n\tof `größe` 1×2 → ∇u";
        assert!(matches!(harmless(plain), Cow::Borrowed(same) if same == plain));
        assert_eq!(harmless("a\u{1b}[2Jb\u{7}\r"), "a\\u{1b}[2Jb\\u{7}\\r");
        assert_eq!(harmless("\u{9b}31m\u{202e}txt"), "\\u{9b}31m\\u{202e}txt");
    }
}
