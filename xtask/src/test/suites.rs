//! Test programs of the workspace, as cargo names them.

use std::{
    collections::HashMap,
    ffi::OsStr,
    path::{Path, PathBuf},
};

use serde_json::Value;

/// A test program, or the documentation tests of a library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Suite {
    /// Its package.
    pub(super) package: String,
    /// Arguments that choose it among the package's, such as `--test faults`.
    pub(super) chosen: String,
}

impl Suite {
    /// Words for people.
    pub(super) fn title(&self) -> String {
        format!("{} {}", self.package, self.chosen)
    }
}

/// The test programs that a build made.
#[derive(Debug, Default)]
pub(super) struct Suites {
    /// By name of the file.
    programs: HashMap<String, Suite>,
    /// Packages by the names of their library crates.
    libraries: HashMap<String, String>,
    /// The `isobar` program.
    pub(super) isobar: Option<PathBuf>,
}

impl Suites {
    /// Reads one message of `cargo --message-format=json`.
    pub(super) fn read_message(&mut self, text: &str) {
        let Ok(message) = serde_json::from_str::<Value>(text) else { return };
        let target = &message["target"];
        let (Some(package), Some(kind), Some(name)) = (
            message["package_id"].as_str().map(package_name),
            target["kind"][0].as_str(),
            target["name"].as_str(),
        ) else {
            return;
        };
        let test = message["profile"]["test"] == true;
        let program = message["executable"].as_str().map(Path::new);
        if kind == "bin" && name == "isobar" && !test {
            self.isobar = program.map(Path::to_owned);
        }
        let chosen = match kind {
            "lib" => {
                self.libraries.insert(name.to_owned(), package.clone());
                "--lib".to_owned()
            }
            kind => format!("--{kind} {name}"),
        };
        if let (true, Some(file)) = (test, program.and_then(file_name)) {
            self.programs.insert(file, Suite { package, chosen });
        }
    }

    /// The suite that cargo names in a line like `Running tests/faults.rs (target/debug/deps/faults-1f)`.
    pub(super) fn started(&self, line: &str) -> Option<Suite> {
        let unknown =
            |chosen: &str| Suite { package: "unknown package".to_owned(), chosen: chosen.to_owned() };
        if let Some(library) = line.strip_prefix("   Doc-tests ") {
            let package = self.libraries.get(library).cloned();
            return Some(Suite {
                chosen: "--doc".to_owned(),
                package: package.unwrap_or_else(|| library.to_owned()),
            });
        }
        let words = line.strip_prefix("     Running ")?;
        let program = words.strip_suffix(')')?.rsplit_once('(')?.1;
        let file = file_name(Path::new(program))?;
        Some(self.programs.get(&file).cloned().unwrap_or_else(|| unknown(&file)))
    }
}

fn file_name(path: &Path) -> Option<String> {
    path.file_name().map(OsStr::to_string_lossy).map(String::from)
}

/// The name in an id like `path+file:///w/crates/torch#isobar-torch@0.1.0`, or `…/xtask#0.1.0` where the folder has it.
fn package_name(id: &str) -> String {
    let (path, version) = id.rsplit_once('#').unwrap_or((id, ""));
    match version.split_once('@') {
        Some((name, _)) => name.to_owned(),
        None => path.rsplit('/').next().unwrap_or(path).to_owned(),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::json;

    use super::*;

    /// The suites of a workspace with two packages.
    pub(crate) fn example() -> Suites {
        let mut suites = Suites::default();
        let artifact = |package: &str, kind: &str, name: &str, test: bool, program: Option<&str>| {
            let id = format!("path+file:///w/{package}");
            json!({
                "reason": "compiler-artifact", "package_id": id, "target": { "kind": [kind], "name": name },
                "profile": { "test": test }, "executable": program,
            })
        };
        for message in [
            artifact("crates/shard#isobar-shard@0.1.0", "lib", "isobar_shard", false, None),
            artifact(
                "crates/shard#isobar-shard@0.1.0",
                "lib",
                "isobar_shard",
                true,
                Some("/w/deps/isobar_shard-1a"),
            ),
            artifact("tests#isobar-tests@0.1.0", "test", "faults", true, Some("/w/deps/faults-2b")),
            artifact("tests#isobar-tests@0.1.0", "test", "main", true, Some("/w/deps/main-4d")),
            artifact("apps/isobar#0.1.0", "bin", "isobar", false, Some("/w/isobar")),
            artifact("apps/isobar#0.1.0", "bin", "isobar", true, Some("/w/deps/isobar-3c")),
            json!({ "reason": "build-finished", "success": true }),
        ] {
            suites.read_message(&message.to_string());
        }
        suites.read_message("not JSON");
        suites
    }

    #[test]
    fn programs_are_found_by_their_files() {
        let suites = example();
        let title = |line: &str| suites.started(line).map(|suite| suite.title());
        let running = |what: &str| title(&format!("     Running {what})"));
        assert_eq!(
            running("unittests src/lib.rs (target/debug/deps/isobar_shard-1a").as_deref(),
            Some("isobar-shard --lib")
        );
        assert_eq!(
            running("tests/faults.rs (target/debug/deps/faults-2b").as_deref(),
            Some("isobar-tests --test faults")
        );
        assert_eq!(
            running("unittests src/main.rs (target/debug/deps/isobar-3c").as_deref(),
            Some("isobar --bin isobar")
        );
        assert_eq!(title("   Doc-tests isobar_shard").as_deref(), Some("isobar-shard --doc"));
        assert_eq!(title("test running (well)"), None);
        assert_eq!(suites.isobar.as_deref(), Some(Path::new("/w/isobar")));
    }
}
