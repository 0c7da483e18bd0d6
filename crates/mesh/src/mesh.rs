//! Meshes: ranks arranged along named axes.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use isobar_collectives::Group;

use crate::agree::agree;
use crate::{Error, Result};

/// Ranks arranged along named axes, the last axis fastest.
///
/// Every method that makes a group ([`DeviceMesh::new`], [`DeviceMesh::with_ranks`], [`DeviceMesh::flatten`]) is called
/// by all ranks that made the mesh, in the same order; the others do not communicate. A clone is the same mesh.
///
/// ```
/// use isobar_collectives::Group;
/// use isobar_mesh::DeviceMesh;
///
/// let mesh = DeviceMesh::new(&Group::single(), &[1, -1], &["data", "model"])?;
/// assert_eq!(mesh.to_string(), "mesh (data=1, model=1)");
/// assert_eq!(mesh.slice(&["model"])?.group("model")?.size(), 1);
/// # Ok::<(), isobar_mesh::Error>(())
/// ```
#[derive(Clone)]
pub struct DeviceMesh {
    root: Arc<Root>,
    axes: Vec<Axis>,
}

/// The mesh from which slices are taken.
struct Root {
    /// All ranks that made the mesh.
    makers: Group,
    /// Ranks in the world, the last axis fastest.
    ranks: Vec<usize>,
    shape: Vec<usize>,
    coordinates: Option<Vec<usize>>,
    /// By the axes that it spans, in order; none on ranks outside.
    groups: Mutex<BTreeMap<Vec<usize>, Option<Group>>>,
}

/// An axis: one of the root's, or several flattened into one.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Axis {
    name: String,
    of: Vec<usize>,
}

impl DeviceMesh {
    /// Arranges all ranks of a group; one extent may be -1 and is derived.
    ///
    /// All ranks of the group call.
    ///
    /// # Errors
    ///
    /// Ranks that ask for different meshes; no axes, names missing, empty or repeated, extents that do not multiply to
    /// the number of ranks; a failed exchange.
    ///
    /// ```
    /// use isobar_collectives::threads;
    /// use isobar_mesh::DeviceMesh;
    ///
    /// threads::run(4, std::time::Duration::from_secs(30), |world| {
    ///     // 2 replicas of a model, each over 2 ranks; the last axis is the fastest.
    ///     let mesh = DeviceMesh::new(&world, &[-1, 2], &["data", "domain"]).unwrap();
    ///     assert_eq!(mesh.shape(), [2, 2]);
    ///     assert_eq!(mesh.coordinates().unwrap(), [world.rank() / 2, world.rank() % 2]);
    /// });
    /// ```
    pub fn new(makers: &Group, shape: &[i64], names: &[&str]) -> Result<Self> {
        let ranks: Vec<usize> = (0..makers.size()).collect();
        Self::with_ranks(makers, &ranks, shape, names)
    }

    /// Arranges some ranks of a group, in this order; the others hold a mesh that they are outside of.
    ///
    /// All ranks of the group call.
    ///
    /// # Errors
    ///
    /// As [`DeviceMesh::new`]; ranks that are repeated or that the group does not have.
    pub fn with_ranks(makers: &Group, ranks: &[usize], shape: &[i64], names: &[&str]) -> Result<Self> {
        // Before anything else: what is refused below is then refused on all ranks.
        agree(makers, "device mesh", &format!("shape {shape:?} with axes {names:?} of ranks {ranks:?}"))?;
        let extents = extents(ranks, makers.size(), shape, names)?;
        let own = ranks.iter().position(|rank| *rank == makers.rank());
        let root = Arc::new(Root {
            makers: makers.clone(),
            ranks: ranks.iter().map(|rank| makers.ranks()[*rank]).collect(),
            coordinates: own.map(|index| coordinates(index, &extents)),
            shape: extents,
            groups: Mutex::default(),
        });
        let axes: Vec<Axis> = names
            .iter()
            .enumerate()
            .map(|(index, name)| Axis { name: (*name).to_owned(), of: vec![index] })
            .collect();
        for of in axis_sets(axes.len()) {
            root.make_group(&Axis {
                name: of.iter().map(|&axis| names[axis]).collect::<Vec<_>>().join("+"),
                of,
            })?;
        }
        Ok(Self { root, axes })
    }

