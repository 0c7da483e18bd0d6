//! Suggestions for misspelt names.

/// The nearest of some names, where it is near enough to be a slip of the pen.
pub(crate) fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let distance = |other: &str| strsim::damerau_levenshtein(&name.to_lowercase(), &other.to_lowercase());
    let best = known.map(|other| (distance(other), other)).min_by_key(|(distance, _)| *distance)?;
    (best.0 <= name.chars().count().div_ceil(3)).then_some(best.1)
}
