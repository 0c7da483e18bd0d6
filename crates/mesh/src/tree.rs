//! Trees of process groups: which groups are cut from which.

use crate::{Error, Result};

/// A group of a tree: its name and how many ranks it has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessGroupNode {
    /// The group's name.
    pub name: String,
    /// Ranks in the group; none where it follows from the groups below it, -1 for a leaf that takes what is left.
    pub size: Option<i64>,
}

impl ProcessGroupNode {
    /// A group whose size is not known yet.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), size: None }
    }
}

/// A tree of groups. A group's size is the product of those of the groups below it, and these are orthogonal to each
/// other: ranks of the first are in a row, those of the following ones are strided.
///
/// ```
/// use isobar_mesh::{ProcessGroupConfig, ProcessGroupNode};
///
/// let mut config = ProcessGroupConfig::new(ProcessGroupNode::new("world"));
/// config.add_node(ProcessGroupNode::new("model_parallel"), "world")?;
/// config.add_node(ProcessGroupNode::new("data_parallel"), "world")?;
/// config.set_leaf_group_sizes(&[("model_parallel", 2), ("data_parallel", -1)])?;
/// let sized = config.resolve(8)?;
/// assert_eq!(sized.get_node("data_parallel")?.size, Some(4));
/// assert_eq!(sized.get_node("world")?.size, Some(8));
/// # Ok::<(), isobar_mesh::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ProcessGroupConfig {
    /// Parents stand before their children.
    nodes: Vec<(ProcessGroupNode, Option<usize>)>,
}

impl ProcessGroupConfig {
    /// A tree of its root only.
    #[must_use]
    pub fn new(root: ProcessGroupNode) -> Self {
        Self { nodes: vec![(root, None)] }
    }

    /// Adds a group below another.
    ///
    /// # Errors
    ///
    /// A name that is taken; an unknown parent.
    pub fn add_node(&mut self, node: ProcessGroupNode, parent: &str) -> Result<()> {
        let parent = self.index(parent)?;
        if self.index(&node.name).is_ok() {
            return Err(Error::GroupTree(format!("there is already a group \"{}\"", node.name)));
        }
        self.nodes.push((node, Some(parent)));
        Ok(())
    }

    /// The group of a name.
    ///
    /// # Errors
    ///
    /// A name that is not in the tree.
    pub fn get_node(&self, name: &str) -> Result<&ProcessGroupNode> {
        Ok(&self.nodes[self.index(name)?].0)
    }

    /// The root.
    #[must_use]
    pub fn root(&self) -> &ProcessGroupNode {
        &self.nodes[0].0
    }

    /// The groups directly below one, in the order in which they were added.
    ///
    /// # Errors
    ///
    /// A name that is not in the tree.
    pub fn children(&self, name: &str) -> Result<Vec<&ProcessGroupNode>> {
        let parent = self.index(name)?;
        Ok(self.nodes.iter().filter(|(_, of)| *of == Some(parent)).map(|(node, _)| node).collect())
    }

    /// The names of the groups that have none below them.
    #[must_use]
    pub fn leaf_groups(&self) -> Vec<&str> {
        let leaves = (0..self.nodes.len()).filter(|index| self.is_leaf(*index));
        leaves.map(|index| self.nodes[index].0.name.as_str()).collect()
    }

    /// Sets the sizes of leaves; one of all may be -1. Sizes of their parents follow in [`Self::resolve`].
    ///
    /// # Errors
    ///
    /// A name that is not in the tree or is not a leaf; a size of 0 or below -1. Nothing is changed then.
    pub fn set_leaf_group_sizes(&mut self, sizes: &[(&str, i64)]) -> Result<()> {
        let mut indices = Vec::with_capacity(sizes.len());
        for (name, size) in sizes {
            let index = self.index(name)?;
            if !self.is_leaf(index) {
                return Err(Error::GroupTree(format!(
                    "\"{name}\" is not a leaf; sizes can be set for {}",
                    self.leaf_groups().join(", ")
                )));
            }
            check_size(name, *size)?;
            indices.push((index, *size));
        }
        for (index, size) in indices {
            self.nodes[index].0.size = Some(size);
        }
        Ok(())
    }

