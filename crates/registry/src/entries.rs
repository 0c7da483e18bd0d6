//! The entries of a registry.

use std::sync::{PoisonError, RwLock};

/// An entry of a registry.
pub trait Named: Copy + 'static {
    /// Value of the key `type`.
    fn name(&self) -> &'static str;
}

/// Entries that a program adds while it runs, beside those that are collected when it is linked.
///
/// ```
/// use isobar_registry::{Entries, Named};
///
/// #[derive(Clone, Copy)]
/// struct Shape(&'static str);
///
/// impl Named for Shape {
///     fn name(&self) -> &'static str {
///         self.0
///     }
/// }
///
/// static ADDED: Entries<Shape> = Entries::new();
/// let linked = || [Shape("square"), Shape("circle")].into_iter();
/// ADDED.add(linked(), Shape("triangle"));
/// ADDED.add(linked(), Shape("circle")); // is there already
/// let names: Vec<_> = ADDED.all(linked()).iter().map(Named::name).collect();
/// assert_eq!(names, ["circle", "square", "triangle"]);
/// ```
#[derive(Debug)]
pub struct Entries<E>(RwLock<Vec<E>>);

impl<E: Named> Entries<E> {
    /// Makes a registry without added entries.
    #[expect(clippy::new_without_default, reason = "it is made in a static")]
    pub const fn new() -> Self {
        Self(RwLock::new(Vec::new()))
    }

    /// Adds an entry, unless one of its name is there already.
    pub fn add(&self, linked: impl Iterator<Item = E>, entry: E) {
        let mut added = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if !linked.chain(added.iter().copied()).any(|other| other.name() == entry.name()) {
            added.push(entry);
        }
    }

    /// Returns all entries, sorted by name.
    pub fn all(&self, linked: impl Iterator<Item = E>) -> Vec<E> {
        let added = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let mut all: Vec<E> = linked.chain(added.iter().copied()).collect();
        all.sort_by_key(Named::name);
        all
    }
}

/// Describes a name that is not registered: the nearest one, and all of them. `kind` is the singular noun of an entry.
///
/// ```
/// let text = isobar_registry::unknown("model", "fnno", &["afno", "fno"]);
/// assert_eq!(text, "no model is called \"fnno\"; did you mean \"fno\"? the registered models are afno, fno");
/// ```
pub fn unknown(kind: &str, name: &str, names: &[&str]) -> String {
    let near = names.iter().map(|known| (strsim::damerau_levenshtein(name, known), known)).min();
    let meant = match near.filter(|(distance, _)| *distance <= name.chars().count().div_ceil(3)) {
        Some((_, near)) => format!("did you mean \"{near}\"? "),
        None => String::new(),
    };
    let shown: String = name.chars().take(40).collect();
    format!("no {kind} is called {shown:?}; {meant}the registered {kind}s are {}", names.join(", "))
}
