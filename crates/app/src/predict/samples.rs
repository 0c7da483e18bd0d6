//! `--samples`: numbers and ranges of them.

use std::collections::HashSet;
use std::ops::RangeInclusive;

/// Reads `7` or `0-3`.
pub(super) fn parse(text: &str) -> Result<RangeInclusive<usize>, String> {
    let number = |part: &str| part.trim().parse::<usize>().ok();
    let range = match text.split_once('-') {
        None => number(text).map(|only| only..=only),
        Some((first, last)) => number(first).zip(number(last)).map(|(first, last)| first..=last),
    };
    match range {
        Some(range) if range.is_empty() => {
            Err(format!("the range ends before it begins; write {}-{}", range.end(), range.start()))
        }
        Some(range) => Ok(range),
        None => Err("expected a sample's number such as 7, or a range such as 0-3".to_owned()),
    }
}

/// Returns the first number that is given twice.
pub(super) fn repeated(samples: &[usize]) -> Option<usize> {
    let mut seen = HashSet::new();
    samples.iter().copied().find(|sample| !seen.insert(*sample))
}

/// Numbers as [`parse`] reads them, separated by commas.
pub(super) fn text(samples: &[usize]) -> String {
    let mut ranges: Vec<RangeInclusive<usize>> = Vec::new();
    for &sample in samples {
        match ranges.last_mut() {
            Some(last) if last.end() + 1 == sample => *last = *last.start()..=sample,
            _ => ranges.push(sample..=sample),
        }
    }
    let one = |range: &RangeInclusive<usize>| match range.start() == range.end() {
        true => range.start().to_string(),
        false => format!("{}-{}", range.start(), range.end()),
    };
    ranges.iter().map(one).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_ranges_are_read() {
        assert_eq!((parse("7"), parse("0-3")), (Ok(7..=7), Ok(0..=3)));
        assert_eq!(parse("3-0").unwrap_err(), "the range ends before it begins; write 0-3");
        for wrong in ["", "-", "-3", "1-", "a", "1-2-3", "0:3"] {
            assert!(parse(wrong).unwrap_err().contains("a range such as 0-3"), "{wrong}");
        }
    }

    #[test]
    fn numbers_in_a_row_are_a_range() {
        assert_eq!(text(&[0, 1, 2, 5, 4, 9]), "0-2,5,4,9");
        assert_eq!(text(&[]), "");
    }

    #[test]
    fn a_number_that_is_given_twice_is_found() {
        assert_eq!((repeated(&[2, 0, 1]), repeated(&[0, 1, 2, 1])), (None, Some(1)));
    }
}