    /// The tree with every size filled in, for a world of so many ranks: a leaf of -1 takes what the other leaves
    /// leave, and each parent has the product of its children.
    ///
    /// # Errors
    ///
    /// A leaf without size, two of -1, or sizes that do not divide the world.
    pub fn resolve(&self, world_size: usize) -> Result<Self> {
        let mut resolved = self.clone();
        let leaves: Vec<usize> = (0..self.nodes.len()).filter(|index| self.is_leaf(*index)).collect();
        let mut product: i64 = 1;
        let mut derived = None;
        for leaf in leaves {
            let node = &self.nodes[leaf].0;
            match node.size {
                None => return Err(Error::GroupTree(format!("leaf \"{}\" has no size", node.name))),
                Some(-1) if derived.replace(leaf).is_some() => {
                    return Err(Error::GroupTree("only one leaf may have the size -1".to_owned()));
                }
                Some(-1) => {}
                Some(size) => {
                    check_size(&node.name, size)?;
                    product = product.saturating_mul(size);
                }
            }
        }
        let world = i64::try_from(world_size).unwrap_or(i64::MAX);
        if product > world || world % product != 0 {
            return Err(Error::GroupTree(format!(
                "the leaves have {product} ranks together, which does not divide the {world_size} ranks of the world"
            )));
        }
        if let Some(leaf) = derived {
            resolved.nodes[leaf].0.size = Some(world / product);
        }
        for index in (0..resolved.nodes.len()).rev() {
            let children = resolved.nodes.iter().filter(|(_, of)| *of == Some(index));
            let sizes: Vec<i64> = children.filter_map(|(node, _)| node.size).collect();
            let node = &mut resolved.nodes[index].0;
            if sizes.is_empty() {
                continue;
            }
            let size = sizes.iter().product();
            if node.size.is_some_and(|given| given != size && given != -1) {
                return Err(Error::GroupTree(format!(
                    "\"{}\" has the size {}, but the groups below it have {size} ranks together",
                    node.name,
                    node.size.unwrap_or_default()
                )));
            }
            node.size = Some(size);
        }
        Ok(resolved)
    }

    fn index(&self, name: &str) -> Result<usize> {
        self.nodes.iter().position(|(node, _)| node.name == name).ok_or_else(|| {
            let names: Vec<&str> = self.nodes.iter().map(|(node, _)| node.name.as_str()).collect();
            Error::GroupTree(format!("there is no group \"{name}\", expected one of {}", names.join(", ")))
        })
    }

    fn is_leaf(&self, index: usize) -> bool {
        !self.nodes.iter().any(|(_, parent)| *parent == Some(index))
    }
}

fn check_size(name: &str, size: i64) -> Result<()> {
    if size >= 1 || size == -1 {
        return Ok(());
    }
    Err(Error::GroupTree(format!(
        "\"{name}\" has the size {size}, expected at least 1, or -1 for what is left"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree() -> ProcessGroupConfig {
        let mut tree = ProcessGroupConfig::new(ProcessGroupNode::new("world"));
        tree.add_node(ProcessGroupNode::new("model"), "world").unwrap();
        tree.add_node(ProcessGroupNode::new("data"), "world").unwrap();
        tree.add_node(ProcessGroupNode::new("spatial"), "model").unwrap();
        tree.add_node(ProcessGroupNode::new("channel"), "model").unwrap();
        tree
    }

    #[test]
    fn sizes_go_up_and_one_is_derived() {
        let mut tree = tree();
        assert_eq!(tree.leaf_groups(), ["data", "spatial", "channel"]);
        tree.set_leaf_group_sizes(&[("data", -1), ("spatial", 2), ("channel", 3)]).unwrap();
        let resolved = tree.resolve(24).unwrap();
        let size = |name| resolved.get_node(name).unwrap().size.unwrap();
        assert_eq!((size("world"), size("model"), size("data")), (24, 6, 4));
    }

    #[test]
    fn trees_that_do_not_hold_together_are_refused() {
        let text = |result: Result<()>| result.unwrap_err().to_string();
        let mut tree = tree();
        insta::assert_snapshot!(text(tree.add_node(ProcessGroupNode::new("data"), "world")), @r#"group tree: there is already a group "data""#);
        insta::assert_snapshot!(text(tree.add_node(ProcessGroupNode::new("x"), "y")), @r#"group tree: there is no group "y", expected one of world, model, data, spatial, channel"#);
        insta::assert_snapshot!(text(tree.set_leaf_group_sizes(&[("model", 2)])), @r#"group tree: "model" is not a leaf; sizes can be set for data, spatial, channel"#);
        insta::assert_snapshot!(text(tree.set_leaf_group_sizes(&[("data", 0)])), @r#"group tree: "data" has the size 0, expected at least 1, or -1 for what is left"#);
        insta::assert_snapshot!(text(tree.resolve(4).map(drop)), @r#"group tree: leaf "data" has no size"#);
        tree.set_leaf_group_sizes(&[("data", -1), ("spatial", -1), ("channel", 3)]).unwrap();
        insta::assert_snapshot!(text(tree.resolve(4).map(drop)), @"group tree: only one leaf may have the size -1");
        tree.set_leaf_group_sizes(&[("spatial", 1)]).unwrap();
        insta::assert_snapshot!(text(tree.resolve(4).map(drop)), @"group tree: the leaves have 3 ranks together, which does not divide the 4 ranks of the world");
    }
}
