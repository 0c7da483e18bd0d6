//! Linked operators by name.

use std::collections::BTreeMap;

use super::Signature;
use crate::error::{Error, Result};

/// An entry of a table of operators.
pub trait Described: 'static {
    /// Name and arguments.
    fn signature(&self) -> &'static Signature;
}

/// Operators by name, those of a program's own before built-in ones.
#[derive(Debug)]
pub struct Table<E: 'static>(BTreeMap<&'static str, Vec<&'static E>>);

/// Package of the built-in operators.
const BUILT_IN: &str = "isobar-shard";

fn is_built_in<E: Described>(entry: &E) -> bool {
    entry.signature().package == BUILT_IN
}

impl<E: Described> Table<E> {
    /// Makes the table of linked operators.
    pub fn new(entries: impl Iterator<Item = &'static E>) -> Self {
        let mut table: BTreeMap<&'static str, Vec<&'static E>> = BTreeMap::new();
        for entry in entries {
            let signature = entry.signature();
            for name in [&[signature.name], signature.aliases].concat() {
                table.entry(name).or_default().push(entry);
            }
        }
        table.values_mut().for_each(|entries| entries.sort_by_key(|entry| is_built_in(*entry)));
        Self(table)
    }

    /// Returns the operator of a name.
    ///
    /// # Errors
    ///
    /// Two packages, or one twice, register it.
    pub fn find(&self, name: &str) -> Result<Option<&'static E>> {
        match self.0.get(name).map(Vec::as_slice) {
            None | Some([]) => Ok(None),
            Some([entry]) => Ok(Some(entry)),
            Some([first, second, ..]) if is_built_in(*first) == is_built_in(*second) => {
                let [first, second] = [first, second].map(|entry| entry.signature());
                let packages = format!("{} and {}", first.package, second.package);
                let reason = format!("the operator is registered twice, by {packages}; rename one");
                Err(Error::Argument { op: first.name, reason })
            }
            Some([first, ..]) => Ok(Some(first)),
        }
    }

    /// Returns the operator of a program's own that replaces a built-in one of this name.
    ///
    /// # Errors
    ///
    /// As [`find`](Self::find).
    pub fn replacement(&self, name: &str) -> Result<Option<&'static E>> {
        let replaced =
            self.0.get(name).is_some_and(|entries| entries.iter().any(|entry| is_built_in(*entry)));
        Ok(if replaced { self.find(name)?.filter(|entry| !is_built_in(*entry)) } else { None })
    }

    /// Returns the built-in operator of a name, replaced or not.
    pub fn built_in(&self, name: &str) -> Option<&'static E> {
        self.0.get(name)?.iter().copied().find(|entry| is_built_in(*entry))
    }

    /// Returns whether an operator of a program's own replaces a built-in one.
    pub fn replaces_any(&self) -> bool {
        self.0.values().any(|entries| {
            entries.iter().any(|entry| is_built_in(*entry))
                && entries.iter().any(|entry| !is_built_in(*entry))
        })
    }

    /// Returns all names, sorted, aliases too.
    pub fn names(&self) -> impl Iterator<Item = &'static str> + '_ {
        self.0.keys().copied()
    }

    /// Returns all operators, sorted by name.
    pub fn all(&self) -> Vec<&'static E> {
        let own = self.0.iter().flat_map(|(name, entries)| {
            entries.iter().copied().filter(move |entry| entry.signature().name == *name)
        });
        own.collect()
    }
}
