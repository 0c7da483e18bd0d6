//! Point clouds in pictures.

use std::ops::Range;

use anyhow::Result;
use isobar_array::Array;
use isobar_torch::memory::to_vec;
use tch::{Device, Kind, Tensor};

use super::raster::{Field, LETTER, SIDE, finite_range};

/// Least height of a picture, for the numbers of its colour bar.
const LEAST_ROWS: usize = 3 * LETTER;

/// The pixels at which the points of a cloud are drawn.
pub(super) struct Cloud {
    rows: usize,
    cols: usize,
    /// Points with their row and column, those in front last.
    points: Vec<(usize, [usize; 2])>,
    /// Pixels of a point along each side.
    size: usize,
}

impl Cloud {
    /// Reads the clouds of samples `[sample, channel, point]`, whose `channels` are the coordinates. All ranks that share the fields
    /// call, and gather the coordinates.
    pub(super) fn of_samples<A: Array>(fields: &A, channels: Range<i64>) -> Result<Vec<Self>> {
        let own = fields.narrow(1, channels.start, channels.end - channels.start)?.full_tensor()?;
        let own = own.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double)?;
        (0..own.size()[0]).map(|sample| Self::new(&own.f_get(sample)?)).collect()
    }

    /// Places a cloud of coordinates `[coordinate, point]`, of which there are two or three. Of three, the one of largest extent lies
    /// across, and the picture looks along the one of least extent, from its positive end.
    fn new(coordinates: &Tensor) -> Result<Self> {
        let mut lines = Vec::new();
        for at in 0..coordinates.size()[0] {
            lines.push(to_vec::<f64>(&coordinates.f_get(at)?.f_contiguous()?)?);
        }
        let span = |line: &Vec<f64>| finite_range(line.iter().copied()).unwrap_or_default();
        let mut spans: Vec<(usize, (f64, f64))> = lines.iter().map(span).enumerate().collect();
        if lines.len() > 2 {
            spans.sort_by(|(_, one), (_, other)| (other.1 - other.0).total_cmp(&(one.1 - one.0)));
        }
        let extent = |(_, (low, high)): (usize, (f64, f64))| high - low;
        let scale = (SIDE - 1) as f64 / extent(spans[0]).max(extent(spans[1])).max(f64::MIN_POSITIVE);
        let pixel = |(line, (low, _)): (usize, (f64, f64)), point: usize| {
            ((lines[line][point] - low) * scale).round() as usize
        };
        let side = |span| (extent(span) * scale).round() as usize + 1;
        let (height, cols) = (side(spans[1]), side(spans[0]));
        let finite = |point: &usize| lines.iter().all(|line| line[*point].is_finite());
        let mut order: Vec<usize> = (0..lines[0].len()).filter(finite).collect();
        if let Some(&(depth, _)) = spans.get(2) {
            order.sort_by(|&one, &other| lines[depth][one].total_cmp(&lines[depth][other]));
        }
        // Of a surface, half of the points are hidden.
        let apart = if lines.len() > 2 { 3 } else { 2 };
        let size = (height * cols / order.len().max(1)).isqrt().max(1) * apart;
        let (rows, above) = (height.max(LEAST_ROWS), LEAST_ROWS.saturating_sub(height) / 2);
        let row = |point: usize| above + height - 1 - pixel(spans[1], point);
        // Right, up and towards the viewer are a right-handed system, so that nothing is mirrored.
        let is_turned = lines.len() > 2 && (spans[0].0 + 1) % 3 != spans[1].0;
        let col = |point: usize| match pixel(spans[0], point) {
            col if is_turned => cols - 1 - col,
            col => col,
        };
        let place = |point: usize| (point, [row(point), col(point)]);
        Ok(Self { rows, cols, points: order.into_iter().map(place).collect(), size })
    }

    /// Draws the values of the points: squares around them, nothing elsewhere.
    pub(super) fn field(&self, values: &[f64]) -> Field {
        let Self { rows, cols, points, size } = self;
        let mut pixels = vec![None; rows * cols];
        let around = |at: usize, end: usize| at.saturating_sub(size / 2)..(at + size.div_ceil(2)).min(end);
        for &(point, [row, col]) in points {
            for row in around(row, *rows) {
                pixels[row * cols..][around(col, *cols)].fill(values.get(point).copied());
            }
        }
        Field { rows: *rows, cols: *cols, values: pixels }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A long cloud lies across, seen along its thinnest dim: the point in front hides the one behind it.
    #[test]
    fn points_are_seen_along_the_thinnest_dim() {
        let coordinates = [[0.0, 0.0, 1.0, 1.0, 0.0], [0.0, 4.0, 0.0, 4.0, 4.0], [0.0, 0.0, 0.0, 0.0, 0.1]];
        let cloud = Cloud { size: 1, ..Cloud::new(&Tensor::from_slice2(&coordinates)).unwrap() };
        assert_eq!((cloud.rows, cloud.cols), (65, SIDE));
        let field = cloud.field(&[1.0, 2.0, 3.0, 4.0, 5.0]);
        let at = |row: usize, col: usize| field.values[row * SIDE + col];
        // With x up and z towards the viewer, y goes to the left.
        assert_eq!([at(64, SIDE - 1), at(0, SIDE - 1)], [Some(1.0), Some(3.0)]);
        assert_eq!([at(64, 0), at(0, 0)], [Some(5.0), Some(4.0)]);
        assert_eq!(at(32, SIDE / 2), None);
        let same = [1, 0, 2].map(|at| coordinates[at]);
        let cloud = Cloud { size: 1, ..Cloud::new(&Tensor::from_slice2(&same)).unwrap() };
        assert_eq!(cloud.field(&[1.0, 2.0, 3.0, 4.0, 5.0]).values[64 * SIDE + SIDE - 1], Some(5.0));
    }

    #[test]
    fn a_single_point_and_points_on_a_line_are_drawn() {
        for coordinates in [vec![[1.0], [2.0]], vec![[f64::NAN], [2.0]]] {
            let _ = Cloud::new(&Tensor::from_slice2(&coordinates)).unwrap().field(&[1.0]);
        }
        let cloud = Cloud::new(&Tensor::from_slice2(&[[0.0, 1.0], [3.0, 3.0]])).unwrap();
        assert_eq!((cloud.rows, cloud.cols), (LEAST_ROWS, SIDE));
        assert_eq!(cloud.field(&[1.0, 2.0]).values[LEAST_ROWS / 2 * SIDE], Some(1.0));
    }
}
