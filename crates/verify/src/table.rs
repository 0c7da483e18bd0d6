//! The table of the operators of sharded tensors.

use std::fmt::Write as _;

use isobar_shard::rules::operators;

/// Returns all operators as a table in Markdown: names, tensors, arguments, meaning, what a rank receives.
pub(super) fn markdown() -> String {
    let mut text =
        "| operator | tensors | arguments | result | data that a rank receives |\n|---|---|---|---|---|\n"
            .to_owned();
    for operator in operators() {
        let tensors = match operator.tensors() {
            [] => "any number".to_owned(),
            names => code(names),
        };
        let arguments = code(operator.arguments());
        let summary = operator.summary().replace('|', "\\|");
        let (name, received) = (operator.name(), operator.traffic().text());
        // Writing to a string cannot fail.
        let _ = writeln!(text, "| `{name}` | {tensors} | {arguments} | {summary} | {received} |");
    }
    text
}

/// Names as Markdown.
fn code(names: &[&str]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    /// Reads a file of the workspace.
    fn file(name: &str) -> String {
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name)).unwrap()
    }

    #[test]
    fn documents_are_what_the_code_says() {
        let page = file("docs/operators.md");
        let table = page.split_once("\n| operator").map(|(_, table)| format!("| operator{table}"));
        // The tests of budgets register operators of their own.
        let own = |name: &str| name.starts_with("own_");
        let rows = markdown()
            .lines()
            .filter(|row| !own(row.trim_start_matches("| `")))
            .fold(String::new(), |rows, row| rows + row + "\n");
        assert!(table == Some(rows), "docs/operators.md is out of date; run `cargo xtask reference`");
        let count = operators().iter().filter(|operator| !own(operator.name())).count();
        let count = format!("{count} operators:");
        assert!(file("README.md").contains(&count), "README.md has another number; expected \"{count}\"");
    }
}
