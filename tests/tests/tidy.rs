//! The tree as a whole: lengths of files, unfinished work, copies that must stay equal.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use isobar_harness::{cargo, workspace};

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

/// `main` that returns a `Result` prints an error in Debug form, on each rank.
#[test]
fn programs_print_their_errors_once() {
    let mut programs: Vec<PathBuf> = ["README.md", "examples/heat/src/main.rs"].map(PathBuf::from).into();
    for folder in ["docs", "crates/manager/examples", "crates/data/examples"] {
        let found = fs::read_dir(workspace().join(folder)).unwrap().map(|entry| entry.unwrap().path());
        programs.extend(found.filter(|path| path.is_file()));
    }
    assert!(programs.len() > 8, "{programs:?}");
    for program in programs {
        let text = read(&program);
        assert!(
            !text.contains("fn main() -> Result"),
            "{}: `isobar_manager::main` runs it",
            program.display()
        );
    }
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

/// The page lists the dependencies that its program uses.
#[test]
fn the_readmes_program_has_its_dependencies() {
    let (readme, page) = (read(Path::new("README.md")), read(Path::new("docs/getting-started.md")));
    let used = readme.lines().filter_map(|line| line.strip_prefix("use ")?.split("::").next());
    let used: Vec<String> = used.filter(|name| *name != "std").map(|name| name.replace('_', "-")).collect();
    assert!(used.contains(&"isobar".to_owned()), "{used:?}");
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

/// Integration tests of a package are modules of `tests/main.rs`, or programs that `Cargo.toml` names: a file that is neither
/// would never run.
#[test]
fn every_test_file_is_compiled() {
    let mut programs = 0;
    for main in files(&["rs"]).into_iter().filter(|path| path.ends_with("tests/main.rs")) {
        programs += 1;
        let (modules, folder) = (read(&main), main.parent().unwrap());
        let manifest = read(&folder.parent().unwrap().join("Cargo.toml"));
        for entry in fs::read_dir(workspace().join(folder)).unwrap().flatten() {
            let path = entry.path();
            let name = path.file_stem().unwrap().to_str().unwrap();
            let is_module = modules.contains(&format!("\nmod {name};\n"));
            let is_program = manifest.contains(&format!("path = \"tests/{name}.rs\""));
            let has_code =
                path.extension().is_some_and(|ending| ending == "rs") || path.join("mod.rs").exists();
            assert!(
                !has_code || is_module != is_program,
                "{} needs a line in {}",
                path.display(),
                main.display()
            );
        }
    }
    assert!(programs >= 5, "{programs} programs of integration tests");
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

/// Dependencies that `cargo test -p PACKAGE` and `cargo build -p PACKAGE` compile have the features of a build of the whole
/// workspace: else cargo would compile it once more.
#[test]
fn all_builds_share_their_dependencies() {
    // Crates that build scripts use, too, may have other features there.
    for with_build in [true, false] {
        let all = features(&["--workspace"], with_build, true);
        let own = |line: &&String| line.contains(&format!("({}", workspace().display()));
        let packages: Vec<&str> = all.iter().filter(own).filter_map(|line| line.split(' ').next()).collect();
        assert!(packages.contains(&"isobar-shard") && packages.contains(&"xtask"), "{packages:?}");
        for package in packages {
            for tests in [true, false] {
                let others: Vec<_> =
                    features(&["-p", package], with_build, tests).difference(&all).cloned().collect();
                assert!(
                    others.is_empty(),
                    "-p {package} (tests: {tests}) compiles these again, with fewer features than the workspace; add \
                     theirs to crates/features/Cargo.toml, or to the default features of the package: {others:#?}"
                );
            }
        }
    }
}

/// The packages that cargo compiles for a choice of packages, with their features, a line each.
fn features(chosen: &[&str], with_build: bool, with_tests: bool) -> BTreeSet<String> {
    let mut tree = cargo();
    tree.current_dir(workspace()).args(["tree", "--frozen", "--prefix", "none", "--format", "{p} {f}"]);
    let kinds = [("normal", true), ("build", with_build), ("dev", with_tests)];
    let kinds: Vec<&str> = kinds.into_iter().filter(|(_, with)| *with).map(|(kind, _)| kind).collect();
    tree.args(chosen).args(["--edges", &kinds.join(",")]);
    if cfg!(not(feature = "mpi")) {
        tree.arg("--no-default-features");
    }
    let output = tree.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(|line| line.trim_end_matches(" (*)").trim_end().to_owned()).collect()
}

/// A program that only needs the models builds without the large libraries that files, generators and communication need.
#[test]
fn models_alone_need_no_large_library() {
    let mut tree = cargo();
    tree.current_dir(workspace()).args(["tree", "--frozen", "--prefix", "none", "--format", "{p}"]);
    tree.args(["--package", "isobar", "--no-default-features", "--edges", "normal,build"]);
    let output = tree.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let packages: BTreeSet<&str> = text.lines().filter_map(|line| line.split(' ').next()).collect();
    assert!(packages.contains("isobar-models"), "{packages:?}");
    for large in ["hdf5-metno-sys", "faer", "mpi-sys", "cudarc", "zarrs", "object_store", "clap"] {
        assert!(!packages.contains(large), "isobar without default features needs {large}");
    }
}

/// Phrases that readers stumble over; the plain form says what it is in its first words.
#[test]
fn prose_is_plain() {
    // Put together, so that this file is not found.
    let phrases = [
        ["which there is", " not"],
        ["that there are", " not"],
        ["so many", " that"],
        ["behind each", " other"],
        ["of noth", "ing"],
        ["in v", "ain"],
        ["goes on", " as"],
        ["lies wh", "ole"],
        ["takes part", " in it"],
    ]
    .map(|parts| parts.concat());
    let beginnings = ["What", "Who", "Whether", "The same", "As there", "As of"];
    let mut found = Vec::new();
    for path in files(&["rs", "md", "toml"]) {
        let is_code = path.extension().is_some_and(|ending| ending == "rs");
        let mut in_comment = false;
        for (number, line) in read(&path).lines().enumerate() {
            let comment = line.trim_start();
            let doc = ["/// ", "//! "].iter().find_map(|marker| comment.strip_prefix(marker));
            let begins = doc.is_some_and(|text| {
                beginnings
                    .iter()
                    .any(|word| text.strip_prefix(word).is_some_and(|rest| rest.starts_with(' ')))
            });
            let first = begins && is_code && !in_comment;
            if first || phrases.iter().any(|phrase| line.contains(phrase)) {
                found.push(format!("{}:{}: {comment}", path.display(), number + 1));
            }
            in_comment = doc.is_some();
        }
    }
    assert!(found.is_empty(), "say it plainly (subject, verb, object):\n{}", found.join("\n"));
}
