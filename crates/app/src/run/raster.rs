//! Fields as panels with a title and a colour bar, drawn into pixels. Text is in a font of 8 x 8 dots, which needs no font
//! of the machine.

use std::io::BufWriter;
use std::path::Path;

use font8x8::UnicodeFonts;
use isobar_files::NewFile;

/// Values on a grid, row by row; the first row is drawn at the top.
pub(crate) struct Field {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// `None` where nothing is drawn.
    pub(crate) values: Vec<Option<f64>>,
}

/// Colours in which a field is drawn.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Palette {
    /// Dark to light, without colour.
    Greys,
    /// Blue over green to yellow.
    Viridis,
    /// Black over red to white.
    Magma,
}

/// A field with its title, its colours, and the values at their ends.
pub(crate) struct Panel {
    field: Field,
    title: String,
    palette: Palette,
    range: (f64, f64),
}

/// Panels side by side and one below the other.
pub(crate) struct Canvas {
    width: usize,
    height: usize,
    pixels: Vec<Rgb>,
}

/// Red, green, blue.
pub(crate) type Rgb = [u8; 3];

/// Pixels along each side of a field, at least.
pub(super) const SIDE: usize = 256;
pub(super) const MARGIN: usize = 16;
/// Pixels of a letter: its dots are doubled.
pub(super) const LETTER: usize = 16;
const BAR: usize = 16;
/// Room for the numbers beside a colour bar.
pub(super) const NUMBERS: usize = 8 * LETTER / 2 + 8;
const WHITE: Rgb = [255, 255, 255];
pub(super) const INK: Rgb = [40, 40, 40];

impl Field {
    /// The least and the greatest value of both.
    pub(crate) fn range_with(&self, other: &Field) -> (f64, f64) {
        let (a, b) = (self.range(), other.range());
        (a.0.min(b.0), a.1.max(b.1))
    }

    /// The field under a title, over its own range.
    pub(crate) fn panel(self, title: &str, palette: Palette) -> Panel {
        let range = self.range();
        Panel { field: self, title: title.to_owned(), palette, range }
    }

    fn range(&self) -> (f64, f64) {
        finite_range(self.values.iter().flatten().copied()).unwrap_or((f64::INFINITY, f64::NEG_INFINITY))
    }
}

/// The least and the largest of the values that are finite.
pub(super) fn finite_range(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    let finite = values.filter(|value| value.is_finite());
    finite.map(|value| (value, value)).reduce(|(low, high), (value, _)| (low.min(value), high.max(value)))
}

impl Panel {
    /// Returns the panel with its colours over this range.
    pub(crate) fn over(mut self, range: (f64, f64)) -> Self {
        self.range = range;
        self
    }

    /// Text above the field.
    #[cfg(test)]
    pub(super) fn title(&self) -> &str {
        &self.title
    }

    /// Pixels of a value, in both directions.
    fn zoom(&self) -> usize {
        SIDE.div_ceil(self.field.rows.max(self.field.cols).max(1))
    }

    fn size(&self) -> (usize, usize) {
        let zoom = self.zoom();
        let (width, height) = (self.field.cols * zoom, self.field.rows * zoom);
        let title = self.title.chars().count() * LETTER / 2;
        ((width + MARGIN / 2 + BAR + NUMBERS).max(title), height + 2 * LETTER)
    }
}

impl Canvas {
    /// A white picture.
    pub(super) fn blank(width: usize, height: usize) -> Self {
        Self { width, height, pixels: vec![WHITE; width * height] }
    }

    /// The colour of a pixel.
    #[cfg(test)]
    pub(super) fn pixel(&self, x: usize, y: usize) -> Rgb {
        self.pixels[y * self.width + x]
    }

    /// Draws rows of panels.
    pub(crate) fn of(rows: &[Vec<Panel>]) -> Self {
        let sizes = || rows.iter().flatten().map(Panel::size);
        let cell = (
            sizes().map(|s| s.0).max().unwrap_or(0) + MARGIN,
            sizes().map(|s| s.1).max().unwrap_or(0) + MARGIN,
        );
        let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
        let (width, height) = (columns * cell.0 + MARGIN, rows.len() * cell.1 + MARGIN);
        let mut canvas = Self::blank(width, height);
        for (row, panels) in rows.iter().enumerate() {
            for (col, panel) in panels.iter().enumerate() {
                canvas.panel(panel, MARGIN + col * cell.0, MARGIN + row * cell.1);
            }
        }
        canvas
    }

