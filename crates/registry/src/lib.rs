//! Registries of types that a TOML table names by its key `type`, such as models and optimizers: their entries, their tables, the
//! schema of all of them. A registry itself belongs to the crate whose trait its entries implement; this crate never knows one.

mod choice;
mod collected;
mod entries;
mod nearest;
mod table;

#[doc(hidden)]
pub use inventory;

pub use choice::{Choice, Entry, Family, Holds, Registered};
pub use entries::{Entries, Named, find};
pub use nearest::nearest;
use table::name_and_keys;
pub use table::{TYPE, one_of, read, schema_of, tagged};
