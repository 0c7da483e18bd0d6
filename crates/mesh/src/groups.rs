//! Groups of ranks, by name.

use std::collections::BTreeMap;

use isobar_collectives::Group;

use crate::agree::agree;
use crate::{Error, Result};

/// Groups cut from a world, by name. Methods that make a group are called by all ranks of the world, in the same order.
#[derive(Default, Debug)]
pub struct NamedGroups {
    groups: BTreeMap<String, NamedGroup>,
}

#[derive(Debug)]
struct NamedGroup {
    /// The instance that holds this rank.
    own: Group,
    /// The ranks in the world of every instance.
    instances: Vec<Vec<usize>>,
}

impl NamedGroups {
    /// The names of all groups, in alphabetical order.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.groups.keys().cloned().collect()
    }

    /// The instance of a group that holds this rank.
    ///
    /// # Errors
    ///
    /// A name that no group has.
    pub fn get(&self, name: &str) -> Result<Group> {
        self.find(name).map(|group| group.own.clone())
    }

    /// The name of a group; none for one that was not made here.
    #[must_use]
    pub fn name_of(&self, group: &Group) -> Option<&str> {
        self.groups.iter().find(|(_, named)| named.own == *group).map(|(name, _)| name.as_str())
    }

    /// Cuts every instance of the parent (the world where none is named) into blocks of `size` consecutive members.
    ///
    /// # Errors
    ///
    /// A name that is taken, an unknown parent, a size that does not divide the parent's; ranks that do not agree; a
    /// failed exchange.
    pub fn cut(&mut self, world: &Group, name: &str, size: i64, parent: Option<&str>) -> Result<Group> {
        agree(world, "create_process_subgroup", &format!("\"{name}\" of {size} ranks in {parent:?}"))?;
        self.check_new(name)?;
        let parents = match parent {
            Some(parent) => self.find(parent)?.instances.clone(),
            None => vec![(0..world.size()).collect()],
        };
        let parent_size = parents[0].len();
        let refuse = || Error::GroupSize {
            name: name.to_owned(),
            size,
            parent: parent.map_or_else(|| "the world".to_owned(), |parent| format!("group \"{parent}\"")),
            parent_size,
        };
        let size = usize::try_from(size).ok().filter(|size| *size > 0).ok_or_else(refuse)?;
        if !parent_size.is_multiple_of(size) {
            return Err(refuse());
        }
        let blocks = parents.iter().flat_map(|ranks| ranks.chunks(size).map(<[usize]>::to_vec));
        self.make(world, name, blocks.collect())
    }

    /// Makes the group whose k-th instance has the k-th members of every instance of the group `of`.
    ///
    /// # Errors
    ///
    /// A name that is taken, an unknown group; ranks that do not agree; a failed exchange.
    pub fn cross(&mut self, world: &Group, name: &str, of: &str) -> Result<Group> {
        agree(world, "create_orthogonal_process_group", &format!("\"{name}\" orthogonal to \"{of}\""))?;
        self.check_new(name)?;
        let base = &self.find(of)?.instances;
        let across = (0..base[0].len()).map(|k| base.iter().map(|ranks| ranks[k]).collect());
        self.make(world, name, across.collect())
    }

    /// The ranks of every instance of a group.
    ///
    /// # Errors
    ///
    /// A name that no group has.
    pub fn instances(&self, name: &str) -> Result<&[Vec<usize>]> {
        self.find(name).map(|group| group.instances.as_slice())
    }

    fn make(&mut self, world: &Group, name: &str, instances: Vec<Vec<usize>>) -> Result<Group> {
        let own = instances.iter().enumerate().find_map(|(colour, ranks)| {
            let position = ranks.iter().position(|rank| *rank == world.rank())?;
            Some((colour, position as i64))
        });
        let (colour, key) = own.unzip();
        let made = world.split(name, colour, key.unwrap_or(0))?;
        // Blocks and their transposes hold every rank of the world.
        let own =
            made.ok_or_else(|| Error::UndefinedGroup { name: name.to_owned(), known_names: self.names() })?;
        self.groups.insert(name.to_owned(), NamedGroup { own: own.clone(), instances });
        Ok(own)
    }

    fn find(&self, name: &str) -> Result<&NamedGroup> {
        let undefined = || Error::UndefinedGroup { name: name.to_owned(), known_names: self.names() };
        self.groups.get(name).ok_or_else(undefined)
    }

    fn check_new(&self, name: &str) -> Result<()> {
        if self.groups.contains_key(name) {
            return Err(Error::GroupExists { name: name.to_owned() });
        }
        Ok(())
    }
}
