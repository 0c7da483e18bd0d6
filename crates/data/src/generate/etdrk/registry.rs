//! The systems that can be named, from this crate and from all others that are linked into the program.

use std::sync::Arc;

use isobar_registry::{Choice, Entry, Family, Holds, Named, Registered};

use super::system::System;
use super::systems::Advection;

/// Registers a type as a system: see [`System`](crate::generate::etdrk::System).
#[macro_export]
macro_rules! register_system {
    ($system:ty) => {
        $crate::inventory::submit! { $crate::generate::etdrk::SystemEntry::of::<$system>() }
    };
}

isobar_registry::collected! {
    /// Entry of the registry of systems.
    pub struct SystemEntry(Systems);
}

/// The family of the systems.
#[derive(Debug)]
pub struct Systems;

impl Family for Systems {
    const NOUN: &'static str = "system";
    const SUMMARY: &'static str = "An equation on a periodic box.";
    type Member = dyn System;

    fn entries() -> Vec<Entry<Self>> {
        entries()
    }

    fn standard() -> Choice<Self> {
        Advection::default().into()
    }
}

impl<C: System + Registered> Holds<C> for Systems {
    fn hold(config: C) -> Arc<dyn System> {
        Arc::new(config)
    }
}

/// A system with its settings: any registered one. By default advection.
///
/// ```
/// use isobar_data::generate::etdrk::{SystemKind, registered};
///
/// let system: SystemKind = serde_json::from_str(r#"{ "type": "burgers", "viscosity": 0.1 }"#).unwrap();
/// assert_eq!((system.name(), system.degree(), system.channels(2)), ("burgers", 2, 2));
/// assert!(registered().contains(&"gray_scott"));
/// ```
pub type SystemKind = Choice<Systems>;

/// Returns name and summary of each registered system, sorted by name.
pub fn systems() -> Vec<(&'static str, &'static str)> {
    entries().iter().map(|entry| (Named::name(entry), entry.summary())).collect()
}
