//! Room on the machine for ranks: tests that run at the same time in one process start only so many at once.

use std::{
    sync::{Condvar, Mutex, PoisonError},
    thread,
};

/// Numbers of ranks that have started, and of launches that were let in and came, in their order.
struct State {
    ranks: usize,
    next: u64,
    last: u64,
}

/// Ranks that run at once, at most; a launch waits for its turn.
pub(crate) struct Room {
    state: Mutex<State>,
    changed: Condvar,
}

/// Room for the ranks of a launch, until it is dropped.
pub(crate) struct Taken<'a> {
    room: &'a Room,
    ranks: usize,
}

/// Room of this process.
static ROOM: Room = Room::new();

impl Room {
    const fn new() -> Self {
        Self { state: Mutex::new(State { ranks: 0, next: 0, last: 0 }), changed: Condvar::new() }
    }

    /// Waits until `ranks` more may run beside those that do, of at most `most`. A launch with more ranks than that runs alone.
    fn take(&self, ranks: usize, most: usize) -> Taken<'_> {
        let ranks = ranks.min(most);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let turn = state.last;
        state.last += 1;
        while state.next != turn || state.ranks + ranks > most {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.next += 1;
        state.ranks += ranks;
        drop(state);
        self.changed.notify_all();
        Taken { room: self, ranks }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.room.state.lock().unwrap_or_else(PoisonError::into_inner).ranks -= self.ranks;
        self.room.changed.notify_all();
    }
}

/// Waits for room for the ranks of a launch: three of all launches a core.
pub(crate) fn take(ranks: usize) -> Taken<'static> {
    ROOM.take(ranks, 3 * thread::available_parallelism().map_or(2, usize::from))
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicUsize, Ordering},
        time::Duration,
    };

    use super::*;

    #[test]
    fn no_more_ranks_run_than_there_is_room_for() {
        let (room, running, most_seen) = (Room::new(), AtomicUsize::new(0), AtomicUsize::new(0));
        thread::scope(|scope| {
            for ranks in [2, 3, 1, 4, 2, 9, 1, 2] {
                let (room, running, most_seen) = (&room, &running, &most_seen);
                scope.spawn(move || {
                    let taken = room.take(ranks, 4);
                    let now = running.fetch_add(taken.ranks, Ordering::SeqCst) + taken.ranks;
                    most_seen.fetch_max(now, Ordering::SeqCst);
                    thread::sleep(Duration::from_millis(5));
                    running.fetch_sub(taken.ranks, Ordering::SeqCst);
                });
            }
        });
        assert!(most_seen.into_inner() <= 4);
        assert_eq!(room.state.into_inner().unwrap().ranks, 0);
    }
}
