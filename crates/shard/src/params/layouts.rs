//! The parameters of a model, laid out by a declaration.

use std::collections::BTreeMap;

use isobar_collectives::chunk;
use isobar_mesh::DeviceMesh;
use tch::Tensor;

use super::StateDict;
use crate::error::{Error, Result};
use crate::layout::{Layout, Placement, Sizes};
use crate::tensor::ShardTensor;

/// Source of the values of parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Source {
    /// All ranks have the same already, such as from one seed or one file. Nothing is compared, and nothing travels.
    #[default]
    Same,
    /// One rank's, by its place in the mesh; each rank receives its part. The other ranks' are not looked at, and may be
    /// missing.
    Rank(usize),
}

/// Layout of a model's parameters: patterns of names, each with placements along named axes of a mesh.
///
/// `*` in a pattern stands for any text, also none. The first pattern that a name matches counts; parameters that none matches
/// are replicated, and so they are along axes that their pattern does not name.
///
/// ```
/// use isobar_collectives::Group;
/// use isobar_mesh::DeviceMesh;
/// use isobar_shard::{ParameterLayouts, Placement, Source, StateDict};
/// use tch::{Kind, Tensor};
///
/// let mesh = DeviceMesh::new(&Group::single(), &[1, 1], &["data", "model"])?;
/// let ones = |shape: &[i64]| Tensor::ones(shape, (Kind::Float, tch::Device::Cpu));
/// let state = StateDict::from([
///     ("blocks.0.fc1.weight".to_owned(), ones(&[8, 4])),
///     ("norm.weight".to_owned(), ones(&[4])),
/// ]);
/// let layouts = ParameterLayouts::new().with("blocks.*.fc1.*", &[("model", Placement::Shard(0))]);
/// let parameters = layouts.distribute(&state, &mesh, Source::Same)?;
/// assert_eq!(parameters["blocks.0.fc1.weight"].placements(), [Placement::Replicate, Placement::Shard(0)]);
/// assert!(parameters["norm.weight"].layout().is_replicated());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct ParameterLayouts {
    rows: Vec<Row>,
}

/// Placements of the parameters whose names match a pattern.
#[derive(Debug, Clone)]
struct Row {
    pattern: String,
    placements: Vec<(String, Placement)>,
    /// Indices along a sharded dim that stay together.
    block: i64,
}

impl ParameterLayouts {
    /// Everything replicated.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the placements of parameters whose names match `pattern`.
    #[must_use]
    pub fn with(self, pattern: &str, placements: &[(&str, Placement)]) -> Self {
        self.with_blocks(pattern, placements, 1)
    }

    /// Adds a pattern whose sharded dims are cut at multiples of `block` only: positions of a grid in whole rows.
    ///
    /// ```
    /// use isobar_collectives::threads;
    /// use isobar_mesh::DeviceMesh;
    /// use isobar_shard::{ParameterLayouts, Placement};
    ///
    /// threads::run(2, std::time::Duration::from_secs(30), |group| {
    ///     // Positions of a grid of 3 rows of 8, which ranks hold in whole rows.
    ///     let layouts = ParameterLayouts::new().with_blocks("positions", &[("domain", Placement::Shard(0))], 8);
    ///     let mesh = DeviceMesh::new(&group, &[2], &["domain"]).unwrap();
    ///     let layout = layouts.layout_of("positions", &[24, 4], &mesh).unwrap();
    ///     assert_eq!(layout.sizes(0).unwrap(), [16, 8]);
    /// });
    /// ```
    #[must_use]
    pub fn with_blocks(mut self, pattern: &str, placements: &[(&str, Placement)], block: i64) -> Self {
        let placements =
            placements.iter().map(|(axis, placement)| ((*axis).to_owned(), *placement)).collect();
        self.rows.push(Row { pattern: pattern.to_owned(), placements, block: block.max(1) });
        self
    }

    /// Prepends `prefix` and a dot to every pattern, for a network nested in another one.
    ///
    /// ```
    /// use isobar_shard::{ParameterLayouts, Placement};
    ///
    /// let layouts = ParameterLayouts::new().with("pos_embed", &[("domain", Placement::Shard(1))]).prefixed("model");
    /// assert_eq!(layouts.matching("model.pos_embed"), Some(0));
    /// assert_eq!(layouts.matching("pos_embed"), None);
    /// ```
    #[must_use]
    pub fn prefixed(mut self, prefix: &str) -> Self {
        for row in &mut self.rows {
            row.pattern = format!("{prefix}.{}", row.pattern);
        }
        self
    }

    /// Returns the patterns.
    pub fn patterns(&self) -> impl Iterator<Item = &str> {
        self.rows.iter().map(|row| &*row.pattern)
    }

    /// Returns the index of the first pattern that a name matches.
    pub fn matching(&self, name: &str) -> Option<usize> {
        self.rows.iter().position(|row| matches(&row.pattern, name))
    }

