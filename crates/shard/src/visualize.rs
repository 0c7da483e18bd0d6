//! Pictures of layouts: which ranks hold which indices.

use std::fmt;
use std::ops::Range;

use crate::error::{Error, Result};
use crate::layout::{Dim, Layout, coordinates};

/// More dims than this do not fit on a page.
const MOST_DIMS: usize = 3;

/// View of the ranks that hold each index of a layout, to be printed, or drawn by [`svg`](Self::svg).
#[derive(Debug, Clone)]
pub struct ShardingView {
    title: String,
    /// Along each dim, the intervals that no rank's part cuts.
    cells: Vec<Vec<Range<i64>>>,
    /// The ranks that hold each combination of cells, the last dim fastest.
    holders: Vec<Vec<usize>>,
    /// The ranks that hold none.
    empty: Vec<usize>,
}

/// Shows which ranks hold which indices of a tensor of one, two or three dims (or none): as a line, a grid, or a grid for
/// each slab of the first dim. Ranks are numbered as in the world; several in one cell are replicas. Does not communicate.
///
/// # Errors
///
/// A layout of more dims than three.
///
/// ```
/// use isobar_collectives::Group;
/// use isobar_mesh::DeviceMesh;
/// use isobar_shard::{Layout, Placement, Sizes, visualize_sharding};
///
/// let mesh = DeviceMesh::new(&Group::single(), &[1], &["domain"])?;
/// let layout = Layout::new(&mesh, &[Placement::Shard(0)], &[6], &Sizes::Chunk)?;
/// let view = visualize_sharding(&layout)?;
/// assert_eq!(view.to_string(), "[6] on mesh (domain=1): domain Shard(0) of [6]\n0..6\nrank 0\n");
/// assert!(view.svg().starts_with("<svg "));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn visualize_sharding(layout: &Layout) -> Result<ShardingView> {
    if layout.ndim() > MOST_DIMS {
        return Err(Error::from(isobar_array::Error::Argument {
            op: "visualize_sharding",
            reason: format!(
                "{layout} has {} dims, of which at most {MOST_DIMS} can be shown; show a layout of the dims that are split",
                layout.ndim()
            ),
        }));
    }
    let mesh = layout.mesh_shape();
    let cells: Vec<Vec<Range<i64>>> = layout.dims().iter().map(uncut).collect();
    let numbers = layout.mesh().ranks();
    let count: usize = mesh.iter().product();
    let holds = |index: usize, cell: &[usize]| {
        let at = coordinates(index, mesh);
        layout.dims().iter().enumerate().all(|(dim, split)| {
            let start = cells[dim][cell[dim]].start;
            split.part(&at, mesh).iter().any(|own| own.start <= start && start < own.end())
        })
    };
    let extents: Vec<usize> = cells.iter().map(Vec::len).collect();
    let holders: Vec<Vec<usize>> = (0..extents.iter().product())
        .map(|number| {
            let cell = coordinates(number, &extents);
            (0..count).filter(|&index| holds(index, &cell)).map(|index| numbers[index]).collect()
        })
        .collect();
    let without = |rank: &usize| !holders.iter().flatten().any(|holder| holder == rank);
    let mut empty: Vec<usize> = numbers.iter().copied().filter(without).collect();
    empty.sort_unstable();
    Ok(ShardingView { title: layout.to_string(), cells, holders, empty })
}

/// The intervals of a dim that no part cuts.
fn uncut(dim: &Dim) -> Vec<Range<i64>> {
    let ends = dim.parts.iter().flatten().filter(|interval| interval.len > 0);
    let mut cuts: Vec<i64> = ends.flat_map(|interval| [interval.start, interval.end()]).collect();
    cuts.sort_unstable();
    cuts.dedup();
    cuts.windows(2).map(|pair| pair[0]..pair[1]).collect()
}

impl ShardingView {
    /// The slabs of the picture, each with its name and its grid of rows and columns.
    fn slabs(&self) -> Vec<(Option<Range<i64>>, Grid<'_>)> {
        let whole = || vec![None];
        let named = |cells: &[Range<i64>]| cells.iter().cloned().map(Some).collect::<Vec<_>>();
        let [slabs, rows, columns] = match &self.cells[..] {
            [] => [whole(), whole(), whole()],
            [columns] => [whole(), whole(), named(columns)],
            [rows, columns] => [whole(), named(rows), named(columns)],
            [slabs, rows, columns, ..] => [named(slabs), named(rows), named(columns)],
        };
        let size = rows.len() * columns.len();
        let grid = |(index, slab): (usize, Option<Range<i64>>)| {
            let holders = &self.holders[index * size..(index + 1) * size];
            (slab, Grid { rows: rows.clone(), columns: columns.clone(), holders })
        };
        slabs.into_iter().enumerate().map(grid).collect()
    }

