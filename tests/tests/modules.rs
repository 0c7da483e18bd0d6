//! The graph of each crate's modules: siblings depend on each other in one direction only.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use isobar_harness::workspace;

type Module = Vec<String>;

/// Files of a crate's modules. The root's name is empty.
fn modules(src: &Path) -> BTreeMap<Module, PathBuf> {
    let mut found = BTreeMap::new();
    let mut folders = vec![(src.to_owned(), Module::new())];
    while let Some((folder, name)) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let stem = path.file_stem().unwrap().to_str().unwrap().to_owned();
            let child = [&name[..], std::slice::from_ref(&stem)].concat();
            if path.is_dir() {
                folders.push((path, child));
            } else if path.extension().is_some_and(|ending| ending == "rs") {
                match stem.as_str() {
                    "main" | "tests" | "fuzz" => {}
                    "mod" | "lib" => drop(found.insert(name.clone(), path)),
                    _ => drop(found.insert(child, path)),
                }
            }
        }
    }
    found
}

/// Code without comments and without the tests at its end.
fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
    let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
    lines.flat_map(|line| [line, "\n"]).collect()
}

/// Paths from the crate's root or relative to the module, groups of imports as one path each.
fn paths(code: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, start) in ["crate::", "super::", "self::"].iter().flat_map(|start| code.match_indices(start)) {
        let before = code[..at].chars().next_back();
        if !before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':' || c == '$') {
            found.extend(expand(&code[at..], start.len()));
        }
    }
    found
}

/// The paths that begin at the start of `text`, whose first `from` bytes are one.
fn expand(text: &str, from: usize) -> Vec<String> {
    let name = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    let end = text[from..].find(|c| !name(c)).map_or(text.len(), |end| from + end);
    let prefix = &text[..end];
    if !prefix.ends_with("::") || !text[end..].starts_with('{') {
        return vec![prefix.to_owned()];
    }
    let (mut depth, mut items, mut item) = (0, Vec::new(), String::new());
    for c in text[end + 1..].chars() {
        match c {
            '}' if depth == 0 => break,
            ',' if depth == 0 => items.push(std::mem::take(&mut item)),
            c => {
                depth += i32::from(c == '{') - i32::from(c == '}');
                if !c.is_whitespace() {
                    item.push(c);
                }
            }
        }
    }
    items.push(item);
    let each = items.iter().filter(|item| !item.is_empty()).flat_map(|item| expand(item, 0));
    each.map(|item| format!("{prefix}{item}")).collect()
}

/// The module that a path in `module` leads into.
fn target(path: &str, module: &Module, known: &BTreeMap<Module, PathBuf>) -> Module {
    let mut segments = path.split("::").filter(|segment| !segment.is_empty()).peekable();
    let mut at = module.clone();
    while let Some(&first) = segments.peek() {
        match first {
            "crate" => at.clear(),
            "super" => drop(at.pop()),
            "self" => {}
            _ => break,
        }
        let _ = segments.next();
    }
    for segment in segments {
        let next = [&at[..], &[segment.to_owned()]].concat();
        if !known.contains_key(&next) {
            break;
        }
        at = next;
    }
    at
}

/// For each parent, which of its children depend on which. What children ask of their parents does not count.
fn dependencies(src: &Path) -> BTreeMap<Module, BTreeMap<String, BTreeSet<String>>> {
    let known = modules(src);
    let mut graphs: BTreeMap<Module, BTreeMap<String, BTreeSet<String>>> = BTreeMap::new();
    for (module, file) in &known {
        for path in paths(&code(file)) {
            let target = target(&path, module, &known);
            let common = module.iter().zip(&target).take_while(|(a, b)| a == b).count();
            if let (Some(from), Some(to)) = (module.get(common), target.get(common)) {
                let graph = graphs.entry(module[..common].to_vec()).or_default();
                let _ = graph.entry(from.clone()).or_default().insert(to.clone());
            }
        }
    }
    graphs
}

fn reaches(graph: &BTreeMap<String, BTreeSet<String>>, from: &str, to: &str) -> bool {
    let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(module) = next.pop() {
        for other in graph.get(module).into_iter().flatten() {
            if other == to {
                return true;
            }
            if seen.insert(other) {
                next.push(other);
            }
        }
    }
    false
}

/// The dependencies that are part of a cycle, a line each.
fn cycles() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(workspace().join("crates")).unwrap() {
        let folder = entry.unwrap().path();
        let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
        for (parent, graph) in dependencies(&folder.join("src")) {
            for (from, others) in &graph {
                for to in others.iter().filter(|to| reaches(&graph, to, from)) {
                    let parent: String = parent.iter().flat_map(|part| ["::", part]).collect();
                    let _ = found.insert(format!("{name}{parent}: {from} -> {to}"));
                }
            }
        }
    }
    found
}

#[test]
fn no_cycle_of_modules() {
    let found = cycles();
    assert!(found.is_empty(), "these dependencies make cycles: {found:#?}\nturn one of each cycle around");
}

#[test]
fn groups_of_imports_are_paths() {
    let code = "use crate::{a::B, c::{D, e::F as G}};\nlet x = super::h::i(self::j::K);\nfoo::crate::no";
    let expected = ["crate::a::B", "crate::c::D", "crate::c::e::FasG", "super::h::i", "self::j::K"];
    assert_eq!(paths(code), expected);
}
