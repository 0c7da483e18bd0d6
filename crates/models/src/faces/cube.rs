//! Neighbours on the cubed sphere, as DLWP orders and turns its faces.

use super::{Cell, turned};

/// The element that stands for `at`, at most n outside of its face. A corner takes the end of the strip beside it: of the rows above
/// and below on the equator, of the columns at the poles.
pub(super) fn source(at: Cell, n: i64) -> Cell {
    let Cell { face, row, column } = at;
    let inside = |index: i64| index.clamp(0, n - 1);
    let (above, below) = (row < 0, row >= n);
    let (left, right) = (column < 0, column >= n);
    let (wrapped_row, wrapped_column) = (row.rem_euclid(n), column.rem_euclid(n));
    if face < 4 {
        return match (above, below) {
            (true, _) => turned(4, -face, wrapped_row, inside(column), n),
            (_, true) => turned(5, face, wrapped_row, inside(column), n),
            _ if left => Cell { face: (face + 3) % 4, row, column: wrapped_column },
            _ => Cell { face: (face + 1) % 4, row, column: wrapped_column },
        };
    }
    let outwards = if face == 4 { 1 } else { -1 };
    match (left, right) {
        (true, _) => turned(3, -outwards, inside(row), wrapped_column, n),
        (_, true) => turned(1, outwards, inside(row), wrapped_column, n),
        // Face 4 lies between the last rows of face 5 and the first of face 0, face 5 between those of face 0 and face 4.
        _ if above => Cell { face: if face == 4 { 5 } else { 0 }, row: wrapped_row, column },
        _ => Cell { face: if face == 4 { 0 } else { 4 }, row: wrapped_row, column },
    }
}