    /// The picture as an SVG image: lengths in proportion to extents, a colour for each rank, or set of replicas. The slabs of
    /// a tensor of three dims stand side by side.
    pub fn svg(&self) -> String {
        const SIDE: f64 = 320.0;
        const GAP: f64 = 24.0;
        const TOP: f64 = 44.0;
        let extent = |dim: usize| self.cells[dim].last().map_or(1, |last| last.end) as f64;
        let dims = self.cells.len();
        let across = if dims > 0 { extent(dims - 1) } else { 1.0 };
        let down = if dims > 1 { extent(dims - 2) } else { 1.0 };
        // Long and narrow tensors are drawn no narrower than they can be read.
        let longest = across.max(down);
        let (width, height) = ((SIDE * across / longest).max(80.0), (SIDE * down / longest).max(40.0));
        let slabs = self.slabs();
        let total = (GAP + (width + GAP) * slabs.len() as f64).max(8.0 * self.title.len() as f64);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{total:.0}\" height=\"{:.0}\" font-family=\"sans-serif\" \
             font-size=\"12\">\n<text x=\"{GAP}\" y=\"16\">{}</text>\n",
            TOP + height + GAP,
            escaped(&self.title)
        );
        for (number, (slab, grid)) in slabs.iter().enumerate() {
            let left = GAP + (width + GAP) * number as f64;
            if let Some(slab) = slab {
                svg +=
                    &format!("<text x=\"{left:.1}\" y=\"36\">dim 0: {}..{}</text>\n", slab.start, slab.end);
            }
            let span = |cell: &Option<Range<i64>>, extent: f64, length: f64| match cell {
                Some(cell) => {
                    (length * cell.start as f64 / extent, length * (cell.end - cell.start) as f64 / extent)
                }
                None => (0.0, length),
            };
            for (row, column, holders) in grid.cells() {
                let (x, w) = span(column, across, width);
                let (y, h) = span(row, down, height);
                let (x, y) = (left + x, TOP + y);
                svg += &format!(
                    "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{w:.1}\" height=\"{h:.1}\" fill=\"hsl({}, 60%, 75%)\" \
                     stroke=\"black\"/>\n<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" \
                     dominant-baseline=\"middle\">{}</text>\n",
                    hue(holders),
                    x + w / 2.0,
                    y + h / 2.0,
                    numbers(holders)
                );
            }
        }
        svg + "</svg>\n"
    }
}

impl fmt::Display for ShardingView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.title)?;
        if self.holders.is_empty() {
            writeln!(f, "no elements")?;
        }
        for (slab, grid) in self.slabs() {
            if let Some(slab) = slab {
                writeln!(f, "dim 0: {}..{}", slab.start, slab.end)?;
            }
            grid.write(f)?;
        }
        if !self.empty.is_empty() && !self.holders.is_empty() {
            writeln!(f, "nothing: {}", named(&self.empty))?;
        }
        Ok(())
    }
}

/// Rows and columns, unnamed where there is no such dim.
struct Grid<'a> {
    rows: Vec<Option<Range<i64>>>,
    columns: Vec<Option<Range<i64>>>,
    holders: &'a [Vec<usize>],
}

impl Grid<'_> {
    fn cells(&self) -> impl Iterator<Item = (&Option<Range<i64>>, &Option<Range<i64>>, &[usize])> {
        let places = self.rows.iter().flat_map(|row| self.columns.iter().map(move |column| (row, column)));
        places.zip(self.holders).map(|((row, column), holders)| (row, column, &holders[..]))
    }

    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let label = |cell: &Option<Range<i64>>| {
            cell.as_ref().map_or(String::new(), |cell| format!("{}..{}", cell.start, cell.end))
        };
        let header = std::iter::once(String::new()).chain(self.columns.iter().map(label)).collect();
        let mut lines: Vec<Vec<String>> = vec![header];
        for (index, row) in self.rows.iter().enumerate() {
            let own = self.holders.iter().skip(index * self.columns.len()).take(self.columns.len());
            let held = own.map(|holders| named(holders));
            lines.push(std::iter::once(label(row)).chain(held).collect());
        }
        let columns = self.columns.len() + 1;
        let width = |column: usize| lines.iter().map(|line| line[column].len()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for line in lines {
            // A column without any text, as the rows' names of a line, takes no room.
            let cells = line.iter().zip(&widths).filter(|(_, width)| **width > 0);
            let cells: Vec<String> = cells.map(|(cell, &width)| format!("{cell:width$}")).collect();
            let text = cells.join("  ");
            if !text.trim().is_empty() {
                writeln!(f, "{}", text.trim_end())?;
            }
        }
        Ok(())
    }
}

fn numbers(ranks: &[usize]) -> String {
    ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(" ")
}

fn named(ranks: &[usize]) -> String {
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, numbers(ranks))
}

/// Hues of neighbouring ranks lie far apart: by the golden angle.
fn hue(holders: &[usize]) -> usize {
    let first = holders.iter().min().copied().unwrap_or(0);
    first * 137 % 360
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
