//! Neighbourhood attention: each token attends to a window around it (Hassani et al., *Neighborhood Attention Transformer*,
//! arXiv:2204.07143). At the borders, windows are shifted into the grid, never padded.

use isobar_array::{Array, Unary};
use tch::{Kind, Tensor};

use crate::error::Result;

/// Computes attention of queries `[grid…, batch, heads, features]` to the keys and values in a window of extents `kernel` around
/// each query. `attend` computes attention on `[…, tokens, features]` with a mask `[queries, keys]`.
///
/// Along the last dim that is not split, the queries of a line attend to full lines of keys, and the mask selects the keys in the
/// window. Along the other dims, the keys and values of each window are copied; ranks receive only their halo.
pub(super) fn windowed<A: Array>(
    [q, k, v]: [&A; 3],
    kernel: &[i64],
    attend: impl Fn([&A; 3], Option<&A>) -> Result<A>,
) -> Result<A> {
    let shape = q.shape();
    let dims = kernel.len();
    let masked = (0..dims).rev().find(|&dim| q.num_shards(&[dim]) == 1);
    // Split dims come first, so that ranks exchange the tokens themselves, not copies of them.
    let mut picked: Vec<usize> = (0..dims).filter(|&dim| Some(dim) != masked).collect();
    picked.sort_by_key(|&dim| std::cmp::Reverse(q.num_shards(&[dim])));
    let copies: i64 = picked.iter().map(|&dim| kernel[dim]).product();
    let line = masked.map_or(1, |dim| shape[dim]);
    let batch = [dims, dims + 1];
    let grid: Vec<i64> = picked.iter().chain(&batch).map(|&dim| shape[dim]).collect();
    let of_lines = |keys: i64| [&grid[..], &[keys, shape[dims + 2]]].concat();

    let queries: Vec<usize> = picked.iter().chain(&batch).copied().chain(masked).chain([dims + 2]).collect();
    let lines = permuted(q, &queries)?.reshape(&of_lines(line))?;
    let mut rows = Vec::with_capacity(picked.len());
    for &dim in &picked {
        rows.push(window_rows(q, dim, kernel[dim])?);
    }
    let windows = |x: &A| -> Result<A> {
        let mut x = x.shallow_clone();
        for (&dim, rows) in picked.iter().zip(&rows) {
            x = x.index_select(dim as i64, rows)?;
        }
        // Splits each picked dim into positions and the tokens of their windows.
        let (mut split, mut at) = (Vec::new(), vec![0; shape.len()]);
        for (dim, &extent) in shape.iter().enumerate() {
            at[dim] = split.len();
            split.push(extent);
            if picked.contains(&dim) {
                split.push(kernel[dim]);
            }
        }
        let outer = picked.iter().chain(&batch).chain(&masked).map(|&dim| at[dim]);
        let inner = picked.iter().map(|&dim| at[dim] + 1).chain([at[dims + 2]]);
        let order: Vec<usize> = outer.chain(inner).collect();
        Ok(permuted(&x.reshape(&split)?, &order)?.reshape(&of_lines(line * copies))?)
    };
    let mask = masked
        .map(|dim| Ok::<_, crate::Error>(q.constant(&seen(line, kernel[dim], copies)?)?))
        .transpose()?;
    let y = attend([&lines, &windows(k)?, &windows(v)?], mask.as_ref())?;
    let turned: Vec<i64> = queries.iter().map(|&dim| shape[dim]).collect();
    let mut back = vec![0; queries.len()];
    for (at, &dim) in queries.iter().enumerate() {
        back[dim] = at;
    }
    permuted(&y.reshape(&turned)?, &back)
}

fn permuted<A: Array>(x: &A, order: &[usize]) -> Result<A> {
    Ok(x.permute(&order.iter().map(|&dim| dim as i64).collect::<Vec<_>>())?)
}

/// First of the `kernel` positions around position `at` of `extent`, all of them inside.
fn window_start(at: i64, extent: i64, kernel: i64) -> i64 {
    (at - kernel / 2).clamp(0, extent - kernel)
}

/// Returns the positions in the windows of all positions along `dim`, `[extent · kernel]`, split like the dim.
fn window_rows<A: Array>(grid: &A, dim: usize, kernel: i64) -> Result<A> {
    let extent = grid.extent(dim as i64)?;
    let like = grid.detach()?.narrow(-1, 0, 1)?.to_kind(Kind::Double)?;
    let at = like.linspace_along(dim as i64, 0.0, (extent - 1) as f64)?;
    let clamp = Unary::Clamp { min: 0.0, max: (extent - kernel) as f64 };
    let start = at.add_scalar(-((kernel / 2) as f64))?.unary(clamp)?;
    let offsets: Vec<f64> = (0..kernel).map(|offset| offset as f64).collect();
    let offsets = grid.constant(&table(Tensor::f_from_slice(&offsets))?)?;
    let rows = start.reshape(&[extent, 1])?.add(&offsets.reshape(&[1, kernel])?)?;
    Ok(rows.reshape(&[extent * kernel])?.to_kind(Kind::Int64)?)
}

/// Returns the mask of a line, `[line, line · copies]`: true if the query's window has the key; each key has `copies` copies.
fn seen(line: i64, kernel: i64, copies: i64) -> Result<Tensor> {
    let sees = |query: i64, key: i64| {
        let start = window_start(query, line, kernel);
        (start..start + kernel).contains(&key)
    };
    let values: Vec<bool> =
        (0..line).flat_map(|query| (0..line * copies).map(move |key| sees(query, key / copies))).collect();
    table(Tensor::f_from_slice(&values).and_then(|values| values.f_reshape([line, line * copies])))
}

fn table(made: Result<Tensor, tch::TchError>) -> Result<Tensor> {
    Ok(isobar_array::kernel::named("window", &[], made)?)
}
