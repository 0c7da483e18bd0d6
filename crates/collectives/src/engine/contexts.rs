//! Numbers of groups, on which their ranks agree.
//!
//! The ranks of a new group propose the number that each would give next, and take the largest. Two threads of a rank may make
//! groups at once, from different groups: only one of them proposes, and where a rank does not, the ranks ask again. The thread
//! whose group has the lowest number comes first on all ranks, so that one of them gets on.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The numbers that a rank has given to groups.
#[derive(Debug)]
pub(super) struct Contexts(Mutex<State>);

#[derive(Debug)]
struct State {
    next: u32,
    /// Groups of which a thread is making others.
    asking: BTreeSet<u32>,
    /// The one whose thread has proposed a number.
    proposing: Option<u32>,
}

impl Contexts {
    /// The numbers of a world that has number 0.
    pub(super) fn new() -> Self {
        Self(Mutex::new(State { next: 1, asking: BTreeSet::new(), proposing: None }))
    }

    /// Begins to ask for a number for ranks of the group `parent`.
    pub(super) fn ask(&self, parent: u32) -> Asking<'_> {
        self.state().asking.insert(parent);
        Asking { contexts: self, parent }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A group that asks for a number, until this is dropped.
pub(super) struct Asking<'a> {
    contexts: &'a Contexts,
    parent: u32,
}

impl Asking<'_> {
    /// Returns the number to propose; `None` where another thread's turn has come.
    pub(super) fn propose(&self) -> Option<u32> {
        let mut state = self.contexts.state();
        if state.proposing.is_some() || state.asking.first() != Some(&self.parent) {
            return None;
        }
        state.proposing = Some(self.parent);
        Some(state.next)
    }

    /// Takes the number on which the ranks have agreed; `None` where they have to ask again.
    pub(super) fn decide(&self, context: Option<u32>) {
        let mut state = self.contexts.state();
        if state.proposing == Some(self.parent) {
            state.proposing = None;
        }
        if let Some(context) = context {
            state.next = state.next.max(context + 1);
        }
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.decide(None);
        self.contexts.state().asking.remove(&self.parent);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::threads;

    #[test]
    fn groups_made_by_two_threads_at_once_have_different_numbers() {
        const EACH: usize = 40;
        let numbers = threads::run(3, Duration::from_secs(60), |world| {
            let all: Vec<usize> = (0..world.size()).collect();
            let other = world.subgroup("other", &all).unwrap().unwrap();
            let make = |parent: &crate::Group| -> Vec<u32> {
                let groups = (0..EACH).map(|_| parent.subgroup("new", &all).unwrap().unwrap());
                groups.map(|group| group.0.place.context).collect()
            };
            std::thread::scope(|scope| {
                let [first, second] = [&world, &other].map(|parent| scope.spawn(|| make(parent)));
                [first.join().unwrap(), second.join().unwrap()].concat()
            })
        });
        assert!(numbers.iter().all(|rank| *rank == numbers[0]), "{numbers:?}");
        let mut different = numbers[0].clone();
        different.sort_unstable();
        different.dedup();
        assert_eq!(different.len(), 2 * EACH, "{different:?}");
    }
}
