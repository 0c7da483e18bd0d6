//! CF's text attributes of variables and data sets, such as `standard_name` and `history`.

use crate::Result;

/// Text attributes of CF that Isobar carries from a data set to the files that it writes, in a fixed order: of a variable
/// `standard_name`, `long_name`, `cell_methods` and `comment`; of a data set `title`, `institution`, `source`, `history`,
/// `references` and `comment`.
///
/// ```
/// use isobar_data::TextAttributes;
///
/// let stored = |name: &str| Ok((name == "standard_name").then(|| "air_temperature".to_owned()));
/// let attributes = TextAttributes::of_variable(stored)?;
/// assert_eq!(attributes.get("standard_name"), Some("air_temperature"));
/// assert_eq!(attributes.get("long_name"), None);
/// # Ok::<(), isobar_data::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextAttributes(Vec<(&'static str, String)>);

/// Attributes of a variable.
const OF_VARIABLE: [&str; 4] = [STANDARD_NAME, LONG_NAME, "cell_methods", "comment"];
/// Attributes of a data set.
const OF_DATASET: [&str; 6] = [TITLE, "institution", "source", HISTORY, "references", "comment"];

/// CF's name of a quantity, from its table.
pub(crate) const STANDARD_NAME: &str = "standard_name";
/// CF's title of a variable.
pub(crate) const LONG_NAME: &str = "long_name";
/// CF's title of a data set.
pub(crate) const TITLE: &str = "title";
/// CF's list of the programs that made a data set, one a line.
pub(crate) const HISTORY: &str = "history";

/// Bytes of the longest text that is carried: files are not trusted.
pub(crate) const LONGEST: usize = 1 << 16;

impl TextAttributes {
    /// Takes the attributes of a variable from `stored`, which returns the text of a name. Longer texts than 64 KiB are left out, and
    /// control characters other than line breaks are replaced by blanks.
    ///
    /// # Errors
    /// Those of `stored`.
    pub fn of_variable(stored: impl FnMut(&str) -> Result<Option<String>>) -> Result<Self> {
        Self::take(&OF_VARIABLE, stored)
    }

    /// A standard name alone, or nothing.
    pub(crate) fn standard_name(name: Option<String>) -> Self {
        Self(name.into_iter().map(|name| (STANDARD_NAME, name)).collect())
    }

    /// Takes the attributes of a data set from `stored`, as [`TextAttributes::of_variable`] does.
    ///
    /// # Errors
    /// Those of `stored`.
    pub fn of_dataset(stored: impl FnMut(&str) -> Result<Option<String>>) -> Result<Self> {
        Self::take(&OF_DATASET, stored)
    }

    fn take(names: &[&'static str], mut stored: impl FnMut(&str) -> Result<Option<String>>) -> Result<Self> {
        let mut own = Vec::new();
        for &name in names {
            let text = stored(name)?.filter(|text| text.len() <= LONGEST).map(|text| plain(&text));
            own.extend(text.filter(|text| !text.is_empty()).map(|text| (name, text)));
        }
        Ok(Self(own))
    }

    /// Returns the text of a name.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.iter().find(|(own, _)| *own == name).map(|(_, text)| text)
    }

    /// Names and texts.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.0.iter().map(|(name, text)| (*name, text.as_str()))
    }

    /// Returns these attributes with those of a new file, which replace others of the same name; a line of `history` comes after the
    /// lines of this data set, as CF says.
    pub(crate) fn with(&self, new: &[(String, String)]) -> Vec<(String, String)> {
        let is_new = |name: &str| new.iter().any(|(own, _)| own == name);
        let kept = self.iter().filter(|(name, _)| !is_new(name));
        let kept = kept.map(|(name, text)| (name.to_owned(), text.to_owned()));
        let added = new.iter().map(|(name, text)| match self.get(name).filter(|_| name == HISTORY) {
            Some(before) => (name.clone(), shortened(&format!("{before}\n{text}")).to_owned()),
            None => (name.clone(), text.clone()),
        });
        kept.chain(added).collect()
    }
}

/// Leaves out the first lines of a text that is too long to be read again.
fn shortened(mut text: &str) -> &str {
    while text.len() > LONGEST
        && let Some((_, rest)) = text.split_once('\n')
    {
        text = rest;
    }
    text
}

/// Replaces control characters other than line breaks.
fn plain(text: &str) -> String {
    let is_bad = |letter: char| letter.is_control() && letter != '\n';
    let plain: String = text.chars().map(|letter| if is_bad(letter) { ' ' } else { letter }).collect();
    plain.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_texts_of_bounded_length_are_taken() {
        let stored = |name: &str| {
            Ok(match name {
                "title" => Some("a".repeat(LONGEST + 1)),
                "source" => Some(" \u{0} ".to_owned()),
                "history" => Some("one\u{1b}\ntwo\u{0}".to_owned()),
                "comment" => Some("a".repeat(LONGEST)),
                _ => None,
            })
        };
        let taken = TextAttributes::of_dataset(stored).unwrap();
        assert_eq!(taken.iter().map(|(name, _)| name).collect::<Vec<_>>(), ["history", "comment"]);
        assert_eq!(taken.get("history"), Some("one \ntwo"));
    }

    #[test]
    fn a_new_file_keeps_the_history() {
        let stored = |name: &str| Ok(Some(format!("old {name}")));
        let old = TextAttributes::of_dataset(stored).unwrap();
        let new = [("title", "new"), ("history", "isobar"), ("origin", "here")];
        let new = new.map(|(name, text)| (name.to_owned(), text.to_owned()));
        let all = old.with(&new);
        let text = |name: &str| all.iter().find(|(own, _)| own == name).map(|(_, text)| text.as_str());
        assert_eq!(all.len(), 7);
        assert_eq!((text("title"), text("origin")), (Some("new"), Some("here")));
        assert_eq!((text("history"), text("source")), (Some("old history\nisobar"), Some("old source")));
        assert_eq!(TextAttributes::default().with(&new), new);
        let long = format!("{}\nlast", "a".repeat(LONGEST));
        assert_eq!(shortened(&long), "last");
    }
}
