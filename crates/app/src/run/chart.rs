//! Curves over an axis, drawn into pixels.

use std::path::Path;

use anyhow::Result;

use super::raster::{Canvas, INK, LETTER, MARGIN, NUMBERS, Rgb, SIDE, finite_range, number};
use isobar_command::exit::{Because, Exit};

/// Curves of one quantity.
pub(crate) struct Chart {
    /// Text above the curves.
    pub(crate) title: String,
    /// Name of the horizontal axis.
    pub(crate) axis: String,
    /// Places on the horizontal axis, ascending.
    pub(crate) places: Vec<f64>,
    /// The first is drawn above the others.
    pub(crate) curves: Vec<Curve>,
    /// True to extend the vertical axis to 0.
    pub(crate) include_zero: bool,
}

/// A value at each place; `None` where there is none.
pub(crate) struct Curve {
    pub(crate) name: String,
    pub(crate) colour: Rgb,
    pub(crate) values: Vec<Option<f64>>,
}

/// Colours of curves that are compared with each other.
pub(crate) const COLOURS: [Rgb; 8] = [
    [31, 119, 180],
    [255, 127, 14],
    [44, 160, 44],
    [214, 39, 40],
    [148, 103, 189],
    [140, 86, 75],
    [227, 119, 194],
    [23, 190, 207],
];
/// Colour of a baseline.
pub(crate) const GREY: Rgb = [150, 150, 150];
const FRAME: Rgb = [210, 210, 210];
const COLUMNS: usize = 4;
/// Pixels of a chart across, with its texts.
const WIDTH: usize = NUMBERS + SIDE + 2 * MARGIN;

/// Returns the lead time after a step: from the first of `times`, those of the start and of each step, or its number where times are
/// unknown.
pub(crate) fn lead_time(times: &[f64], step: usize) -> f64 {
    match (times.first(), times.get(step)) {
        (Some(start), Some(time)) => time - start,
        _ => step as f64,
    }
}

/// Writes charts side by side, and one below the other, as PNG.
pub(crate) fn save(charts: &[Chart], path: &Path) -> Result<()> {
    let saved = canvas(charts).save(path);
    saved.map_err(|error| Exit::Data.because(format!("cannot write {}: {error}", path.display())).into())
}

fn canvas(charts: &[Chart]) -> Canvas {
    let (columns, rows) = (charts.len().min(COLUMNS), charts.len().div_ceil(COLUMNS));
    let names = charts.iter().map(|chart| chart.legend().len()).max().unwrap_or_default();
    let height = SIDE + (4 + names) * LETTER;
    let mut canvas = Canvas::blank(columns * WIDTH + MARGIN, rows * height + MARGIN);
    for (at, chart) in charts.iter().enumerate() {
        let (left, top) = (MARGIN + at % COLUMNS * WIDTH, MARGIN + at / COLUMNS * height);
        chart.draw_texts(&mut canvas, left, top);
        chart.draw_curves(&mut canvas, left + NUMBERS, top + (1 + names) * LETTER + LETTER / 2);
    }
    canvas
}

impl Chart {
    /// Arranges the names of the curves in rows no wider than the chart, each with its place in pixels.
    fn legend(&self) -> Vec<Vec<(usize, &Curve)>> {
        let (mut rows, mut place) = (vec![Vec::new()], 0);
        for curve in &self.curves {
            let width = (curve.name.chars().count() + 2) * LETTER / 2;
            if place > 0 && place + width > WIDTH {
                rows.push(Vec::new());
                place = 0;
            }
            if let Some(row) = rows.last_mut() {
                row.push((place, curve));
            }
            place += width;
        }
        rows
    }

    /// Writes the title and the names of the curves.
    fn draw_texts(&self, canvas: &mut Canvas, left: usize, top: usize) {
        canvas.text(&self.title, (left, top), INK);
        for (row, curves) in self.legend().into_iter().enumerate() {
            for (place, curve) in curves {
                canvas.text(&curve.name, (left + place, top + (1 + row) * LETTER), curve.colour);
            }
        }
    }

    /// Returns the range of the vertical axis: the least and the largest value, extended to 0 if `include_zero`.
    fn range(&self) -> (f64, f64) {
        let values = self.curves.iter().flat_map(|curve| curve.values.iter().flatten().copied());
        let zero = self.include_zero.then_some(0.0);
        finite_range(values.chain(zero)).unwrap_or_default()
    }

