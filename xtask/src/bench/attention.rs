//! `cargo xtask bench --attention`: time of attention against the number of tokens, on 1, 2 and 4 ranks.

use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::prelude::*;

use super::{milliseconds, our_run, seconds, times};
use crate::run::ROOT;

const RANKS: [usize; 3] = [1, 2, 4];
/// Numbers of tokens are powers of two with these exponents.
const EXPONENTS: std::ops::RangeInclusive<u32> = 10..=17;
const PASSES: [(&str, &str); 2] = [("forward", "forward"), ("backward", "forward and backward")];

/// Seconds of a number of tokens on each of [`RANKS`].
struct Row {
    tokens: u32,
    seconds: Vec<f64>,
}

/// Prints a table for each pass, and draws both into `target/attention.svg`.
pub(super) fn run() -> Result<()> {
    let mut tables = Vec::new();
    for (case, title) in PASSES {
        println!("{title}, milliseconds: 8 heads of 32 features, float32\n");
        println!("| tokens | 1 rank | 2 ranks | 4 ranks | 1 ÷ 2 | 1 ÷ 4 |\n|---|---|---|---|---|---|");
        let mut rows = Vec::new();
        for exponent in EXPONENTS {
            let row = row(case, exponent)?;
            let [one, two, four] = row.seconds[..] else { continue };
            let [one_ms, two_ms, four_ms] = [one, two, four].map(milliseconds);
            println!(
                "| 2^{exponent} | {one_ms} | {two_ms} | {four_ms} | {:.2} | {:.2} |",
                one / two,
                one / four
            );
            rows.push(row);
        }
        for (at, ranks) in RANKS.iter().enumerate().skip(1) {
            match break_even(&rows, at) {
                Some(row) => println!("\n{ranks} ranks are faster than one from {} tokens on", row.tokens),
                None => println!("\n{ranks} ranks are not faster than one"),
            }
        }
        println!();
        tables.push((title, rows));
    }
    let picture = ROOT.join("target/attention.svg");
    draw(&tables, &picture).map_err(|error| anyhow!("cannot draw {}: {error}", picture.display()))?;
    println!("drawn in {}", picture.display());
    Ok(())
}

/// Returns the first row from which on all are faster on the ranks at this place of [`RANKS`] than on one.
fn break_even(rows: &[Row], at: usize) -> Option<&Row> {
    let slower = rows.iter().rposition(|row| row.seconds[at] >= row.seconds[0]);
    rows.get(slower.map_or(0, |last| last + 1))
}

/// Times one number of tokens. Long cases run once: their times vary little, and all cases already take an hour.
fn row(case: &str, exponent: u32) -> Result<Row> {
    let (warm_ups, repeats) = match exponent {
        ..13 => ("2", 7),
        13..15 => ("1", 3),
        _ => ("0", 1),
    };
    let tokens = 1 << exponent;
    let case = format!("attention/{case}_{tokens}");
    let on = |ranks: &usize| {
        let mut command = our_run(&ranks.to_string(), &[&case], repeats);
        seconds(&times(command.args(["--warm-ups", warm_ups]))?, &case, "Isobar")
    };
    Ok(Row { tokens, seconds: RANKS.iter().map(on).collect::<Result<_>>()? })
}

/// Draws a chart for each table, both axes logarithmic.
fn draw(tables: &[(&str, Vec<Row>)], path: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::new(path, (960, 420)).into_drawing_area();
    root.fill(&WHITE)?;
    for (area, (title, rows)) in root.split_evenly((1, tables.len())).iter().zip(tables) {
        let all = || rows.iter().flat_map(|row| &row.seconds).map(|seconds| 1e3 * seconds);
        let (low, high) = (all().fold(f64::INFINITY, f64::min), all().fold(0.0, f64::max));
        let tokens = 1_u32 << EXPONENTS.start()..1_u32 << EXPONENTS.end();
        let mut chart = ChartBuilder::on(area)
            .margin(12)
            .caption(format!("Attention, {title}"), ("sans-serif", 18))
            .x_label_area_size(36)
            .y_label_area_size(60)
            .build_cartesian_2d(tokens.log_scale().base(2.0), (low / 2.0..2.0 * high).log_scale())?;
        chart.configure_mesh().x_desc("tokens").y_desc("milliseconds").light_line_style(WHITE).draw()?;
        for (at, ranks) in RANKS.iter().enumerate() {
            let colour = Palette99::pick(at).to_rgba();
            let points = rows.iter().map(|row| (row.tokens, 1e3 * row.seconds[at]));
            let label = if *ranks == 1 { "1 rank".to_owned() } else { format!("{ranks} ranks") };
            chart
                .draw_series(LineSeries::new(points, colour.stroke_width(2)).point_size(3))?
                .label(label)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .background_style(WHITE)
            .draw()?;
    }
    root.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_break_even_is_after_the_last_slower_row() {
        let times = [(1024, [1.0, 0.9]), (2048, [1.0, 1.5]), (4096, [4.0, 2.0])];
        let rows = times.map(|(tokens, seconds)| Row { tokens, seconds: seconds.to_vec() });
        assert_eq!(break_even(&rows, 1).map(|row| row.tokens), Some(4096));
        assert!(break_even(&rows[..2], 1).is_none());
    }

    #[test]
    fn a_chart_for_each_pass_is_drawn() {
        let row = |tokens| Row { tokens, seconds: vec![1e-6 * f64::from(tokens), 1e-3, 2e-3] };
        let tables = PASSES.map(|(_, title)| (title, vec![row(1 << 10), row(1 << 17)]));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("attention.svg");
        draw(&tables, &path).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        for label in ["Attention, forward and backward", "4 ranks", "tokens"] {
            assert!(text.contains(label), "{label} in {text}");
        }
    }
}
