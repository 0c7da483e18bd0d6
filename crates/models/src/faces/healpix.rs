//! Neighbours of the twelve faces of HEALPix: 0 to 3 around the north pole, 4 to 7 at the equator, 8 to 11 around the south pole.

use super::{Cell, turned};

/// The two elements whose mean is the element `at`, at most n outside of its face.
pub(super) fn sources(at: Cell, n: i64) -> [Cell; 2] {
    let Cell { face, row, column } = at;
    let sides = (side(row, n), side(column, n));
    let ring = face % 4;
    match (face / 4, sides) {
        (1, (-1, -1)) => above_left(ring, -row - 1, -column - 1, n),
        (1, (1, 1)) => below_right(ring, row - n, column - n, n),
        (zone, sides) => {
            let (face, quarters) = neighbour(zone, ring, sides);
            [turned(face, quarters, row.rem_euclid(n), column.rem_euclid(n), n); 2]
        }
    }
}

/// The face on these sides of the face `ring` of a zone, and the quarter turns that bring it beside that one.
fn neighbour(zone: i64, ring: i64, sides: (i64, i64)) -> (i64, i64) {
    let north = |ahead: i64| (ring + ahead) % 4;
    let equator = |ahead: i64| 4 + north(ahead);
    let south = |ahead: i64| 8 + north(ahead);
    match (zone, sides) {
        (0, (-1, -1)) => (north(2), 2),
        (0, (-1, 0)) => (north(1), 1),
        (0, (-1, _)) => (north(1), 0),
        (0, (0, -1)) => (north(3), -1),
        (0, (0, _)) => (equator(1), 0),
        (0, (_, -1)) => (north(3), 0),
        (0, (_, 0)) => (equator(0), 0),
        (0, _) => (south(0), 0),
        (1, (-1, 0)) => (north(0), 0),
        (1, (-1, _)) => (equator(1), 0),
        (1, (0, -1)) => (north(3), 0),
        (1, (0, _)) => (south(0), 0),
        (1, (_, -1)) => (equator(3), 0),
        (1, _) => (south(3), 0),
        (_, (-1, -1)) => (north(0), 0),
        (_, (-1, 0)) => (equator(1), 0),
        (_, (-1, _)) => (south(1), 0),
        (_, (0, -1)) => (equator(0), 0),
        (_, (0, _)) => (south(1), -1),
        (_, (_, -1)) => (south(3), 0),
        (_, (_, 0)) => (south(3), 1),
        _ => (south(2), 2),
    }
}

/// The corner above and left of a face at the equator, where three faces meet: `up` and `across` count outwards from the face. On the
/// diagonal it is the mean of the faces above and left; on either side of it, these continue around the corner.
fn above_left(ring: i64, up: i64, across: i64, n: i64) -> [Cell; 2] {
    let above = |row, column| Cell { face: ring, row, column };
    let left = |row, column| Cell { face: (ring + 3) % 4, row, column };
    match up - across {
        0 => [above(n - 1 - up, 0), left(0, n - 1 - up)],
        further if further > 0 => [above(n - 1 - up, further - 1); 2],
        further => [left(-further - 1, n - 1 - across); 2],
    }
}

/// The corner below and right of a face at the equator, as [`above_left`].
fn below_right(ring: i64, down: i64, across: i64, n: i64) -> [Cell; 2] {
    let below = |row, column| Cell { face: 8 + (ring + 3) % 4, row, column };
    let right = |row, column| Cell { face: 8 + ring, row, column };
    match down - across {
        0 => [below(down, n - 1), right(n - 1, down)],
        further if further > 0 => [below(down, n - further); 2],
        further => [right(n + further, across); 2],
    }
}

/// Returns the side of a face on which an index lies: −1 before it, 0 on it, 1 behind it.
fn side(index: i64, n: i64) -> i64 {
    i64::from(index >= n) - i64::from(index < 0)
}
