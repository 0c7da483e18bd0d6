//! Rows of a tensor: its elements at row-major numbers along some dims.

use tch::{Kind, TchError, Tensor};

use crate::error::{Result, argument, named};

pub(super) const PICK: &str = "pick";

/// Checks that the indices of a pick, and the shapes of its results, fit a tensor of `shape` along `dims`.
///
/// # Errors
///
/// Dims that are not sorted or do not exist, shapes that do not fit, an index of another dtype, numbers out of range.
pub fn check_picks(shape: &[i64], dims: &[usize], wanted: &[(&Tensor, Vec<i64>)]) -> Result<()> {
    let exist = dims.last().is_some_and(|&last| last < shape.len()) && dims.windows(2).all(|w| w[0] < w[1]);
    if !exist || wanted.is_empty() {
        let count = wanted.len();
        return Err(argument(
            PICK,
            format!("{count} indices along {dims:?} of {shape:?}, expected one or more along sorted dims"),
        ));
    }
    let numbers: i64 = dims.iter().map(|&dim| shape[dim]).product();
    for (index, like) in wanted {
        let fits = |(dim, &extent): (usize, &i64)| dims.contains(&dim) || like.get(dim) == Some(&extent);
        let extents: Option<Vec<i64>> = dims.iter().map(|&dim| like.get(dim).copied()).collect();
        let fits = like.len() == shape.len() && shape.iter().enumerate().all(fits);
        if !fits || extents.is_none_or(|extents| extents != index.size()) || index.kind() != Kind::Int64 {
            let index = (index.kind(), index.size());
            return Err(argument(
                PICK,
                format!(
                    "an index of {index:?} along {dims:?} of {shape:?} for {like:?}, expected Int64 and the extents of the result"
                ),
            ));
        }
        let outside = || index.f_lt(0)?.f_logical_or(&index.f_ge(numbers)?)?.f_any()?.f_int64_value(&[]);
        if named(PICK, &[], outside())? != 0 {
            return Err(argument(
                PICK,
                format!("numbers outside of 0..{numbers} along {dims:?} of {shape:?}"),
            ));
        }
    }
    Ok(())
}

/// Returns the elements of `x` at row-major `numbers` `[number]` along the sorted `dims`: `[number, …]`, then the other dims.
/// Numbers must be in range. The gradient is bitwise reproducible.
///
/// # Errors
///
/// libtorch refuses.
pub fn rows_at(x: &Tensor, dims: &[usize], numbers: &Tensor) -> std::result::Result<Tensor, TchError> {
    // With repeated numbers, libtorch adds the gradients of `index` in any order, those of `index_select` in a fixed one.
    let (distinct, place) = numbers.f_internal_unique(true, true)?;
    if distinct.size() == numbers.size() {
        return rows_at_distinct(x, dims, numbers);
    }
    rows_at_distinct(x, dims, &distinct)?.f_index_select(0, &place)
}

/// Does the work of [`rows_at`] for numbers that are not repeated.
fn rows_at_distinct(x: &Tensor, dims: &[usize], numbers: &Tensor) -> std::result::Result<Tensor, TchError> {
    let mut at: Vec<Option<Tensor>> = x.size().iter().map(|_| None).collect();
    let mut rest = numbers.shallow_clone();
    for &dim in dims.iter().rev() {
        let extent = x.size()[dim].max(1);
        at[dim] = Some(rest.f_remainder(extent)?);
        rest = rest.f_divide_scalar_mode(extent, "floor")?;
    }
    let rows = x.f_index(&at)?;
    // libtorch puts the dim of the numbers in place of adjacent dims, and first otherwise.
    let adjacent = dims.windows(2).all(|pair| pair[0] + 1 == pair[1]);
    match dims.first() {
        Some(&first) if adjacent => rows.f_movedim_int(first as i64, 0),
        _ => Ok(rows),
    }
}

/// Reshapes rows of [`rows_at`], one for each element along `dims`, to a tensor of `shape`.
///
/// # Errors
///
/// libtorch refuses.
pub fn from_rows(rows: &Tensor, dims: &[usize], shape: &[i64]) -> std::result::Result<Tensor, TchError> {
    let (from, to): (Vec<i64>, Vec<i64>) =
        dims.iter().enumerate().map(|(from, &to)| (from as i64, to as i64)).unzip();
    let first = dims.iter().map(|&dim| shape[dim]);
    let rest = (0..shape.len()).filter(|dim| !dims.contains(dim)).map(|dim| shape[dim]);
    rows.f_reshape(first.chain(rest).collect::<Vec<_>>())?.f_movedim(from, to)
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    #[test]
    fn gradients_of_repeated_numbers_are_reproducible() {
        let threads = tch::get_num_threads();
        tch::set_num_threads(2);
        let x = Tensor::randn([6, 2, 16, 48, 48], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let numbers = Tensor::randint(6 * 48 * 48 / 4, [24_000], (Kind::Int64, Device::Cpu));
        let weight = Tensor::randn([24_000, 2, 16], (Kind::Float, Device::Cpu));
        let gradient = || {
            let rows = rows_at(&x, &[0, 3, 4], &numbers).unwrap();
            Tensor::run_backward(&[(rows * &weight).sum(Kind::Float)], &[&x], false, false).remove(0)
        };
        let first = gradient();
        assert!((0..5).all(|_| gradient() == first));
        tch::set_num_threads(threads);
    }
}
