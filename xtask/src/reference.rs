//! The pages that are generated from the code: `configs/reference.toml`, and the tables of `docs/configuration.md` and
//! `docs/operators.md`.

use std::fs;

use anyhow::{Context, Result};

use crate::run::{ROOT, cargo, output};

/// The generated parts of pages: what each begins with, and the program's arguments that print it.
const TABLES: [(&str, &str, &[&str]); 2] = [
    ("docs/configuration.md", "\n## `[", &["config", "reference", "--markdown"]),
    ("docs/operators.md", "\n| operator", &["verify", "--list"]),
];

/// Writes all of them.
pub(crate) fn run() -> Result<()> {
    let isobar = |words: &[&str]| {
        let start = ["run", "--quiet", "--package", "isobar-cli", "--bin", "isobar", "--"];
        output(&mut cargo(&[&start[..], words].concat()))
    };
    for (page, first, words) in TABLES {
        let (page, tables) = (ROOT.join(page), isobar(words)?);
        let text = fs::read_to_string(&page).with_context(|| page.display().to_string())?;
        let (head, _) =
            text.split_once(first).with_context(|| format!("{} has no tables", page.display()))?;
        fs::write(&page, format!("{head}\n{tables}")).with_context(|| page.display().to_string())?;
    }
    let toml = isobar(&["config", "reference"])?;
    let file = ROOT.join("configs/reference.toml");
    fs::write(&file, toml).with_context(|| file.display().to_string())
}
