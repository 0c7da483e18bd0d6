//! `isobar data make`.

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Args;
use isobar_data::generate::etdrk::{MakeConfig, make, systems};
use isobar_manager::config::{self, Sources, reference_toml};

use super::{bar, mended};
use isobar_command::exit::{Because, Exit};
use isobar_command::{outputs, terminal};

/// Arguments of `isobar data make`.
#[derive(Debug, Args)]
pub(crate) struct MakeArgs {
    /// Name of a system, or a TOML file with the keys; without it the systems are listed
    #[arg(value_name = "NAME")]
    name: Option<String>,
    /// The file to write, or with validation or test samples the folder; by default data/NAME.h5 or data/NAME. Folders that are
    /// missing are made
    #[arg(long, value_name = "PATH")]
    out: Option<PathBuf>,
    /// Set a key, such as samples=100 or system.viscosity=0.01; may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Print every key with its default and its meaning, as TOML
    #[arg(long, conflicts_with_all = ["name", "out"])]
    reference: bool,
}

/// Runs the command.
pub(super) fn run(args: &MakeArgs) -> Result<Exit> {
    if args.reference {
        terminal::line(reference_toml::<MakeConfig>()?.trim_end());
        return Ok(Exit::Good);
    }
    let Some(name) = &args.name else {
        let systems = systems();
        let width = systems.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        systems.iter().for_each(|(name, summary)| terminal::line(&format!("{name:width$}  {summary}")));
        return Ok(Exit::Good);
    };
    let config = load(name, &args.set)?;
    let system = config.system.name();
    let is_folder = config.valid_samples > 0 || config.test_samples > 0;
    let out = args.out.clone().unwrap_or_else(|| {
        PathBuf::from("data").join(if is_folder { system.to_owned() } else { format!("{system}.h5") })
    });
    let inputs: Vec<PathBuf> = recipe(name).map(Path::to_owned).into_iter().collect();
    outputs::check("--out", &[&out], &inputs)?;
    let extension = out.extension().map(|extension| extension.to_string_lossy());
    if !is_folder && extension.is_some_and(|extension| !["h5", "hdf5"].contains(&&*extension)) {
        return Err(Exit::Usage
            .because(format!(
                "--out is {}, expected a file with the extension .h5: files are of The Well's schema; `isobar data convert` writes \
                 others",
                out.display()
            ))
            .into());
    }
    let bar = bar(0, "frames")?;
    let files = make(&config, &out, |ready, all| {
        bar.set_length(all);
        bar.set_position(ready);
    })
    .map_err(mended)?;
    bar.finish_and_clear();
    for file in files {
        terminal::line(&super::inspect::summary(&file, "the_well")?);
    }
    Ok(Exit::Good)
}

/// Returns the TOML file that `name` names, or `None` if that is the name of a system: a folder of the same name is no input.
fn recipe(name: &str) -> Option<&Path> {
    let path = Path::new(name);
    path.extension().is_some_and(|extension| extension == "toml").then_some(path)
}

fn load(name: &str, sets: &[String]) -> Result<MakeConfig> {
    let sources = Sources::default();
    // Not from the environment: its variables are keys of a run.
    let sources = if let Some(file) = recipe(name) {
        sources.file(file)
    } else {
        let known = systems();
        if !known.iter().any(|(known, _)| *known == name) {
            let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
            let other = if name == "darcy" { "; Darcy flow is solved by `isobar data darcy`" } else { "" };
            return Err(Exit::Usage
                .because(format!(
                    "no system is called {name:?}: expected a TOML file, or one of {}{other}",
                    names.join(", ")
                ))
                .into());
        }
        sources.set(format!("system.type={name}"))
    };
    let sources = sets.iter().fold(sources, |sources, set| sources.set(set.as_str()));
    Ok(config::load::<MakeConfig>(&sources)?.value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_other_formats_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("u.nc");
        let args =
            MakeArgs { name: Some("burgers".to_owned()), out: Some(out), set: Vec::new(), reference: false };
        assert!(run(&args).unwrap_err().to_string().contains("expected a file with the extension .h5"));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    /// A second data set of a system goes into the folder of the first one.
    #[test]
    fn a_system_is_no_input() {
        assert_eq!(recipe("burgers"), None);
        assert_eq!(recipe("data/burgers.toml"), Some(Path::new("data/burgers.toml")));
    }

    #[test]
    fn every_recipe_loads() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/data");
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            assert!(load(&path.to_string_lossy(), &[]).unwrap().samples > 0, "{}", path.display());
        }
    }

    #[test]
    fn a_recipe_is_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let recipe = folder.path().join("recipe.toml");
        let text = "samples = 1\nframes = 2\npoints = 16\n[system]\ntype = \"burgers\"\n";
        std::fs::write(&recipe, text).unwrap();
        let args = MakeArgs {
            name: Some(recipe.display().to_string()),
            out: Some(folder.path().join(".").join("recipe.toml")),
            set: Vec::new(),
            reference: false,
        };
        let error = run(&args).unwrap_err().to_string();
        assert!(error.contains("recipe.toml is an input of this command"), "{error}");
        assert_eq!(std::fs::read_to_string(&recipe).unwrap(), text);
    }
}