    /// Returns the layout of one parameter on a mesh. Axes that the mesh lacks are ignored: a declaration for all meshes.
    /// Does not communicate.
    ///
    /// # Errors
    ///
    /// Placements that do not fit the shape, or are partial.
    ///
    /// ```
    /// use isobar_collectives::Group;
    /// use isobar_mesh::DeviceMesh;
    /// use isobar_shard::{ParameterLayouts, Placement};
    ///
    /// let layouts = ParameterLayouts::new()
    ///     .with("embedding.*", &[("domain", Placement::Shard(0))])
    ///     .with("*.weight", &[("model", Placement::Shard(1))]);
    /// // The mesh has no axis "model".
    /// let mesh = DeviceMesh::new(&Group::single(), &[1], &["domain"])?;
    /// let embedding = layouts.layout_of("embedding.table", &[100, 8], &mesh)?;
    /// assert_eq!(embedding.placements(), [Placement::Shard(0)]);
    /// assert!(layouts.layout_of("head.weight", &[8, 8], &mesh)?.is_replicated());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn layout_of(&self, name: &str, shape: &[i64], mesh: &DeviceMesh) -> Result<Layout> {
        let Some(row) = self.matching(name).map(|row| &self.rows[row]) else {
            return Layout::new(mesh, &vec![Placement::Replicate; mesh.ndim()], shape, &Sizes::Chunk);
        };
        let names = mesh.names();
        let known = row.placements.iter().filter(|(axis, _)| names.contains(&axis.as_str())).cloned();
        let row = Row { placements: known.collect(), ..row.clone() };
        row.layout(&along_axes(&row, mesh)?, shape, mesh).map_err(|error| parameter(name, error.to_string()))
    }

    /// The layout of each parameter of these names and shapes; sharded dims are chunked. Does not communicate.
    ///
    /// # Errors
    ///
    /// A pattern that matches no name; an axis that the mesh lacks or that is named twice; placements that do not fit a shape,
    /// or are partial.
    pub fn layouts<'a>(
        &self,
        shapes: impl IntoIterator<Item = (&'a str, &'a [i64])>,
        mesh: &DeviceMesh,
    ) -> Result<BTreeMap<String, Layout>> {
        let rows: Vec<Vec<Placement>> =
            self.rows.iter().map(|row| along_axes(row, mesh)).collect::<Result<_>>()?;
        let mut used = vec![false; rows.len()];
        let mut found = BTreeMap::new();
        let mut names = Vec::new();
        for (name, shape) in shapes {
            let matching: Vec<usize> =
                (0..rows.len()).filter(|&row| matches(&self.rows[row].pattern, name)).collect();
            matching.iter().for_each(|&row| used[row] = true);
            let layout = match matching.first() {
                Some(&row) => self.rows[row].layout(&rows[row], shape, mesh),
                None => Layout::new(mesh, &vec![Placement::Replicate; mesh.ndim()], shape, &Sizes::Chunk),
            };
            let layout = layout.map_err(|error| parameter(name, error.to_string()))?;
            found.insert(name.to_owned(), layout);
            names.push(name);
        }
        if let Some(unused) = used.iter().position(|used| !used) {
            let reason = format!("this pattern matches no name; the names are {}", names.join(", "));
            return Err(parameter(&self.rows[unused].pattern, reason));
        }
        Ok(found)
    }

    /// The parameters as leaves, laid out as declared. Those of which the given ones [require gradients] do so too.
    ///
    /// All ranks of the mesh call.
    ///
    /// [require gradients]: Tensor::requires_grad
    ///
    /// # Errors
    ///
    /// As [`layouts`](Self::layouts); a source that is not a rank of the mesh; the errors of the exchange.
    pub fn distribute(
        &self,
        state: &StateDict,
        mesh: &DeviceMesh,
        source: Source,
    ) -> Result<BTreeMap<String, ShardTensor>> {
        let Source::Rank(src) = source else {
            let shapes: Vec<(&str, Vec<i64>)> =
                state.iter().map(|(name, tensor)| (&name[..], tensor.size())).collect();
            let layouts = self.layouts(shapes.iter().map(|(name, shape)| (*name, &shape[..])), mesh)?;
            let give = |(name, layout): (String, Layout)| {
                let whole = &state[&name];
                let part = ShardTensor::distribute_as(&whole.detach(), &layout)?;
                // Memory of its own: what is kept of a view is the whole.
                let own = part.local().f_detach_copy().map_err(|e| parameter(&name, e.to_string()))?;
                let leaf = ShardTensor::new(own, layout).set_requires_grad(whole.requires_grad())?;
                Ok((name, leaf))
            };
            return layouts.into_iter().map(give).collect();
        };
        let listed = tell(state, mesh, src)?;
        let shapes = listed.iter().map(|(name, shape, _)| (&name[..], &shape[..]));
        let layouts = self.layouts(shapes, mesh)?;
        let give = |(name, _, requires_grad): &(String, Vec<i64>, bool)| {
            let layout = &layouts[name];
            let whole = state.get(name).map(Tensor::detach);
            let leaf = ShardTensor::scatter(
                whole.as_ref(),
                src,
                mesh,
                layout.placements(),
                &sizes_of(layout),
                *requires_grad,
            )?;
            Ok((name.clone(), leaf))
        };
        listed.iter().map(give).collect()
    }
}

