//! The pages that are generated from the code: `configs/reference.toml`, and the tables of `docs/configuration.md`.

use std::fs;

use anyhow::{Context, Result};

use crate::run::{ROOT, cargo, output};

/// Heading of the first generated table.
const FIRST: &str = "\n## `[";

/// Writes both.
pub(crate) fn run() -> Result<()> {
    let reference = |options: &[&str]| {
        let start =
            ["run", "--quiet", "--package", "isobar-cli", "--bin", "isobar", "--", "config", "reference"];
        output(&mut cargo(&[&start[..], options].concat()))
    };
    let (toml, tables) = (reference(&[])?, reference(&["--markdown"])?);
    let page = ROOT.join("docs/configuration.md");
    let text = fs::read_to_string(&page).with_context(|| page.display().to_string())?;
    let (head, _) = text.split_once(FIRST).with_context(|| format!("{} has no tables", page.display()))?;
    fs::write(&page, format!("{head}\n{tables}")).with_context(|| page.display().to_string())?;
    let file = ROOT.join("configs/reference.toml");
    fs::write(&file, toml).with_context(|| file.display().to_string())
}
