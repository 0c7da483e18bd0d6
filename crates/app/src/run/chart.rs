//! Curves over an axis, drawn into pixels.

use std::path::Path;

use anyhow::Result;

use super::raster::{Canvas, INK, LETTER, MARGIN, NUMBERS, Rgb, SIDE, number};
use isobar_command::exit::{Because, Exit};

/// Curves of one quantity, from 0 to the largest value.
pub(crate) struct Chart {
    /// Text above the curves.
    pub(crate) title: String,
    /// Name of the horizontal axis.
    pub(crate) axis: String,
    /// Places on the horizontal axis, ascending.
    pub(crate) places: Vec<f64>,
    pub(crate) curves: Vec<Curve>,
}

/// A value at each place; `None` where there is none.
pub(crate) struct Curve {
    pub(crate) name: &'static str,
    pub(crate) values: Vec<Option<f64>>,
}

/// Colours of the curves, in their order.
const COLOURS: [Rgb; 2] = [[31, 119, 180], [150, 150, 150]];
const FRAME: Rgb = [210, 210, 210];
const COLUMNS: usize = 4;
/// Pixels of a chart with its texts.
const CELL: (usize, usize) = (NUMBERS + SIDE + 2 * MARGIN, SIDE + 5 * LETTER);

/// Writes charts side by side, and one below the other, as PNG.
pub(crate) fn save(charts: &[Chart], path: &Path) -> Result<()> {
    let saved = canvas(charts).save(path);
    saved.map_err(|error| Exit::Data.because(format!("cannot write {}: {error}", path.display())).into())
}

fn canvas(charts: &[Chart]) -> Canvas {
    let (columns, rows) = (charts.len().min(COLUMNS), charts.len().div_ceil(COLUMNS));
    let mut canvas = Canvas::blank(columns * CELL.0 + MARGIN, rows * CELL.1 + MARGIN);
    for (at, chart) in charts.iter().enumerate() {
        chart.draw(&mut canvas, MARGIN + at % COLUMNS * CELL.0, MARGIN + at / COLUMNS * CELL.1);
    }
    canvas
}

impl Chart {
    fn draw(&self, canvas: &mut Canvas, left: usize, top: usize) {
        canvas.text(&self.title, (left, top), INK);
        let mut place = left;
        for (curve, colour) in self.curves.iter().zip(COLOURS) {
            canvas.text(curve.name, (place, top + LETTER), colour);
            place += (curve.name.chars().count() + 2) * LETTER / 2;
        }
        let (left, top) = (left + NUMBERS, top + 2 * LETTER + LETTER / 2);
        for line in 0..=4 {
            canvas.block(left, top + line * SIDE / 4, SIDE, 1, FRAME);
        }
        let values = self.curves.iter().flat_map(|curve| curve.values.iter().flatten().copied());
        let most = values.filter(|value| value.is_finite()).fold(0.0, f64::max);
        canvas.text(&number(most), (left - NUMBERS, top), INK);
        canvas.text("0", (left - NUMBERS, top + SIDE - LETTER), INK);
        let (first, last) = (self.places.first().copied(), self.places.last().copied());
        let (first, last) = (first.unwrap_or(0.0), last.unwrap_or(0.0));
        let below = top + SIDE + LETTER / 2;
        canvas.text(&number(first), (left, below), INK);
        let end = number(last);
        canvas.text(&end, (left + SIDE - end.len() * LETTER / 2, below), INK);
        canvas.text(&self.axis, (left + SIDE / 2 - self.axis.len() * LETTER / 4, below), INK);
        let share =
            |value: f64, low: f64, high: f64| if high > low { (value - low) / (high - low) } else { 0.0 };
        // Behind the others first: the first curve is what the picture is about.
        for (curve, colour) in self.curves.iter().zip(COLOURS).rev() {
            let points: Vec<Option<(f64, f64)>> = self
                .places
                .iter()
                .zip(&curve.values)
                .map(|(place, value)| {
                    let value = value.filter(|value| value.is_finite())?;
                    let x = left as f64 + share(*place, first, last) * (SIDE - 1) as f64;
                    Some((x, top as f64 + (1.0 - share(value, 0.0, most)) * (SIDE - 1) as f64))
                })
                .collect();
            points.iter().flatten().for_each(|&(x, y)| canvas.block(x as usize, y as usize, 3, 3, colour));
            for pair in points.windows(2) {
                if let [Some(from), Some(to)] = pair {
                    segment(canvas, *from, *to, colour);
                }
            }
        }
    }
}

/// Draws a straight line, two pixels wide.
fn segment(canvas: &mut Canvas, from: (f64, f64), to: (f64, f64), colour: Rgb) {
    let (across, down) = (to.0 - from.0, to.1 - from.1);
    let steps = across.abs().max(down.abs()).ceil().max(1.0);
    for at in 0..=steps as usize {
        let share = at as f64 / steps;
        canvas.block((from.0 + share * across) as usize, (from.1 + share * down) as usize, 2, 2, colour);
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    fn curves_go_from_the_first_value_to_the_last(#[values(f64::NAN, f64::INFINITY)] diverged: f64) {
        let curve = |name, values: [Option<f64>; 3]| Curve { name, values: values.to_vec() };
        let chart = Chart {
            title: "u".to_owned(),
            axis: "lead time".to_owned(),
            places: vec![1.0, 2.0, 3.0],
            curves: vec![
                curve("forecast", [Some(0.0), Some(1.0), Some(2.0)]),
                curve("no change", [Some(2.0), None, Some(diverged)]),
            ],
        };
        let canvas = canvas(&[chart]);
        let (left, top) = (MARGIN + NUMBERS, MARGIN + 2 * LETTER + LETTER / 2);
        assert_eq!(canvas.pixel(left, top + SIDE - 1), COLOURS[0]);
        assert_eq!(canvas.pixel(left + SIDE - 1, top), COLOURS[0]);
        assert_eq!(canvas.pixel(left + SIDE / 2, top + SIDE / 2), COLOURS[0]);
        assert_eq!(canvas.pixel(left, top), COLOURS[1], "a value without neighbours is a dot");
        assert_eq!(canvas.pixel(left + SIDE / 2, top + 9), [255; 3]);
    }

    #[test]
    fn nothing_but_zeros_and_a_single_place_are_drawn() {
        let curves = vec![Curve { name: "forecast", values: vec![Some(0.0)] }];
        let (title, axis) = ("u".to_owned(), "lead time".to_owned());
        let chart = Chart { title, axis, places: vec![1.0], curves };
        let folder = tempfile::tempdir().unwrap();
        save(&[chart], &folder.path().join("x.png")).unwrap();
    }
}
