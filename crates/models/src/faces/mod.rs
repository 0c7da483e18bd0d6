//! Spheres of square faces: which elements surround a face, and padding with them.
//!
//! Fields are `[face · batch, channel, n, n]`, the faces slowest. For a padding of width k
//! a rank receives the elements around its own shards that it lacks, at most 4 · k · (n + k) for each of its faces (twice
//! where they are means of two), and nothing else.

mod cube;
mod healpix;
mod pad;

use isobar_array::Array;

use crate::error::Result;

/// A sphere of square faces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sphere {
    /// The six faces of a cube: four around the equator, then those at the poles.
    Cube,
    /// The twelve faces of HEALPix: four in the north, four at the equator, four in the south.
    Healpix,
}

/// An element of a face.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cell {
    face: i64,
    row: i64,
    column: i64,
}

impl Sphere {
    /// Number of faces.
    pub(crate) fn faces(self) -> i64 {
        match self {
            Self::Cube => 6,
            Self::Healpix => 12,
        }
    }

    /// Pads faces `[face · batch, channel, n, n]` on all sides with `width` elements of their neighbours. `width` is at most n.
    pub(crate) fn pad<A: Array>(self, x: &A, width: i64) -> Result<A> {
        pad::pad(self, x, width)
    }

    /// Returns the two elements whose mean is the element `at` outside of its face. They are mostly the same one.
    fn sources(self, at: Cell, n: i64) -> [Cell; 2] {
        match self {
            Self::Cube => [cube::source(at, n); 2],
            Self::Healpix => healpix::sources(at, n),
        }
    }
}

/// Puts the faces first: `[face · batch, channel, n, n]` from `[batch, channel, face, n, n]`.
pub(crate) fn fold<A: Array>(x: &A) -> Result<A> {
    let &[batch, channels, faces, height, width] = x.shape().as_slice() else { return Ok(x.shallow_clone()) };
    Ok(x.permute(&[2, 0, 1, 3, 4])?.reshape(&[faces * batch, channels, height, width])?)
}

/// The inverse of [`fold`].
pub(crate) fn unfold<A: Array>(x: &A, faces: i64) -> Result<A> {
    let &[folded, channels, height, width] = x.shape().as_slice() else { return Ok(x.shallow_clone()) };
    Ok(x.reshape(&[faces, folded / faces, channels, height, width])?.permute(&[1, 2, 0, 3, 4])?)
}

/// The element at `row`, `column` of a face after `quarters` counter-clockwise quarter turns.
fn turned(face: i64, quarters: i64, row: i64, column: i64, n: i64) -> Cell {
    let (row, column) = match quarters.rem_euclid(4) {
        0 => (row, column),
        1 => (column, n - 1 - row),
        2 => (n - 1 - row, n - 1 - column),
        _ => (n - 1 - column, row),
    };
    Cell { face, row, column }
}

#[cfg(test)]
mod tests;