    /// Writes it as PNG.
    pub(crate) fn save(&self, path: &Path) -> Result<(), png::EncodingError> {
        let mut file = NewFile::create(path)?;
        let mut encoder =
            png::Encoder::new(BufWriter::new(file.file()), self.width as u32, self.height as u32);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        let mut writer = encoder.write_header()?;
        writer.write_image_data(self.pixels.as_flattened())?;
        writer.finish()?;
        Ok(file.finish()?)
    }

    fn panel(&mut self, panel: &Panel, left: usize, top: usize) {
        let (field, zoom) = (&panel.field, panel.zoom());
        self.text(&panel.title, (left, top), INK);
        let top = top + 2 * LETTER - LETTER / 2;
        let (low, high) = panel.range;
        let scaled = |value: f64| match high > low || !value.is_finite() {
            true => (value - low) / (high - low),
            false => 0.5,
        };
        for row in 0..field.rows {
            for col in 0..field.cols {
                let Some(value) = field.values[row * field.cols + col] else { continue };
                let colour = panel.palette.at(scaled(value));
                self.block(left + col * zoom, top + row * zoom, zoom, zoom, colour);
            }
        }
        let (bar, height) = (left + field.cols * zoom + MARGIN / 2, field.rows * zoom);
        for line in 0..height {
            let share = 1.0 - line as f64 / (height - 1).max(1) as f64;
            self.block(bar, top + line, BAR, 1, panel.palette.at(share));
        }
        let numbers = bar + BAR + 4;
        self.text(&number(high), (numbers, top), INK);
        self.text(&number(low), (numbers, top + height - LETTER), INK);
    }

    /// Writes a line of text.
    pub(super) fn text(&mut self, text: &str, (left, top): (usize, usize), colour: Rgb) {
        for (place, letter) in text.chars().enumerate() {
            let rows =
                font8x8::BASIC_FONTS.get(letter).or_else(|| font8x8::BASIC_FONTS.get('?')).unwrap_or([0; 8]);
            for (y, bits) in rows.iter().enumerate() {
                for x in (0..8).filter(|x| bits & (1 << x) != 0) {
                    // Twice as high as wide: narrow letters that can still be read.
                    self.block(left + place * LETTER / 2 + x, top + 2 * y, 1, 2, colour);
                }
            }
        }
    }

    /// Fills a rectangle, as far as it is in the picture.
    pub(super) fn block(&mut self, left: usize, top: usize, width: usize, height: usize, colour: Rgb) {
        let (right, bottom) = ((left + width).min(self.width), (top + height).min(self.height));
        for y in top..bottom {
            self.pixels[y * self.width + left.min(right)..y * self.width + right].fill(colour);
        }
    }
}

impl Palette {
    /// The colour of a value in 0..=1; of one that is not finite, red.
    fn at(self, share: f64) -> Rgb {
        if !share.is_finite() {
            return [255, 0, 0];
        }
        let gradient = match self {
            Self::Greys => colorous::GREYS,
            Self::Viridis => colorous::VIRIDIS,
            Self::Magma => colorous::MAGMA,
        };
        let colour = gradient.eval_continuous(share.clamp(0.0, 1.0));
        [colour.r, colour.g, colour.b]
    }
}

/// A number in at most eight letters.
pub(crate) fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        size if (1e-3..1e4).contains(&size) => format!("{value:.4}").chars().take(6).collect(),
        _ => format!("{value:.1e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        let texts = [0.0, 12.0, 0.0123456, -3.5, 1.5e-5, 2e9].map(number);
        assert_eq!(texts, ["0", "12.000", "0.0123", "-3.500", "1.5e-5", "2.0e9"]);
    }

    #[test]
    fn panels_are_drawn_where_they_belong() {
        let field = |values: [f64; 4]| Field { rows: 2, cols: 2, values: values.map(Some).into() };
        let rows = [vec![
            field([0.0, 0.0, 0.0, 1.0]).panel("a", Palette::Viridis),
            field([2.0, 2.0, 2.0, f64::NAN]).panel("b", Palette::Greys),
        ]];
        let canvas = Canvas::of(&rows);
        let top = MARGIN + 2 * LETTER - LETTER / 2;
        let at = |x: usize, y: usize| canvas.pixel(x, y);
        assert_eq!(at(MARGIN, top), Palette::Viridis.at(0.0));
        assert_eq!(at(MARGIN + SIDE - 1, top + SIDE - 1), Palette::Viridis.at(1.0));
        assert_eq!(at(0, 0), WHITE);
        let file = tempfile::tempdir().unwrap().path().join("x.png");
        assert!(canvas.save(&file).is_err(), "its folder is gone");
    }
}
