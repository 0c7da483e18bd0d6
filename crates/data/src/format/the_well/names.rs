//! Names of the schema.

pub(super) const DATASET_NAME: &str = "dataset_name";
pub(super) const GRID_TYPE: &str = "grid_type";
pub(super) const SPATIAL_DIMS_COUNT: &str = "n_spatial_dims";
pub(super) const TRAJECTORIES: &str = "n_trajectories";
pub(super) const PARAMETERS: &str = "simulation_parameters";
pub(super) const DIMENSIONS: &str = "dimensions";
pub(super) const SPATIAL_DIMS: &str = "spatial_dims";
pub(super) const TIME: &str = "time";
pub(super) const BOUNDARY_CONDITIONS: &str = "boundary_conditions";
pub(super) const BC_TYPE: &str = "bc_type";
pub(super) const PERIODIC: &str = "periodic";
pub(super) const ASSOCIATED_DIMS: &str = "associated_dims";
pub(super) const ASSOCIATED_FIELDS: &str = "associated_fields";
pub(super) const MASK: &str = "mask";
pub(super) const VALUES: &str = "values";
pub(super) const SCALARS: &str = "scalars";
/// By the order of their fields.
pub(super) const FIELDS: [&str; 3] = ["t0_fields", "t1_fields", "t2_fields"];
pub(super) const FIELD_NAMES: &str = "field_names";
pub(super) const SAMPLE_VARYING: &str = "sample_varying";
pub(super) const TIME_VARYING: &str = "time_varying";
pub(super) const UNITS: &str = "units";
pub(super) const DIM_VARYING: &str = "dim_varying";
/// CF's attribute of times.
pub(super) const CALENDAR: &str = "calendar";
