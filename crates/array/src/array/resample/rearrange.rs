//! Patterns of dims, as einops has them.

use crate::array::{Array, argument};
use crate::error::Result;

const OP: &str = "rearrange";

/// A dim of one side of a pattern: the names that are merged in it.
type Merged<'a> = Vec<&'a str>;

pub(super) fn rearrange<A: Array>(x: &A, pattern: &str, extents: &[(&str, i64)]) -> Result<A> {
    let wrong = |what: String| argument(OP, format!("the pattern \"{pattern}\" {what}"));
    let (left, right) =
        pattern.split_once("->").ok_or_else(|| wrong("has no ->; expected \"a b -> b a\"".into()))?;
    let (left, right) = (side(left).map_err(&wrong)?, side(right).map_err(&wrong)?);
    let (from, to) = (left.concat(), right.concat());
    for (names, others) in [(&from, &to), (&to, &from)] {
        for (at, name) in names.iter().enumerate() {
            if names[..at].contains(name) {
                return Err(wrong(format!("has {name} twice on one side")));
            }
            if !others.contains(name) {
                return Err(wrong(format!("has {name} on one side only")));
            }
        }
    }
    if let Some((unknown, _)) = extents.iter().find(|(name, _)| !from.contains(name)) {
        return Err(wrong(format!("has no {unknown}, but extents gives it one; remove it")));
    }
    let shape = x.shape();
    if shape.len() != left.len() {
        return Err(wrong(format!("has {} dims on the left, the array has shape {shape:?}", left.len())));
    }
    let mut sizes = Vec::with_capacity(from.len());
    for (merged, &extent) in left.iter().zip(&shape) {
        sizes.extend(split(merged, extent, extents).map_err(&wrong)?);
    }
    let place = |name: &&str| from.iter().position(|other| other == name).unwrap_or_default();
    let order: Vec<i64> = to.iter().map(|name| place(name) as i64).collect();
    let product = |merged: &Merged<'_>| merged.iter().map(|name| sizes[place(name)]).product();
    let result: Vec<i64> = right.iter().map(product).collect();
    x.reshape(&sizes)?.permute(&order)?.reshape(&result)
}

/// The dims of one side.
fn side(text: &str) -> std::result::Result<Vec<Merged<'_>>, String> {
    let mut dims = Vec::new();
    let mut rest = text.trim_start();
    while let Some(first) = rest.chars().next() {
        let taken = if first == '(' {
            let end = rest.find(')').ok_or("has ( without )")?;
            dims.push(rest[1..end].split_whitespace().collect());
            end + 1
        } else {
            let end = rest.find(|c: char| c.is_whitespace() || c == '(').unwrap_or(rest.len());
            dims.push(vec![&rest[..end]]);
            end
        };
        rest = rest[taken..].trim_start();
    }
    let odd = |name: &&&str| !name.chars().all(|c| c.is_alphanumeric() || c == '_');
    match dims.iter().flatten().find(odd) {
        Some(name) => Err(format!("has {name}, which is no name")),
        None => Ok(dims),
    }
}

/// Extents of the names that are merged in a dim of that extent.
fn split(merged: &[&str], extent: i64, extents: &[(&str, i64)]) -> std::result::Result<Vec<i64>, String> {
    let given = |name: &&str| extents.iter().find(|(other, _)| other == name).map(|(_, extent)| *extent);
    let known: Vec<Option<i64>> = merged.iter().map(given).collect();
    let product = known.iter().flatten().try_fold(1_i64, |product, extent| product.checked_mul(*extent));
    let product = product.filter(|&product| product > 0).ok_or("has extents below 1 or too large ones")?;
    let missing: Vec<&&str> =
        merged.iter().zip(&known).filter(|(_, known)| known.is_none()).map(|(name, _)| name).collect();
    let names = merged.join(" ");
    match missing[..] {
        [] if product != extent => Err(format!("gives ({names}) {product} elements, the array has {extent}")),
        [_] if extent % product != 0 => {
            Err(format!("splits ({names}) of {extent} elements by {product}, which does not divide them"))
        }
        [] | [_] => Ok(known.iter().map(|known| known.unwrap_or(extent / product)).collect()),
        _ => Err(format!("leaves the extents of {missing:?} open; give all but one")),
    }
}
