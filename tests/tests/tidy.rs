//! The tree as a whole: lengths of files, unfinished work, copies that must stay equal.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    fs,
    path::{Path, PathBuf},
};

use isobar_harness::workspace;

const LONGEST_FILE: usize = 1000;

/// All files of the project with one of these endings, by path from the root.
fn files(endings: &[&str]) -> Vec<PathBuf> {
    let root = workspace();
    let mut found = Vec::new();
    let mut folders: Vec<_> = ["apps", "crates", "examples", "tests", "xtask", "configs", "docs"]
        .map(|name| root.join(name))
        .into();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path
                .extension()
                .and_then(|ending| ending.to_str())
                .is_some_and(|it| endings.contains(&it))
            {
                found.push(path.strip_prefix(&root).unwrap().to_owned());
            }
        }
    }
    found.sort();
    assert!(!found.is_empty(), "no files ending in {endings:?}");
    found
}

fn read(path: &Path) -> String {
    fs::read_to_string(workspace().join(path)).unwrap()
}

#[test]
fn files_are_short() {
    let long: Vec<_> = files(&["rs", "cpp", "h"])
        .into_iter()
        .map(|path| (read(&path).lines().count(), path))
        .filter(|&(lines, _)| lines > LONGEST_FILE)
        .collect();
    assert!(long.is_empty(), "files of more than {LONGEST_FILE} lines: {long:?}");
}

/// What the page tells to depend on is what the program that it speaks of uses.
#[test]
fn the_readmes_program_has_its_dependencies() {
    let (readme, page) = (read(Path::new("README.md")), read(Path::new("docs/getting-started.md")));
    let used = readme.lines().filter_map(|line| line.strip_prefix("use ")?.split("::").next());
    let used: Vec<String> = used.map(|name| name.replace('_', "-")).collect();
    assert!(used.contains(&"tch".to_owned()), "{used:?}");
    let dependencies = page.split("[dependencies]").nth(1).unwrap().split("```").next().unwrap();
    for name in used {
        assert!(dependencies.contains(&format!("\n{name} = ")), "{name} is missing in {dependencies}");
    }
}

#[test]
fn nothing_is_left_unfinished() {
    // Put together, so that this file is not found.
    let words = ["to", "fix", "un"].map(str::to_owned);
    let [to, fix, un] = &words;
    let signs = [
        format!("{to}do!("),
        format!("{un}implemented!("),
        format!("{to}do:").to_uppercase(),
        format!("{fix}me").to_uppercase(),
        format!("#[{}]", "ignore"),
    ];
    for path in files(&["rs", "cpp", "h", "toml", "md"]) {
        let text = read(&path);
        for sign in &signs {
            assert!(!text.contains(sign.as_str()), "{} holds `{sign}`", path.display());
        }
    }
}

#[test]
fn golden_cases_are_the_shared_ones() {
    compare("tests/golden", "../shared/golden");
}

#[test]
fn peers_are_the_shared_ones() {
    compare("benches/peers", "../shared/peers");
}

/// Both folders hold the same files, if the shared one is there.
#[track_caller]
fn compare(own: &str, shared: &str) {
    let (own, shared) = (workspace().join(own), workspace().join(shared));
    let names = |folder: &Path| {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let mut names: Vec<_> = entries.map(|entry| entry.file_name()).collect();
        names.sort();
        names
    };
    assert!(!names(&own).is_empty(), "{} is empty", own.display());
    if !shared.is_dir() {
        return;
    }
    assert_eq!(names(&own), names(&shared));
    for name in names(&own) {
        assert!(
            fs::read(own.join(&name)).unwrap() == fs::read(shared.join(&name)).unwrap(),
            "{name:?} differs"
        );
    }
}

#[test]
fn markdown_links_lead_somewhere() {
    let mut pages: Vec<_> =
        files(&["md"]).into_iter().filter(|page| !page.starts_with("tests/golden")).collect();
    pages.extend(["README.md", "CHANGELOG.md", "CONTRIBUTING.md"].map(PathBuf::from));
    for page in pages {
        let text = read(&page);
        for target in
            text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target)
        {
            let file = target.split('#').next().unwrap_or_default();
            if file.is_empty() || file.contains("://") {
                continue;
            }
            let folder = page.parent().unwrap_or(Path::new(""));
            assert!(workspace().join(folder).join(file).exists(), "{}: no {target}", page.display());
        }
    }
}