    /// All ranks of a group along the single axis `world`. Does not communicate.
    #[must_use]
    pub fn world(makers: &Group) -> Self {
        let root = Arc::new(Root {
            makers: makers.clone(),
            ranks: makers.ranks().to_vec(),
            shape: vec![makers.size()],
            coordinates: Some(vec![makers.rank()]),
            groups: Mutex::new(BTreeMap::from([(vec![0], Some(makers.clone()))])),
        });
        Self { root, axes: vec![Axis { name: "world".to_owned(), of: vec![0] }] }
    }

    /// The names of the axes.
    #[must_use]
    pub fn names(&self) -> Vec<&str> {
        self.axes.iter().map(|axis| axis.name.as_str()).collect()
    }

    /// The extents of the axes.
    #[must_use]
    pub fn shape(&self) -> Vec<usize> {
        self.axes.iter().map(|axis| self.root.extent(axis)).collect()
    }

    /// The number of axes.
    #[must_use]
    pub fn ndim(&self) -> usize {
        self.axes.len()
    }

    /// The number of ranks.
    #[must_use]
    pub fn size(&self) -> usize {
        self.shape().iter().product()
    }

    /// The ranks, by their numbers in the world, the last axis fastest. Of a slice: those of the slice that holds this
    /// rank, and of the first slice for ranks outside the mesh.
    #[must_use]
    pub fn ranks(&self) -> Vec<usize> {
        let fixed = self.root.coordinates.clone().unwrap_or_else(|| vec![0; self.root.shape.len()]);
        let of: Vec<usize> = self.axes.iter().flat_map(|axis| axis.of.iter().copied()).collect();
        let extents: Vec<usize> = of.iter().map(|axis| self.root.shape[*axis]).collect();
        let rank_at = |index| {
            let mut at = fixed.clone();
            for (axis, coordinate) in of.iter().zip(coordinates(index, &extents)) {
                at[*axis] = coordinate;
            }
            self.root.ranks[index_of(&at, &self.root.shape)]
        };
        (0..extents.iter().product()).map(rank_at).collect()
    }

    /// This rank's place along each axis; none outside the mesh.
    #[must_use]
    pub fn coordinates(&self) -> Option<Vec<usize>> {
        let own = self.root.coordinates.as_ref()?;
        Some(self.axes.iter().map(|axis| self.root.place(axis, own)).collect())
    }

    /// Returns this rank's place along an axis; `None` outside the mesh.
    ///
    /// # Errors
    ///
    /// An unknown axis.
    pub fn coordinate(&self, axis: &str) -> Result<Option<usize>> {
        let axis = self.axis(axis)?;
        Ok(self.root.coordinates.as_ref().map(|own| self.root.place(axis, own)))
    }

    /// The ranks that differ from this one along an axis only, in its order.
    ///
    /// # Errors
    ///
    /// An unknown axis; a rank outside the mesh.
    ///
    /// ```
    /// use isobar_collectives::threads;
    /// use isobar_mesh::DeviceMesh;
    ///
    /// threads::run(4, std::time::Duration::from_secs(30), |world| {
    ///     let mesh = DeviceMesh::new(&world, &[2, 2], &["data", "domain"]).unwrap();
    ///     // Ranks 0 and 2 hold the same part of the domain.
    ///     let replicas = mesh.group("data").unwrap();
    ///     assert_eq!(replicas.ranks(), [world.rank() % 2, world.rank() % 2 + 2]);
    /// });
    /// ```
    pub fn group(&self, axis: &str) -> Result<Group> {
        let found = self.axis(axis)?;
        self.root.known(found).flatten().ok_or_else(|| Error::NotInMesh {
            rank: self.root.makers.ranks()[self.root.makers.rank()],
            mesh: self.to_string(),
            axis: axis.to_owned(),
        })
    }

