//! Two-dimensional transforms of ranks' own tensors, split as PhysicsNeMo splits them: the halved dim before, the other after.
//!
//! Of a real field, X[−k, −l] is the conjugate of X[k, l]. So rows 0 … H/2 of the spectrum tell the others, and no more than
//! these are transformed along the second dim; their second halves are the other rows. What travels is what a complex
//! transform in one exchange moves, in two of half the size.

use isobar_array::{FftNorm, Spectral};
use isobar_collectives::{Group, balanced, indexed_all_to_all_v, transpose};
use tch::{TchError, Tensor};

use crate::dense::{argument, named, resolve};
use crate::error::Result;

/// The real transform over two dims of a field that is whole along the first and split along the second; the half spectrum is
/// split along the first and whole along the second.
///
/// Parts may be of any sizes before; after, they are as equal as can be. Differentiable, any number of times.
///
/// ```
/// use isobar_collectives::threads;
/// use isobar_shard::{DistributedIrfft2, DistributedRfft2};
/// use tch::{Device, Kind, Tensor};
///
/// threads::run(2, std::time::Duration::from_secs(30), |group| {
///     let whole = Tensor::arange(30, (Kind::Double, Device::Cpu)).sin().view([5, 6]);
///     let part = whole.narrow(1, [0, 2][group.rank()], [2, 4][group.rank()]);
///     let spectrum = DistributedRfft2::default().apply(&part, &group).unwrap();
///     assert_eq!(spectrum.size(), [[3, 2][group.rank()], 4]);
///     let back = DistributedIrfft2 { s: Some([5, 6]), ..Default::default() };
///     let back = back.apply(&spectrum, &group).unwrap();
///     let own = whole.narrow(1, 3 * group.rank() as i64, 3);
///     assert!((back - own).abs().max().double_value(&[]) < 1e-12);
/// });
/// ```
#[derive(Debug, Clone, Copy)]
pub struct DistributedRfft2 {
    /// Number of points along the dims, to which the field is cropped or zero-padded; its extents by default.
    pub s: Option<[i64; 2]>,
    /// The dims; the second is halved.
    pub dims: [i64; 2],
    /// Normalization.
    pub norm: FftNorm,
}

/// The inverse of [`DistributedRfft2`]: from a half spectrum that is split along the first dim to a real field that is split
/// along the second. Imaginary parts of modes that are their own mirror image are dropped.
#[derive(Debug, Clone, Copy)]
pub struct DistributedIrfft2 {
    /// The extents of the field; the spectrum's along the first dim, and twice its modes less one along the second, where not
    /// given.
    pub s: Option<[i64; 2]>,
    /// The dims; the second is halved.
    pub dims: [i64; 2],
    /// Normalization.
    pub norm: FftNorm,
}

impl Default for DistributedRfft2 {
    fn default() -> Self {
        Self { s: None, dims: [-2, -1], norm: FftNorm::Ortho }
    }
}

impl Default for DistributedIrfft2 {
    fn default() -> Self {
        Self { s: None, dims: [-2, -1], norm: FftNorm::Ortho }
    }
}

impl DistributedRfft2 {
    /// The transform. All ranks of the group call.
    ///
    /// # Errors
    ///
    /// Dims that do not exist, no points, a dtype that is not `Float` or `Double`, parts that do not fit each other: on all
    /// ranks; the errors of the exchange.
    pub fn apply(&self, x: &Tensor, group: &Group) -> Result<Tensor> {
        const OP: &str = "distributed_rfft2";
        let parts = Parts::of(OP, x, self.dims, self.s, self.norm, group)?;
        let Parts { whole: first, split: second, .. } = parts;
        let [height, width] = self.s.unwrap_or([x.size()[first], parts.total()]);
        check_points(OP, [height, width])?;
        let (rows, columns) = (balanced(height / 2 + 1, group.size()), width / 2 + 1);
        let (dim, other) = (first as i64, second as i64);

        let half = x.rfft(Some(height), dim, self.norm)?;
        let lines = transpose(&half, dim, Some(&rows), other, Some(&parts.sizes), group)?;
        let lines = lines.fft(Some(width), other, self.norm)?;
        // The row −k is the row k backwards, conjugate.
        let split = || {
            let own = lines.f_narrow(other, 0, columns)?;
            let start = lines.f_narrow(other, 0, 1)?;
            let end = lines.f_narrow(other, width - columns + 1, columns - 1)?.f_flip([other])?;
            let mirrored = Tensor::f_cat(&[&start, &end], other)?.f_conj_physical()?;
            Tensor::f_cat(&[&own, &mirrored], dim)
        };
        let both = named(OP, &[&lines], split())?;
        let owner = Owner::new(&rows);
        let find = |row: i64| match row <= height / 2 {
            true => owner.of(row),
            false => owner.of(height - row).map(|(rank, place)| (rank, rows[rank] + place)),
        };
        let wanted = ranges(&balanced(height, group.size()));
        Routes::new(&wanted, find, group)?.bring(OP, &both, dim, group)
    }
}

