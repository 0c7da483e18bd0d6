//! Contents of the store, and its waiting requests.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use crate::wire::{Kind, LONGEST, Message};

/// Keys and values.
#[derive(Debug, Default)]
pub(crate) struct Table(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    values: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Threads that wait for a key, each under the first one that it lacks.
    waiting: BTreeMap<Vec<u8>, Vec<Thread>>,
    closed: bool,
}

impl Table {
    /// Does what a request says; waits where it says so.
    pub(crate) fn answer(&self, request: &Message) -> Message {
        let number = request.number;
        match (request.kind, request.parts.as_slice()) {
            (Kind::Set, [key, value]) => self.set(key, value),
            (Kind::Add, [key]) => self.add(key, number),
            (Kind::Get, [key]) => match self.wait(std::slice::from_ref(key), number) {
                Some(problem) => problem,
                None => match self.state().values.get(key) {
                    // With its own head a value is longer than what came.
                    Some(value) if value.len() > LONGEST - 64 => refused("the value is too long"),
                    Some(value) => Message::new(Kind::Done, 0, &[value]),
                    None => Message::new(Kind::Missing, 0, &[key]),
                },
            },
            (Kind::Wait, keys) => self.wait(keys, number).unwrap_or_else(|| done(0)),
            (Kind::Check, keys) => {
                let state = self.state();
                done(i64::from(keys.iter().all(|key| state.values.contains_key(key))))
            }
            (Kind::Delete, [key]) => done(i64::from(self.state().values.remove(key).is_some())),
            (Kind::Count, []) => done(self.state().values.len() as i64),
            _ => refused("a request with parts that it does not have"),
        }
    }

    /// Nobody waits any longer, and nobody will.
    pub(crate) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        let waiting = std::mem::take(&mut state.waiting);
        waiting.into_values().flatten().for_each(|thread| thread.unpark());
    }

    fn set(&self, key: &[u8], value: &[u8]) -> Message {
        let mut state = self.state();
        state.values.insert(key.to_vec(), value.to_vec());
        state.wake(key);
        done(0)
    }

    /// Numbers are kept as text, so that they can be read as values too.
    fn add(&self, key: &[u8], amount: i64) -> Message {
        let mut state = self.state();
        let old = match state.values.get(key) {
            None => Some(0),
            Some(value) => std::str::from_utf8(value).ok().and_then(|text| text.parse::<i64>().ok()),
        };
        let Some(old) = old else { return refused("the key's value is no number") };
        let Some(new) = old.checked_add(amount) else { return refused("the number is out of range") };
        state.values.insert(key.to_vec(), new.to_string().into_bytes());
        state.wake(key);
        done(new)
    }

    /// Waits until all keys are there; tells what was wrong otherwise.
    fn wait(&self, keys: &[Vec<u8>], milliseconds: i64) -> Option<Message> {
        let begun = Instant::now();
        let longest = Duration::from_millis(milliseconds.try_into().unwrap_or_default());
        loop {
            let mut state = self.state();
            let missing = keys.iter().find(|key| !state.values.contains_key(*key))?;
            if state.closed {
                return Some(refused("the store has closed"));
            }
            let left = longest.saturating_sub(begun.elapsed());
            let own = thread::current();
            let waiting = state.waiting.entry(missing.clone()).or_default();
            waiting.retain(|thread| thread.id() != own.id());
            if left.is_zero() {
                if waiting.is_empty() {
                    state.waiting.remove(missing);
                }
                return Some(Message::new(Kind::Missing, 0, &[missing]));
            }
            waiting.push(own);
            drop(state);
            thread::park_timeout(left);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn wake(&mut self, key: &[u8]) {
        self.waiting.remove(key).into_iter().flatten().for_each(|thread| thread.unpark());
    }
}

fn done(number: i64) -> Message {
    Message::new(Kind::Done, number, &[])
}

fn refused(why: &str) -> Message {
    Message::new(Kind::Refused, 0, &[why.as_bytes()])
}
