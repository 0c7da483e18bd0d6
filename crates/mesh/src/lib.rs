//! Meshes of ranks with named axes, and groups of ranks by name: every rank describes the same mesh or group, and all ranks
//! check that their descriptions agree before a group is made. This crate never reads the environment or configuration
//! files, never starts a transport, and knows nothing of tensors.
//!
//! | part | is |
//! |---|---|
//! | [`DeviceMesh`] | ranks arranged along named axes |
//! | [`NamedGroups`] | groups cut from the world, by name |
//! | [`ProcessGroupConfig`] | trees of process groups |
//! | [`agree`] | comparison of a collective call's description between ranks |
//!
//! ```
//! use isobar_collectives::Group;
//! use isobar_mesh::DeviceMesh;
//!
//! let mesh = DeviceMesh::new(&Group::single(), &[1, -1], &["data", "domain"])?;
//! assert_eq!(mesh.shape(), [1, 1]);
//! # Ok::<(), isobar_mesh::Error>(())
//! ```

mod agree;
mod error;
mod groups;
mod mesh;
mod tree;

pub use agree::agree;
pub use error::{Error, Result};
pub use groups::NamedGroups;
pub use mesh::DeviceMesh;
pub use tree::{ProcessGroupConfig, ProcessGroupNode};
