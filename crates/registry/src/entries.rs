//! The entries of a registry.

use std::sync::{PoisonError, RwLock};

use crate::nearest::nearest;

/// An entry of a registry.
pub trait Named: Copy + 'static {
    /// Value of the key `type`.
    fn name(&self) -> &'static str;

    /// Path of the registered Rust type.
    fn type_name(&self) -> &'static str;
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
///     fn type_name(&self) -> &'static str {
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

    /// Adds an entry, unless the same type is there already under the same name.
    pub fn add(&self, linked: impl Iterator<Item = E>, entry: E) {
        let key = |entry: &E| (entry.name(), entry.type_name());
        let mut added = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if !linked.chain(added.iter().copied()).any(|other| key(&other) == key(&entry)) {
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

/// Returns the entry of a name. `noun` is the singular noun of an entry.
///
/// # Errors
///
/// A name that no entry has, with the nearest one and all of them; a name that several types have.
///
/// ```
/// # #[derive(Clone, Copy, Debug)]
/// # struct Model(&'static str, &'static str);
/// # impl isobar_registry::Named for Model {
/// #     fn name(&self) -> &'static str {
/// #         self.0
/// #     }
/// #     fn type_name(&self) -> &'static str {
/// #         self.1
/// #     }
/// # }
/// use isobar_registry::find;
///
/// let models = [Model("afno", "isobar::Afno"), Model("fno", "isobar::Fno"), Model("fno", "own::Fno")];
/// assert_eq!(
///     find("model", "afmo", &models).unwrap_err(),
///     "no model is called \"afmo\"; did you mean \"afno\"? the registered models are afno, fno"
/// );
/// assert_eq!(
///     find("model", "fno", &models).unwrap_err(),
///     "two models are called \"fno\": isobar::Fno and own::Fno; give one of them another name"
/// );
/// ```
pub fn find<E: Named>(noun: &str, name: &str, entries: &[E]) -> Result<E, String> {
    let mut found = entries.iter().filter(|entry| entry.name() == name);
    match (found.next(), found.next()) {
        (Some(entry), None) => Ok(*entry),
        (Some(entry), Some(other)) => Err(format!(
            "two {} are called {name:?}: {} and {}; give one of them another name",
            plural(noun),
            entry.type_name(),
            other.type_name()
        )),
        (None, _) => Err(unknown(noun, name, entries)),
    }
}

fn unknown<E: Named>(noun: &str, name: &str, entries: &[E]) -> String {
    let mut names: Vec<&str> = entries.iter().map(Named::name).collect();
    names.dedup();
    let meant = match nearest(name, names.iter().copied()) {
        Some(near) => format!("did you mean \"{near}\"? "),
        None => String::new(),
    };
    let shown: String = name.chars().take(40).collect();
    let all = plural(noun);
    format!("no {noun} is called {shown:?}; {meant}the registered {all} are {}", names.join(", "))
}

/// The plural of a noun, such as "losses".
fn plural(noun: &str) -> String {
    format!("{noun}{}", if noun.ends_with('s') { "es" } else { "s" })
}
