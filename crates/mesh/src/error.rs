//! The errors of meshes and groups.

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors of meshes and groups of ranks.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A name that no group has.
    #[error("there is no group \"{name}\"; {}", known(known_names))]
    UndefinedGroup {
        /// The name.
        name: String,
        /// The groups that there are.
        known_names: Vec<String>,
    },
    /// A name that a group has already.
    #[error("there is already a group \"{name}\"; choose another name")]
    GroupExists {
        /// The name.
        name: String,
    },
    /// A group of a size that does not divide its parent.
    #[error(
        "groups \"{name}\" of {size} ranks cannot be cut from {parent} of {parent_size} ranks; the size must divide it"
    )]
    GroupSize {
        /// The group's name.
        name: String,
        /// Its size.
        size: i64,
        /// The parent, in words.
        parent: String,
        /// The parent's size.
        parent_size: usize,
    },
    /// A tree of groups that does not hold together.
    #[error("group tree: {0}")]
    GroupTree(String),
    /// Ranks that make different calls where all must make the same.
    #[error("{operation}: ranks do not agree: {differences}; all ranks must make the same call")]
    Disagreement {
        /// The call.
        operation: &'static str,
        /// Values of the ranks.
        differences: String,
    },
    /// A mesh that cannot be.
    #[error("mesh of shape {shape:?} with axes {names:?}: {problem}")]
    Mesh {
        /// The shape asked for.
        shape: Vec<i64>,
        /// The axes' names.
        names: Vec<String>,
        /// Description of the problem.
        problem: String,
    },
    /// An axis that a mesh does not have.
    #[error("{mesh} has no axis \"{axis}\"")]
    UnknownAxis {
        /// The mesh.
        mesh: String,
        /// The axis.
        axis: String,
    },
    /// A rank outside a mesh that asks for a group of it.
    #[error("rank {rank} is not in {mesh}, so that it has no group along its axis \"{axis}\"")]
    NotInMesh {
        /// The rank in the world.
        rank: usize,
        /// The mesh.
        mesh: String,
        /// The axis.
        axis: String,
    },
    /// Communication.
    #[error("communication failed: {0}")]
    Collective(#[from] isobar_collectives::Error),
}

fn known(names: &[String]) -> String {
    if names.is_empty() {
        return "none was created".to_owned();
    }
    format!("expected one of {}", names.join(", "))
}