    /// The ranks that differ from this one along some axes only, the last axis of the mesh fastest: of all axes, all ranks
    /// of the mesh. Does not communicate: these groups are made with the mesh.
    ///
    /// # Errors
    ///
    /// No axis, or an unknown one; a rank outside the mesh; more than six axes, of which one or all are not
    /// asked for.
    pub fn group_along(&self, axes: &[usize]) -> Result<Group> {
        let mut of = Vec::with_capacity(axes.len());
        for &axis in axes {
            let found = self
                .axes
                .get(axis)
                .ok_or_else(|| Error::UnknownAxis { mesh: self.to_string(), axis: axis.to_string() })?;
            of.extend(&found.of);
        }
        of.sort_unstable();
        of.dedup();
        let group = self.root.known(&Axis { name: String::new(), of }).flatten();
        group.ok_or_else(|| Error::NotInMesh {
            rank: self.root.makers.ranks()[self.root.makers.rank()],
            mesh: self.to_string(),
            axis: axes.iter().map(|&axis| self.axes[axis].name.as_str()).collect::<Vec<_>>().join("+"),
        })
    }

    /// The mesh of some axes, in the order given, that holds this rank. Does not communicate.
    ///
    /// # Errors
    ///
    /// No axes, an unknown axis, or one that is named twice.
    ///
    /// ```
    /// use isobar_collectives::threads;
    /// use isobar_mesh::DeviceMesh;
    ///
    /// threads::run(4, std::time::Duration::from_secs(30), |world| {
    ///     let mesh = DeviceMesh::new(&world, &[2, 2], &["data", "domain"]).unwrap();
    ///     let domain = mesh.slice(&["domain"]).unwrap();
    ///     let first = world.rank() / 2 * 2;
    ///     assert_eq!(domain.ranks(), [first, first + 1]);
    /// });
    /// ```
    pub fn slice(&self, axes: &[&str]) -> Result<Self> {
        let mut chosen: Vec<Axis> = Vec::with_capacity(axes.len());
        for name in axes {
            let axis = self.axis(name)?;
            if chosen.contains(axis) {
                return Err(self.problem(&format!("axis \"{name}\" is chosen twice")));
            }
            chosen.push(axis.clone());
        }
        if chosen.is_empty() {
            return Err(self.problem("no axis is chosen"));
        }
        Ok(Self { root: Arc::clone(&self.root), axes: chosen })
    }

    /// Flattens the mesh to one axis over the same ranks. Its group is created once and kept.
    ///
    /// All ranks that made the mesh call.
    ///
    /// # Errors
    ///
    /// Ranks that flatten different axes; a failed exchange.
    ///
    /// ```
    /// use isobar_collectives::threads;
    /// use isobar_mesh::DeviceMesh;
    ///
    /// threads::run(4, std::time::Duration::from_secs(30), |world| {
    ///     let mesh = DeviceMesh::new(&world, &[1, 2, 2], &["data", "height", "width"]).unwrap();
    ///     let domain = mesh.slice(&["height", "width"]).unwrap().flatten("domain").unwrap();
    ///     assert_eq!(domain.group("domain").unwrap().size(), 4);
    /// });
    /// ```
    pub fn flatten(&self, name: &str) -> Result<Self> {
        let of = self.axes.iter().flat_map(|axis| axis.of.iter().copied()).collect();
        let axis = Axis { name: name.to_owned(), of };
        self.root.make_group(&axis)?;
        Ok(Self { root: Arc::clone(&self.root), axes: vec![axis] })
    }

    fn axis(&self, name: &str) -> Result<&Axis> {
        let found = self.axes.iter().find(|axis| axis.name == name);
        found.ok_or_else(|| Error::UnknownAxis { mesh: self.to_string(), axis: name.to_owned() })
    }

    fn problem(&self, problem: &str) -> Error {
        Error::Mesh {
            shape: self.shape().iter().map(|extent| *extent as i64).collect(),
            names: self.names().into_iter().map(str::to_owned).collect(),
            problem: problem.to_owned(),
        }
    }
}

impl fmt::Display for DeviceMesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axes: Vec<String> =
            self.axes.iter().map(|axis| format!("{}={}", axis.name, self.root.extent(axis))).collect();
        write!(f, "mesh ({})", axes.join(", "))
    }
}

impl fmt::Debug for DeviceMesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self} of ranks {:?}", self.ranks())
    }
}

impl PartialEq for DeviceMesh {
    /// Compares the arrangement: the same ranks along the same axes.
    fn eq(&self, other: &Self) -> bool {
        (Arc::ptr_eq(&self.root, &other.root) && self.axes == other.axes)
            || self.shape() == other.shape() && self.names() == other.names() && self.ranks() == other.ranks()
    }
}

impl Eq for DeviceMesh {}