impl DistributedIrfft2 {
    /// The transform. All ranks of the group call.
    ///
    /// # Errors
    ///
    /// Those of [`DistributedRfft2::apply`].
    pub fn apply(&self, x: &Tensor, group: &Group) -> Result<Tensor> {
        const OP: &str = "distributed_irfft2";
        let [first, second] = self.dims;
        let parts = Parts::of(OP, x, [second, first], self.s, self.norm, group)?;
        let Parts { whole: second, split: first, .. } = parts;
        let [height, width] = self.s.unwrap_or([parts.total(), 2 * (x.size()[second] - 1)]);
        check_points(OP, [height, width])?;
        let (rows, columns) = (balanced(height / 2 + 1, group.size()), width / 2 + 1);
        let (dim, other) = (first as i64, second as i64);

        // Each of the rows 0 … H/2 with its mirror image; missing rows are zeros, behind the others.
        let pad = |x: &Tensor, dim: usize, count: i64| {
            let mut around = vec![0; 2 * (x.dim() - dim)];
            around[2 * (x.dim() - dim) - 1] = count;
            x.f_constant_pad_nd(around)
        };
        let cut = || match x.size()[second] {
            modes if modes > columns => x.f_narrow(other, 0, columns),
            modes => pad(x, second, columns - modes),
        };
        let modes = named(OP, &[x], cut().and_then(|modes| pad(&modes, first, 1)))?;
        let owner = Owner::new(&parts.sizes);
        let find = |row: i64| match row < parts.total() {
            true => owner.of(row),
            false => Some((0, parts.sizes[0])),
        };
        let mirrored = |row: i64| (height - row) % height;
        let wanted: Vec<Vec<i64>> = ranges(&rows)
            .into_iter()
            .map(|own| own.iter().copied().chain(own.iter().map(|&row| mirrored(row))).collect())
            .collect();
        let both = Routes::new(&wanted, find, group)?.bring(OP, &modes, dim, group)?;
        let own = rows[group.rank()];
        let join = || {
            let (row, image) = (both.f_narrow(dim, 0, own)?, both.f_narrow(dim, own, own)?);
            let image = image.f_conj_physical()?;
            // Columns that are their own mirror image: what is real of them.
            let mean = |at: i64| {
                row.f_narrow(other, at, 1)?.f_add(&image.f_narrow(other, at, 1)?)?.f_mul_scalar(0.5)
            };
            let between = (width - 1) / 2;
            let mut pieces = vec![mean(0)?, row.f_narrow(other, 1, between)?];
            if width % 2 == 0 {
                pieces.push(mean(width / 2)?);
            }
            pieces.push(image.f_narrow(other, 1, between)?.f_flip([other])?);
            Tensor::f_cat(&pieces, other)
        };
        let lines = named(OP, &[&both], join())?.ifft(Some(width), other, self.norm)?;
        let widths = balanced(width, group.size());
        let half = transpose(&lines, other, Some(&widths), dim, Some(&rows), group)?;
        Ok(half.irfft(Some(height), dim, self.norm)?)
    }
}

fn check_points(op: &'static str, points: [i64; 2]) -> Result<()> {
    match points.iter().all(|&points| points > 0) {
        true => Ok(()),
        false => Err(argument(op, format!("{points:?} points; expected at least 1 along each dim"))),
    }
}

/// The ranks' parts along the dim that is split.
struct Parts {
    /// The dim that is whole.
    whole: usize,
    /// The dim that is split.
    split: usize,
    sizes: Vec<i64>,
}