    /// Draws the curves with the numbers of both axes.
    fn draw_curves(&self, canvas: &mut Canvas, left: usize, top: usize) {
        let (low, high) = self.range();
        let share = |value: f64, low: f64, high: f64| match high > low {
            true => (value - low) / (high - low),
            false => 0.0,
        };
        let height = |value: f64| top as f64 + (1.0 - share(value, low, high)) * (SIDE - 1) as f64;
        for line in 0..=4 {
            canvas.block(left, top + line * SIDE / 4, SIDE, 1, FRAME);
        }
        if self.include_zero && low < 0.0 {
            canvas.block(left, height(0.0) as usize, SIDE, 1, GREY);
        }
        canvas.text(&number(high), (left - NUMBERS, top), INK);
        canvas.text(&number(low), (left - NUMBERS, top + SIDE - LETTER), INK);
        let (first, last) = (self.places.first().copied(), self.places.last().copied());
        let (first, last) = (first.unwrap_or(0.0), last.unwrap_or(0.0));
        let below = top + SIDE + LETTER / 2;
        canvas.text(&number(first), (left, below), INK);
        let end = number(last);
        canvas.text(&end, (left + SIDE - end.len() * LETTER / 2, below), INK);
        canvas.text(&self.axis, (left + SIDE / 2 - self.axis.len() * LETTER / 4, below), INK);
        // The last curve first, so that the first is above the others.
        for Curve { colour, values, .. } in self.curves.iter().rev() {
            let point = |(place, value): (&f64, &Option<f64>)| {
                let value = value.filter(|value| value.is_finite())?;
                let x = left as f64 + share(*place, first, last) * (SIDE - 1) as f64;
                Some((x, height(value)))
            };
            let points: Vec<Option<(f64, f64)>> = self.places.iter().zip(values).map(point).collect();
            points.iter().flatten().for_each(|&(x, y)| canvas.block(x as usize, y as usize, 3, 3, *colour));
            for pair in points.windows(2) {
                if let [Some(from), Some(to)] = pair {
                    segment(canvas, *from, *to, *colour);
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
        let curve = |name: &str, colour, values: [Option<f64>; 3]| Curve {
            name: name.to_owned(),
            colour,
            values: values.to_vec(),
        };
        let chart = Chart {
            title: "u".to_owned(),
            axis: "lead time".to_owned(),
            places: vec![1.0, 2.0, 3.0],
            curves: vec![
                curve("forecast", COLOURS[0], [Some(0.0), Some(1.0), Some(2.0)]),
                curve("no change", GREY, [Some(2.0), None, Some(diverged)]),
            ],
            include_zero: true,
        };
        let canvas = canvas(&[chart]);
        let (left, top) = (MARGIN + NUMBERS, MARGIN + 2 * LETTER + LETTER / 2);
        assert_eq!(canvas.pixel(left, top + SIDE - 1), COLOURS[0]);
        assert_eq!(canvas.pixel(left + SIDE - 1, top), COLOURS[0]);
        assert_eq!(canvas.pixel(left + SIDE / 2, top + SIDE / 2), COLOURS[0]);
        assert_eq!(canvas.pixel(left, top), GREY, "a value without neighbours is a dot");
        assert_eq!(canvas.pixel(left + SIDE / 2, top + 9), [255; 3]);
    }

    /// Values below 0 are below its line, and names that do not fit into a row begin the next.
    #[test]
    fn many_curves_of_both_signs_have_room() {
        let values = |at: usize| vec![Some(-1.0), Some(at as f64)];
        let curve = |at: usize| {
            let name = format!("geopotential_{at}00");
            Curve { name, colour: COLOURS[at], values: values(at) }
        };
        let curves: Vec<Curve> = (0..4).map(curve).collect();
        let (title, axis) = ("bias".to_owned(), "lead time".to_owned());
        let chart = Chart { title, axis, places: vec![1.0, 2.0], curves, include_zero: true };
        assert_eq!(chart.range(), (-1.0, 3.0));
        let rows: Vec<usize> = chart.legend().iter().map(Vec::len).collect();
        assert_eq!(rows, [2, 2]);
        let canvas = canvas(&[chart]);
        let (left, top) = (MARGIN + NUMBERS, MARGIN + 3 * LETTER + LETTER / 2);
        assert_eq!(canvas.pixel(left, top + SIDE - 1), COLOURS[0]);
        assert_eq!(canvas.pixel(left + SIDE - 1, top), COLOURS[3]);
        assert_eq!(canvas.pixel(left + 3 * SIDE / 4, top + 3 * (SIDE - 1) / 4), GREY, "0");
    }

    #[test]
    fn nothing_but_zeros_and_a_single_place_are_drawn() {
        let curves = vec![Curve { name: "forecast".to_owned(), colour: COLOURS[0], values: vec![Some(0.0)] }];
        let (title, axis) = ("u".to_owned(), "lead time".to_owned());
        let chart = Chart { title, axis, places: vec![1.0], curves, include_zero: true };
        let folder = tempfile::tempdir().unwrap();
        save(&[chart], &folder.path().join("x.png")).unwrap();
    }
}
