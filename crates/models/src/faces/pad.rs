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
    let ring = Ring { sphere, n, width, faces: x };
    let x = ring.enclose(&ring.faces, [Strip::Left, Strip::Right], 4)?;
    let x = ring.enclose(&x, [Strip::Above, Strip::Below], 3)?;
    Ok(x.reshape(&[folded, channels, n + 2 * width, n + 2 * width])?)
}

fn refuse<T>(got: Vec<i64>, faces: i64, width: i64) -> Result<T> {
    let want = format!(
        "[{faces} · batch, channel, n, n] with n of at least {width}, the width of the padding between faces"
    );
    Err(Error::Input { model: "faces", got, want })
}

/// Dims of the faces, their rows and their columns.
const DIMS: [usize; 3] = [0, 3, 4];

/// Surroundings of faces `[face, batch, channel, n, n]`.
struct Ring<A> {
    sphere: Sphere,
    n: i64,
    width: i64,
    faces: A,
}

impl<A: Array> Ring<A> {
    /// Concatenates strips, an array and strips along `dim`. The strips go to the first and the last rank that has elements, so that
    /// each rank's shard stays consecutive and no element of the face moves.
    fn enclose(&self, x: &A, strips: [Strip; 2], dim: usize) -> Result<A> {
        let shape = x.shape();
        let at = |start: i64, outside: usize| -> Result<A> {
            let edge = x.narrow(dim as i64, start, 1)?.detach()?;
            let mut pairs = vec![0; 2 * (shape.len() - dim)];
            pairs[2 * (shape.len() - 1 - dim) + outside] = self.width - 1;
            Ok(if self.width > 1 { edge.pad(&pairs, 0.0)? } else { edge })
        };
        let before = self.strip(strips[0], &at(0, 0)?)?;
        let after = self.strip(strips[1], &at(shape[dim] - 1, 1)?)?;
        Ok(A::cat(&[&before, x, &after], dim as i64)?)
    }

    /// One strip of all faces, `[face, batch, channel, …]`, laid out as `like`. A rank receives the elements of its own part.
    fn strip(&self, strip: Strip, like: &A) -> Result<A> {
        let (rows, columns) = strip.extent(self.n, self.width);
        let [first, second] = self.numbers(strip, rows, columns);
        let take = |numbers: &[i64]| -> Result<A> {
            let shape = [self.sphere.faces(), rows, columns];
            let numbers = Tensor::f_from_slice(numbers).and_then(|n| n.f_reshape(shape)?.f_to(like.device()));
            Ok(self.faces.pick(&DIMS, &kernel::named("pick", &[], numbers)?, like)?)
        };
        let values = take(&first)?;
        match first == second {
            true => Ok(values),
            false => Ok(values.add(&take(&second)?)?.mul_scalar(0.5)?),
        }
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