impl Parts {
    /// Gathers the shards and requests of all ranks, along the full dim and the sharded one. Rejected on all ranks if they do
    /// not fit.
    fn of(
        op: &'static str,
        x: &Tensor,
        [whole, split]: [i64; 2],
        s: Option<[i64; 2]>,
        norm: FftNorm,
        group: &Group,
    ) -> Result<Self> {
        let refuse = |reason: String| Err(argument(op, reason));
        let dims = [whole, split].map(|dim| resolve(op, dim, x.dim()).map_or(-1, |dim| dim as i64));
        let s = s.unwrap_or([0, 0]);
        let header = [x.kind() as i64, norm as i64, dims[0], dims[1], s[0], s[1]];
        let mine: Vec<i64> = header.into_iter().chain(x.size()).collect();
        let bytes: Vec<u8> = mine.iter().flat_map(|number| number.to_le_bytes()).collect();
        let gathered = group.all_gather_bytes(&bytes)?;
        let numbers = |bytes: &Vec<u8>| -> Vec<i64> {
            bytes.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap_or_default())).collect()
        };
        let gathered: Vec<Vec<i64>> = gathered.iter().map(numbers).collect();
        let shape = |row: &[i64]| row.get(header.len()..).unwrap_or_default().to_vec();
        if let Some(rank) = gathered.iter().position(|row| row[2] < 0 || row[3] < 0 || row[2] == row[3]) {
            let given = shape(&gathered[rank]);
            return refuse(format!(
                "dims {whole} and {split} of {given:?}, rank {rank} of {group:?}; expected two dims"
            ));
        }
        let place = header.len() + dims[1] as usize;
        let rest = |row: &[i64]| -> Vec<i64> {
            let others = row.iter().enumerate().filter(|(index, _)| *index != place);
            others.map(|(_, number)| *number).collect()
        };
        if let Some(rank) = gathered.iter().position(|row| rest(row) != rest(&gathered[0])) {
            let (one, other) = (shape(&gathered[0]), shape(&gathered[rank]));
            return refuse(format!(
                "rank 0 of {group:?} has {one:?}, rank {rank} {other:?}; they may differ along dim {} only, \
                 and not in kind, dims, s or norm",
                dims[1]
            ));
        }
        let sizes = gathered.iter().map(|row| row[place]).collect();
        Ok(Self { whole: dims[0] as usize, split: dims[1] as usize, sizes })
    }

    fn total(&self) -> i64 {
        self.sizes.iter().sum()
    }
}

/// Consecutive indices of these lengths.
fn ranges(sizes: &[i64]) -> Vec<Vec<i64>> {
    let mut start = 0;
    let range = |&size: &i64| {
        start += size;
        (start - size..start).collect()
    };
    sizes.iter().map(range).collect()
}

/// Lookup of the rank that has a row, and of the row in its shard.
struct Owner {
    ends: Vec<i64>,
}

impl Owner {
    fn new(sizes: &[i64]) -> Self {
        let mut end = 0;
        let ends = sizes.iter().map(|size| {
            end += size;
            end
        });
        Self { ends: ends.collect() }
    }

    fn of(&self, row: i64) -> Option<(usize, i64)> {
        let rank = self.ends.partition_point(|&end| end <= row);
        let start = if rank == 0 { 0 } else { self.ends[rank - 1] };
        (rank < self.ends.len()).then(|| (rank, row - start))
    }
}

/// The way of rows to the ranks that want them.
struct Routes {
    give: Vec<Tensor>,
    sizes: Vec<Vec<i64>>,
    /// From the order of arrival to that of wanting.
    order: Tensor,
}

impl Routes {
    /// Plans the requests of each rank, in its order, with their owners and positions.
    fn new(wanted: &[Vec<i64>], find: impl Fn(i64) -> Option<(usize, i64)>, group: &Group) -> Result<Self> {
        let ranks = group.size();
        let mut sizes = vec![vec![0; ranks]; ranks];
        let mut give = vec![Vec::new(); ranks];
        let mut mine = Vec::new();
        for (target, rows) in wanted.iter().enumerate() {
            for &row in rows {
                let Some((source, place)) = find(row) else { continue };
                if source == group.rank() {
                    give[target].push(place);
                }
                if target == group.rank() {
                    mine.push((source, sizes[source][target]));
                }
                sizes[source][target] += 1;
            }
        }
        let mut first = vec![0; ranks];
        for source in 1..ranks {
            first[source] = first[source - 1] + sizes[source - 1][group.rank()];
        }
        let order: Vec<i64> = mine.into_iter().map(|(source, place)| first[source] + place).collect();
        let list = |places: &[i64]| named("rows", &[], Tensor::f_from_slice(places));
        let give = give.iter().map(|places| list(places)).collect::<Result<_>>()?;
        Ok(Self { give, sizes, order: list(&order)? })
    }

    fn bring(&self, op: &'static str, rows: &Tensor, dim: i64, group: &Group) -> Result<Tensor> {
        let on_device = |index: &Tensor| index.f_to_device(rows.device());
        let ready = || -> Result<(Vec<Tensor>, Tensor), TchError> {
            Ok((self.give.iter().map(on_device).collect::<Result<_, _>>()?, on_device(&self.order)?))
        };
        let (give, order) = named(op, &[rows], ready())?;
        let came = indexed_all_to_all_v(rows, &give, &self.sizes, true, dim, group)?;
        named(op, &[&came], came.f_index_select(dim, &order))
    }
}