impl Root {
    fn extent(&self, axis: &Axis) -> usize {
        axis.of.iter().map(|index| self.shape[*index]).product()
    }

    /// The place along an axis of a rank with these coordinates.
    fn place(&self, axis: &Axis, coordinates: &[usize]) -> usize {
        axis.of.iter().fold(0, |place, index| place * self.shape[*index] + coordinates[*index])
    }

    /// The group along an axis, where one was made; none inside on ranks outside.
    fn known(&self, axis: &Axis) -> Option<Option<Group>> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner).get(&axis.of).cloned()
    }

    /// Makes the groups along an axis, all at once. Whether they are there already is the same on all ranks.
    fn make_group(&self, axis: &Axis) -> Result<()> {
        if self.known(axis).is_some() {
            return Ok(());
        }
        agree(&self.makers, "groups along a mesh axis", &format!("axes {:?} of the mesh", axis.of))?;
        let rest: Vec<usize> = (0..self.shape.len()).filter(|index| !axis.of.contains(index)).collect();
        let others = Axis { name: String::new(), of: rest };
        let own = self.coordinates.as_ref();
        let colour = own.map(|own| self.place(&others, own));
        let key = own.map_or(0, |own| self.place(axis, own) as i64);
        let group = self.makers.split(&axis.name, colour, key)?;
        self.groups.lock().unwrap_or_else(PoisonError::into_inner).insert(axis.of.clone(), group);
        Ok(())
    }
}

/// So many axes at most have groups along all sets of them; the sets double with each.
const AXES: usize = 6;

/// The sets of axes along which a mesh has groups: all there are, and of more than [`AXES`] axes each and all together.
fn axis_sets(axes: usize) -> Vec<Vec<usize>> {
    if axes > AXES {
        let single = (0..axes).map(|axis| vec![axis]);
        return single.chain([(0..axes).collect()]).collect();
    }
    let members = |set: usize| (0..axes).filter(|axis| set >> axis & 1 == 1).collect();
    (1..1 << axes).map(members).collect()
}

/// The extents with -1 filled in.
fn extents(ranks: &[usize], makers: usize, shape: &[i64], names: &[&str]) -> Result<Vec<usize>> {
    let refuse = |problem: String| Error::Mesh {
        shape: shape.to_vec(),
        names: names.iter().map(|name| (*name).to_owned()).collect(),
        problem,
    };
    if shape.is_empty() {
        return Err(refuse("there is no axis; give at least one".to_owned()));
    }
    if shape.len() != names.len() {
        return Err(refuse(format!("there are {} extents but {} names", shape.len(), names.len())));
    }
    for (index, name) in names.iter().enumerate() {
        if name.is_empty() || names[..index].contains(name) {
            return Err(refuse(format!("the name \"{name}\" is empty or given twice")));
        }
    }
    for (index, rank) in ranks.iter().enumerate() {
        if *rank >= makers || ranks[..index].contains(rank) {
            return Err(refuse(format!("rank {rank} is given twice or is not below {makers}")));
        }
    }
    if shape.iter().any(|extent| *extent < 1 && *extent != -1) {
        return Err(refuse("every extent must be at least 1, or -1 for what is left".to_owned()));
    }
    if shape.iter().filter(|extent| **extent == -1).count() > 1 {
        return Err(refuse("only one extent may be -1".to_owned()));
    }
    let size = ranks.len() as i64;
    let product =
        shape.iter().filter(|extent| **extent != -1).fold(1_i64, |all, extent| all.saturating_mul(*extent));
    let derived = shape.contains(&-1);
    if (derived && (product > size || size % product != 0)) || (!derived && product != size) {
        let expected = if derived { "which does not divide" } else { "not" };
        return Err(refuse(format!("its extents multiply to {product}, {expected} the {size} ranks")));
    }
    Ok(shape.iter().map(|extent| if *extent == -1 { size / product } else { *extent } as usize).collect())
}

fn coordinates(mut index: usize, shape: &[usize]) -> Vec<usize> {
    let mut at = vec![0; shape.len()];
    for (coordinate, extent) in at.iter_mut().zip(shape).rev() {
        *coordinate = index % extent;
        index /= extent;
    }
    at
}

fn index_of(coordinates: &[usize], shape: &[usize]) -> usize {
    coordinates.iter().zip(shape).fold(0, |index, (coordinate, extent)| index * extent + coordinate)
}
