//! Ranks, their mesh, and another mesh of the same ranks.

use isobar_collectives::Group;
use isobar_manager::DeviceMesh;
use isobar_shard::Placement;

/// A mesh of so many ranks along these axes; with a slice, the model and the fields are on the mesh of these axes of it alone, and
/// the ranks along `data` are apart.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan {
    pub(crate) shape: &'static [i64],
    pub(crate) names: &'static [&'static str],
    pub(crate) slice: Option<&'static [&'static str]>,
}

const fn plan(shape: &'static [i64], names: &'static [&'static str]) -> Plan {
    Plan { shape, names, slice: None }
}

pub(crate) const PLANS: [Plan; 13] = [
    plan(&[1], &["domain"]),
    plan(&[1, 1], &["shard", "model"]),
    plan(&[2], &["domain"]),
    plan(&[2], &["data"]),
    plan(&[2], &["shard"]),
    plan(&[3], &["domain"]),
    plan(&[3], &["shard"]),
    plan(&[2, 2], &["data", "domain"]),
    plan(&[2, 2], &["shard", "domain"]),
    plan(&[2, 2], &["domain", "model"]),
    plan(&[2, 2], &["data", "model"]),
    plan(&[4], &["shard"]),
    Plan { shape: &[2, 2], names: &["data", "domain"], slice: Some(&["domain"]) },
];

impl Plan {
    pub(crate) fn ranks(&self) -> usize {
        self.shape.iter().product::<i64>() as usize
    }

    /// The extent of an axis of the model's mesh; 1 where it has none.
    pub(crate) fn extent(&self, axis: &str) -> usize {
        let of_mesh = self.slice.is_none_or(|slice| slice.contains(&axis));
        let place = self.names.iter().position(|name| *name == axis).filter(|_| of_mesh);
        place.map_or(1, |place| self.shape[place] as usize)
    }

    pub(crate) fn has(&self, axis: &str) -> bool {
        self.slice.unwrap_or(self.names).contains(&axis)
    }

    /// Ranks of the model's mesh.
    pub(crate) fn mesh_ranks(&self) -> usize {
        self.slice.unwrap_or(self.names).iter().map(|axis| self.extent(axis)).product()
    }
}

/// A plan on a rank.
pub(crate) struct Arrangement {
    pub(crate) world: Group,
    /// That of the model.
    pub(crate) mesh: DeviceMesh,
    /// Other axes of the same ranks as the whole mesh.
    pub(crate) other: DeviceMesh,
    /// The ranks along the axis `data`, which may be outside the model's mesh.
    pub(crate) data: Group,
}

impl Arrangement {
    pub(crate) fn new(world: &Group, plan: &Plan) -> Self {
        let whole = DeviceMesh::new(world, plan.shape, plan.names).unwrap();
        let name = if plan.names == ["data"] { "domain" } else { "data" };
        let other = DeviceMesh::new(world, &[-1], &[name]).unwrap();
        let data = if plan.names.contains(&"data") { whole.group("data").unwrap() } else { Group::single() };
        let mesh = plan.slice.map_or(whole.clone(), |axes| whole.slice(axes).unwrap());
        Self { world: world.clone(), mesh, other, data }
    }

    /// Placements of fields on the mesh.
    pub(crate) fn placements(&self) -> Vec<Placement> {
        let place = |name: &str| match name {
            "domain" => Placement::Shard(2),
            "model" => Placement::Replicate,
            _ => Placement::Shard(0),
        };
        self.mesh.names().into_iter().map(place).collect()
    }

    /// The ranks over which contributions of a model that is split along `model`, or is not, are to be summed.
    pub(crate) fn copies(&self, split: bool) -> Group {
        let names = self.mesh.names();
        let axes: Vec<usize> = (0..names.len()).filter(|&axis| !(split && names[axis] == "model")).collect();
        self.mesh.group_along(&axes).unwrap()
    }
}