impl Row {
    /// The layout of a parameter with these placements; sharded dims are cut into chunks of whole blocks.
    fn layout(&self, placements: &[Placement], shape: &[i64], mesh: &DeviceMesh) -> Result<Layout> {
        let mut sizes = Vec::new();
        for dim in placements.iter().filter_map(|place| place.dim()).filter(|_| self.block > 1) {
            let ranks =
                mesh.shape().into_iter().zip(placements).filter(|(_, place)| place.dim() == Some(dim));
            let extent = shape.get(dim).copied().unwrap_or(0);
            let mut parts = chunk(extent.div_euclid(self.block), ranks.map(|(ranks, _)| ranks).product());
            parts.iter_mut().for_each(|part| *part *= self.block);
            if let Some(last) = parts.last_mut() {
                *last += extent.rem_euclid(self.block);
            }
            sizes.retain(|(other, _)| *other != dim);
            sizes.push((dim, parts));
        }
        let sizes = if sizes.is_empty() { Sizes::Chunk } else { Sizes::Explicit(sizes) };
        Layout::new(mesh, placements, shape, &sizes)
    }
}

/// Returns the sizes of a layout's shards. Strided shards follow a rule and have no table.
fn sizes_of(layout: &Layout) -> Sizes {
    let is_strided =
        |index| layout.placements().iter().any(|p| p.dim() == Some(index) && *p != Placement::Shard(index));
    let dims = layout.dims().iter().enumerate();
    let dims = dims.filter(|&(index, dim)| dim.is_split() && !is_strided(index));
    Sizes::Explicit(dims.map(|(index, dim)| (index, dim.sizes())).collect())
}

/// The names and shapes that the source has, and whether gradients are required, on every rank.
fn tell(state: &StateDict, mesh: &DeviceMesh, src: usize) -> Result<Vec<(String, Vec<i64>, bool)>> {
    let group = mesh.group_along(&(0..mesh.ndim()).collect::<Vec<_>>())?;
    let ranks = mesh.ranks();
    let root = ranks.get(src).and_then(|rank| group.ranks().iter().position(|r| r == rank));
    let Some(root) = root else {
        return Err(Error::from(isobar_array::Error::Argument {
            op: "distribute",
            reason: format!("the source {src} is not a rank of {mesh}"),
        }));
    };
    let mine: Vec<(&str, Vec<i64>, bool)> =
        state.iter().map(|(name, tensor)| (&name[..], tensor.size(), tensor.requires_grad())).collect();
    let bytes = serde_json::to_vec(&mine).map_err(|error| {
        Error::from(isobar_array::Error::Argument {
            op: "distribute",
            reason: format!("the names of the parameters cannot be told to other ranks: {error}"),
        })
    })?;
    let listed = group.broadcast_bytes(&bytes, root)?;
    serde_json::from_slice(&listed).map_err(|error| {
        Error::from(isobar_array::Error::Argument {
            op: "distribute",
            reason: format!("what rank {src} of {mesh} told of its parameters cannot be read: {error}"),
        })
    })
}

/// A row's placements, one for each axis of the mesh.
fn along_axes(row: &Row, mesh: &DeviceMesh) -> Result<Vec<Placement>> {
    let Row { pattern, placements: row, .. } = row;
    let names = mesh.names();
    let mut placements = vec![None; names.len()];
    for (axis, placement) in row {
        let Some(index) = names.iter().position(|name| name == axis) else {
            return Err(parameter(pattern, format!("{mesh} has no axis \"{axis}\"")));
        };
        if placements[index].replace(*placement).is_some() {
            return Err(parameter(pattern, format!("the axis \"{axis}\" is named twice")));
        }
        if placement.is_partial() {
            return Err(parameter(
                pattern,
                format!("{placement} along \"{axis}\"; parameters are whole or sharded"),
            ));
        }
    }
    Ok(placements.into_iter().map(|placement| placement.unwrap_or(Placement::Replicate)).collect())
}

/// Returns whether the name matches the pattern, in which `*` stands for any text.
fn matches(pattern: &str, name: &str) -> bool {
    let mut pieces = pattern.split('*');
    let first = pieces.next().unwrap_or_default();
    let Some(mut rest) = name.strip_prefix(first) else { return false };
    let mut pieces: Vec<&str> = pieces.collect();
    let Some(last) = pieces.pop() else { return rest.is_empty() };
    for piece in pieces {
        match rest.find(piece) {
            Some(at) => rest = &rest[at + piece.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

fn parameter(name: &str, reason: String) -> Error {
    Error::Parameter { name: name.to_owned(), reason }
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn stars_stand_for_any_text() {
        assert!(matches("a.b", "a.b") && !matches("a.b", "a.bc") && !matches("a.b", "xa.b"));
        assert!(matches("*", "") && matches("*", "anything") && !matches("", "a"));
        assert!(
            matches("blocks.*.weight", "blocks.0.fc.weight") && !matches("blocks.*.weight", "blocks.weight")
        );
        assert!(matches("*.bias", "fc.bias") && !matches("*.bias", "fc.bias2"));
        assert!(matches("a*b*b", "abb") && !matches("a*b*b", "ab"));
    }
}
