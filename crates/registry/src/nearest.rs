//! Suggestions for misspelt names.

/// Returns the known name that is nearest to `name` in spelling, if it is near enough to be what was meant: at most a third of
/// the characters differ, regardless of case.
///
/// ```
/// use isobar_registry::nearest;
///
/// let known = ["epochs", "batch_size"];
/// assert_eq!(nearest("epocs", known), Some("epochs"));
/// assert_eq!(nearest("seed", known), None);
/// ```
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let distance = |other: &str| strsim::damerau_levenshtein(&name.to_lowercase(), &other.to_lowercase());
    let best =
        known.into_iter().map(|other| (distance(other), other)).min_by_key(|(distance, _)| *distance)?;
    (best.0 <= name.chars().count().div_ceil(3)).then_some(best.1)
}
