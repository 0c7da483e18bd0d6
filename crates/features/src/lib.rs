//! Features of third-party crates, the same in every build of the workspace: see `Cargo.toml`. There is no code here.
