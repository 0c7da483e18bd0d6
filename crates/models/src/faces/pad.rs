//! Padding of faces with elements of their neighbours.

use isobar_array::{Array, kernel};
use tch::Tensor;

use super::{Cell, Sphere};
use crate::error::{Error, Result};

/// The strips around a face.
#[derive(Debug, Clone, Copy)]
enum Strip {
    /// `[n, width]`
    Left,
    /// `[n, width]`
    Right,
    /// `[width, width + n + width]`
    Above,
    /// `[width, width + n + width]`
    Below,
}

pub(super) fn pad<A: Array>(sphere: Sphere, x: &A, width: i64) -> Result<A> {
    let shape = x.shape();
    let faces = sphere.faces();
    let &[folded, channels, n, columns] = shape.as_slice() else { return refuse(shape, faces, width) };
    if n != columns || folded % faces != 0 || width > n {
        return refuse(shape, faces, width);
    }
    if width == 0 {
        return Ok(x.shallow_clone());
    }
    let x = x.reshape(&[faces, folded / faces, channels, n, n])?;
    let strips = Ring { sphere, n, width, faces: &x }.strips()?;
    let [left, right, above, below] = &strips[..] else { return refuse(shape, faces, width) };
    let x = A::cat(&[left, &x, right], 4)?;
    let x = A::cat(&[above, &x, below], 3)?;
    Ok(x.reshape(&[folded, channels, n + 2 * width, n + 2 * width])?)
}

fn refuse<T>(got: Vec<i64>, faces: i64, width: i64) -> Result<T> {
    let want = format!(
        "[{faces} · batch, channel, n, n] with n of at least {width}, the width of the padding between faces"
    );
    Err(Error::Input { model: "faces", got, want })
}

const STRIPS: [Strip; 4] = [Strip::Left, Strip::Right, Strip::Above, Strip::Below];

/// Dims of the faces, their rows and their columns.
const DIMS: [usize; 3] = [0, 3, 4];

/// Surroundings of faces `[face, batch, channel, n, n]`.
struct Ring<'a, A> {
    sphere: Sphere,
    n: i64,
    width: i64,
    faces: &'a A,
}

impl<A: Array> Ring<'_, A> {
    /// Returns the strips to the left and right, above and below all faces, `[face, batch, channel, …]`. Each rank receives the
    /// elements of its own shards, in one exchange.
    fn strips(&self) -> Result<Vec<A>> {
        let (places, device) = (self.places()?, self.faces.device());
        let (mut indices, mut counts) = (Vec::new(), Vec::new());
        for (strip, place) in STRIPS.into_iter().zip(&places) {
            let (rows, columns) = strip.extent(self.n, self.width);
            let shape = [self.sphere.faces(), rows, columns];
            let [first, second] = self.numbers(strip, rows, columns);
            let needed = if first == second { &[first][..] } else { &[first, second] };
            counts.push(needed.len());
            for numbers in needed {
                let index = Tensor::f_from_slice(numbers).and_then(|n| n.f_reshape(shape)?.f_to(device));
                indices.push((kernel::named("pick", &[], index)?, place));
            }
        }
        let wanted: Vec<(&Tensor, &A)> = indices.iter().map(|(index, place)| (index, *place)).collect();
        let picked = self.faces.pick(&DIMS, &wanted)?;
        let mut picked = picked.into_iter();
        let strips =
            counts.into_iter().map(|count| match &picked.by_ref().take(count).collect::<Vec<_>>()[..] {
                [first, second] => Ok(first.add(second)?.mul_scalar(0.5)?),
                one => Ok(one[0].shallow_clone()),
            });
        strips.collect()
    }

    /// Returns arrays with the layouts of the strips. These belong to the first and the last rank that has elements, so that each
    /// rank's shard stays contiguous and no element of the face moves.
    fn places(&self) -> Result<[A; 4]> {
        let faces = self.faces.detach()?;
        let last = self.n - 1;
        // The face's row or column next to the strip, padded outwards to the width of the strip.
        let beside = |x: &A, dim: i64, start: i64, outside: usize| -> Result<A> {
            let edge = x.narrow(dim, start, 1)?;
            let mut pairs = [0; 4];
            pairs[2 * (4 - dim as usize) + outside] = self.width - 1;
            Ok(if self.width > 1 { edge.pad(&pairs[..], 0.0)? } else { edge })
        };
        let (left, right) = (beside(&faces, 4, 0, 0)?, beside(&faces, 4, last, 1)?);
        let row = |start: i64| -> Result<A> {
            let [left, faces, right] = [&left, &faces, &right].map(|x| x.narrow(3, start, 1));
            Ok(A::cat(&[&left?, &faces?, &right?], 4)?)
        };
        let above = beside(&row(0)?, 3, 0, 0)?;
        let below = beside(&row(last)?, 3, 0, 1)?;
        Ok([left, right, above, below])
    }

    /// Row-major numbers among all faces of the two elements whose mean each element of a strip is.
    fn numbers(&self, strip: Strip, rows: i64, columns: i64) -> [Vec<i64>; 2] {
        let (from_row, from_column) = strip.start(self.n, self.width);
        let mut numbers = [Vec::new(), Vec::new()];
        for face in 0..self.sphere.faces() {
            for row in from_row..from_row + rows {
                for column in from_column..from_column + columns {
                    let sources = self.sphere.sources(Cell { face, row, column }, self.n);
                    for (numbers, Cell { face, row, column }) in numbers.iter_mut().zip(sources) {
                        numbers.push((face * self.n + row) * self.n + column);
                    }
                }
            }
        }
        numbers
    }
}

impl Strip {
    /// Rows and columns of the strip.
    fn extent(self, n: i64, width: i64) -> (i64, i64) {
        match self {
            Self::Left | Self::Right => (n, width),
            Self::Above | Self::Below => (width, n + 2 * width),
        }
    }

    /// Its first row and column, counted from those of the face.
    fn start(self, n: i64, width: i64) -> (i64, i64) {
        match self {
            Self::Left => (0, -width),
            Self::Right => (0, n),
            Self::Above => (-width, -width),
            Self::Below => (n, -width),
        }
    }
}
