//! Subgroups of a group, and exchanges of bytes between its ranks.

use std::sync::atomic::Ordering;

use crate::engine::call::Call;
use crate::engine::group::Group;
use crate::engine::metadata;
use crate::error::Result;
use crate::wire::MAX_CONTEXTS;

impl Group {
    /// The group of some of this group's ranks, in the order given; `None` on the others.
    ///
    /// All ranks of this group call, with the same name and ranks, and in the same order as their other calls: that is
    /// checked.
    ///
    /// # Errors
    ///
    /// An empty list, a repeated or unknown rank, or lists that differ between ranks.
    ///
    /// ```
    /// use isobar_collectives::threads;
    ///
    /// threads::run(3, std::time::Duration::from_secs(30), |group| {
    ///     let ends = group.subgroup("ends", &[0, 2]).unwrap();
    ///     assert_eq!(ends.map(|ends| ends.rank()), [Some(0), None, Some(1)][group.rank()]);
    /// });
    /// ```
    pub fn subgroup(&self, name: &str, ranks: &[usize]) -> Result<Option<Group>> {
        let call = self.call("subgroup");
        let mut sorted = ranks.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        if ranks.is_empty() || sorted.len() != ranks.len() || sorted.last().is_some_and(|&r| r >= self.size())
        {
            return Err(call.refuse(format!(
                "the ranks {ranks:?} of group \"{name}\" are not a list of different ranks below {}",
                self.size()
            )));
        }
        let mine = format!("{name} {ranks:?}");
        let (context, all) = self.agree_on_context(call.clone(), mine.as_bytes())?;
        if let Some(other) = all.iter().position(|theirs| theirs != mine.as_bytes()) {
            let theirs = String::from_utf8_lossy(&all[other]).into_owned();
            return Err(call.error(format!(
                "ranks ask for different groups: rank {} for \"{mine}\", rank {other} for \"{theirs}\"",
                self.rank()
            )));
        }
        Ok(self.member(name, ranks.to_vec(), context))
    }

    /// One group for each colour, of the ranks that give it, in the order of `key` and then of their ranks; `None`
    /// where `colour` is. As `MPI_Comm_split`.
    ///
    /// All ranks of this group call.
    ///
    /// # Errors
    ///
    /// A failed exchange.
    ///
    /// ```
    /// use isobar_collectives::threads;
    ///
    /// threads::run(4, std::time::Duration::from_secs(30), |group| {
    ///     // Even and odd ranks.
    ///     let half = group.split("half", Some(group.rank() % 2), 0).unwrap().unwrap();
    ///     assert_eq!((half.size(), half.rank()), (2, group.rank() / 2));
    /// });
    /// ```
    pub fn split(&self, name: &str, colour: Option<usize>, key: i64) -> Result<Option<Group>> {
        let call = self.call("split");
        let colour_code = colour.map_or(-1, |c| c as i64);
        let mine = [colour_code.to_le_bytes(), key.to_le_bytes()].concat();
        let (context, all) = self.agree_on_context(call.clone(), &mine)?;
        let mut members = Vec::with_capacity(all.len());
        for (rank, bytes) in all.iter().enumerate() {
            let word = |i: usize| {
                bytes.get(8 * i..8 * i + 8).and_then(|b| b.try_into().ok()).map(i64::from_le_bytes)
            };
            match (word(0), word(1)) {
                (Some(colour), Some(key)) => members.push((colour, key, rank)),
                _ => return Err(call.error(format!("rank {rank} makes another call than split"))),
            }
        }
        members.sort_unstable();
        if colour.is_none() {
            return Ok(None);
        }
        let ranks = members.iter().filter(|m| m.0 == colour_code).map(|m| m.2).collect();
        // The groups of different colours share no pair of ranks, and so may share the number.
        Ok(self.member(name, ranks, context))
    }

    /// Waits until all ranks have called it.
    ///
    /// # Errors
    ///
    /// A failed exchange, or a rank that does not come by the deadline.
    pub fn barrier(&self) -> Result<()> {
        metadata::all_gather(self.call("barrier"), &[])?.wait().map(drop)
    }

    /// Gathers a few bytes of host memory from every rank, in rank order. The lengths may differ.
    ///
    /// All ranks call.
    ///
    /// # Errors
    ///
    /// A failed exchange.
    ///
    /// ```
    /// use isobar_collectives::threads;
    ///
    /// threads::run(2, std::time::Duration::from_secs(30), |group| {
    ///     let name = ["zero", "one"][group.rank()];
    ///     let names = group.all_gather_bytes(name.as_bytes()).unwrap();
    ///     assert_eq!(names, [b"zero".to_vec(), b"one".to_vec()]);
    /// });
    /// ```
    pub fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        metadata::all_gather(self.call("all_gather_bytes"), bytes)?.wait()
    }

    /// Gathers bytes as [`all_gather_bytes`](Self::all_gather_bytes) does, and names its purpose in flight records and reports, such
    /// as a call of another crate. Messages do not carry the purpose: ranks with different purposes get each other's bytes.
    ///
    /// All ranks call.
    ///
    /// # Errors
    ///
    /// A failed exchange.
    pub fn all_gather_bytes_for(&self, purpose: &'static str, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let call = self.call("all_gather_bytes");
        call.recorded.purpose(purpose);
        metadata::all_gather(call, bytes)?.wait()
    }

    /// The bytes of `root`, on every rank; the other ranks' are not looked at.
    ///
    /// All ranks call.
    ///
    /// # Errors
    ///
    /// A root that is not a rank of the group, or a failed exchange.
    pub fn broadcast_bytes(&self, bytes: &[u8], root: usize) -> Result<Vec<u8>> {
        metadata::broadcast(self.call("broadcast_bytes"), bytes, root)?.wait()
    }

    fn member(&self, name: &str, ranks: Vec<usize>, context: u32) -> Option<Group> {
        let rank = ranks.iter().position(|&r| r == self.rank())?;
        let ranks = ranks.into_iter().map(|r| self.0.place.ranks[r]).collect();
        Some(Self::make(name, ranks, rank, context, self.0.deadline, self.0.world.clone()))
    }

    /// A number for new groups that no group of any of these ranks has, and what each rank gave in `with`.
    fn agree_on_context(&self, call: Call, with: &[u8]) -> Result<(u32, Vec<Vec<u8>>)> {
        let next = &self.0.world.next_context;
        let mine = [&next.load(Ordering::Relaxed).to_le_bytes(), with].concat();
        let all = metadata::all_gather(call.clone(), &mine)?.wait()?;
        let mut context = 0;
        let mut rest = Vec::with_capacity(all.len());
        for bytes in all {
            let (head, tail) = bytes.split_at(bytes.len().min(4));
            let theirs = head.try_into().map_err(|_| call.error("a rank makes another call".into()))?;
            context = context.max(u32::from_le_bytes(theirs));
            rest.push(tail.to_vec());
        }
        if context >= MAX_CONTEXTS {
            return Err(call.error(format!(
                "more than {MAX_CONTEXTS} groups were made; make each group once and keep it"
            )));
        }
        next.store(context + 1, Ordering::Relaxed);
        Ok((context, rest))
    }
}
