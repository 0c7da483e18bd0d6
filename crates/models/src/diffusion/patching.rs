//! Patches of a grid: random ones for training, overlapping ones for sampling.

use isobar_array::kernel::named;
use isobar_array::{Array, Generator, Unary, Window};
use tch::{Device, Kind, Tensor};

use crate::error::{Checker, Error, Result};
use crate::layers::constant;

/// Most random patches of a sample in a step.
const MOST_PATCHES: usize = 1 << 16;

const NAME: &str = "patches";

/// Patches of a two-dimensional grid, all of one shape. Diffusion on patches trains a denoiser on random patches, and samples
/// with overlapping patches that cover the grid (Mardani et al., *Residual Corrective Diffusion Modeling for Km-scale Atmospheric
/// Downscaling*, CorrDiff, arXiv:2309.15214; PhysicsNeMo's `RandomPatching2D` and `GridPatching2D`).
///
/// ```text
/// xₚ(i, j) = x(ρ_H(rₚ + i), ρ_W(cₚ + j)),   0 ≤ i < h, 0 ≤ j < w           ρ reflects places outside the grid at its edges
/// y(r, c)  = mean of yₚ(r − rₚ, c − cₚ) over the patches p that cover (r, c)   (fuse)
/// ```
///
/// Patches are samples of a batch, all patches of a sample together, as [`SongUNetPosEmbd`](crate::SongUNetPosEmbd) takes them
/// with [`global_index`](Self::global_index). PhysicsNeMo stacks all samples of a patch together.
///
/// A patch of a sharded field is sharded over the same ranks as the field. Each rank receives the rows and columns of its shard
/// of the patch, never the full field.
///
/// ```
/// use isobar_models::Patching;
/// use tch::{Device, Kind, Tensor};
///
/// let x = Tensor::rand([2, 3, 16, 12], (Kind::Double, Device::Cpu));
/// let patching = Patching::covering([16, 12], [8, 8], 2, 0)?;
/// let patches = patching.apply(&x)?;
/// assert_eq!(patches.size(), [2 * 6, 3, 8, 8]);
/// assert_eq!(patching.global_index(&patches)?.size(), [6, 2, 8, 8]);
/// let fused = patching.fuse(&patching.separate(&patches)?, &x)?;
/// assert!((fused - x).abs().max().double_value(&[]) < 1e-15);
/// # Ok::<(), isobar_models::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Patching {
    grid: [i64; 2],
    patch: [i64; 2],
    corners: Vec<[i64; 2]>,
}

impl Patching {
    /// Makes patches of `patch` points, `[height, width]`, with these first rows and columns, inside a grid.
    ///
    /// # Errors
    ///
    /// No patch, a patch without points, or one that is not inside the grid.
    pub fn at(grid: [i64; 2], patch: [i64; 2], corners: &[[i64; 2]]) -> Result<Self> {
        check_shape(grid, patch)?;
        Checker(NAME).extent("the number of patches", corners.len())?;
        let inside =
            |corner: &[i64; 2]| (0..2).all(|dim| (0..=grid[dim] - patch[dim]).contains(&corner[dim]));
        if let Some(corner) = corners.iter().find(|corner| !inside(corner)) {
            let reason = format!(
                "a patch of {patch:?} points begins at {corner:?}, expected inside a grid of {grid:?}"
            );
            return Err(Checker(NAME).error(reason));
        }
        Ok(Self { grid, patch, corners: corners.to_vec() })
    }

    /// Draws `count` patches of `patch` points, `[height, width]`, uniformly inside a grid: first all rows, then all columns, one
    /// draw each. All ranks call, with generators of equal state, and get the same patches.
    ///
    /// # Errors
    ///
    /// No patch, a patch without points, or one that is larger than the grid.
    pub fn random(grid: [i64; 2], patch: [i64; 2], count: usize, generator: &Generator) -> Result<Self> {
        Self::check_random(grid, patch, count)?;
        let drawn = |dim: usize| -> Result<Vec<i64>> {
            let window = Window::whole(&[count as i64]);
            let starts = generator.randint(&window, 0, grid[dim] - patch[dim] + 1, Device::Cpu)?;
            Ok(named(NAME, &[], Vec::<i64>::try_from(&starts))?)
        };
        let (rows, columns) = (drawn(0)?, drawn(1)?);
        let corners = rows.into_iter().zip(columns).map(|(row, column)| [row, column]).collect();
        Ok(Self { grid, patch, corners })
    }

    /// Checks the arguments of [`random`](Self::random), without drawing.
    ///
    /// # Errors
    ///
    /// A patch that is empty or larger than the grid; no patches, or more than 65,536.
    pub fn check_random(grid: [i64; 2], patch: [i64; 2], count: usize) -> Result<()> {
        check_shape(grid, patch)?;
        let expected = || format!("patch_num is {count}, expected 1 to {MOST_PATCHES}");
        Checker(NAME).ensure((1..=MOST_PATCHES).contains(&count), expected)
    }

    /// Returns patches that cover a grid. Along each dim, the first patch begins `boundary_pix` points before the grid, and each
    /// further one begins `patch − overlap_pix − boundary_pix` points after the one before. Points of patches outside the grid
    /// are its reflection, and [`fuse`](Self::fuse) drops them. The patches are ordered column by column.
    ///
    /// # Errors
    ///
    /// A patch that is larger than the grid, or no larger than `overlap_pix` + 2 `boundary_pix`.
    pub fn covering(
        grid: [i64; 2],
        patch: [i64; 2],
        overlap_pix: usize,
        boundary_pix: usize,
    ) -> Result<Self> {
        check_shape(grid, patch)?;
        let check = Checker(NAME);
        let top = i64::from(i32::MAX) as usize;
        check.ensure(overlap_pix <= top && boundary_pix <= top, || {
            format!("overlap_pix is {overlap_pix} and boundary_pix {boundary_pix}, expected at most {top}")
        })?;
        let (overlap, boundary) = (overlap_pix as i64, boundary_pix as i64);
        let mut starts = [Vec::new(), Vec::new()];
        for dim in 0..2 {
            let (extent, size) = (grid[dim], patch[dim]);
            check.ensure(size > overlap + 2 * boundary, || {
                format!(
                    "patch_shape[{dim}] is {size}, expected more than overlap_pix + 2 boundary_pix = {}",
                    overlap + 2 * boundary
                )
            })?;
            let stride = size - overlap - boundary;
            let count = (extent + stride - 1) / stride;
            // Patches reach beyond the grid by fewer points than it has, so that each of these points has a reflection.
            starts[dim] = (0..count).map(|number| number * stride - boundary).collect();
        }
        let [rows, columns] = starts;
        let corners = columns.iter().flat_map(|&column| rows.iter().map(move |&row| [row, column])).collect();
        Ok(Self { grid, patch, corners })
    }

    /// Returns the first row and column of each patch.
    pub fn corners(&self) -> &[[i64; 2]] {
        &self.corners
    }

    /// Divides the patches into groups of at most `count`, in their order.
    pub fn groups(&self, count: usize) -> Vec<Self> {
        let group = |corners: &[[i64; 2]]| Self { corners: corners.to_vec(), ..self.clone() };
        self.corners.chunks(count.max(1)).map(group).collect()
    }

    /// Cuts the patches out of fields `[sample, channel, height, width]`: `[sample · patch, channel, h, w]`. All ranks call.
    ///
    /// # Errors
    ///
    /// Fields on another grid; an exchange fails.
    pub fn apply<A: Array>(&self, fields: &A) -> Result<A> {
        self.check_fields(fields)?;
        // Dims that are not sharded come first, so that less data is exchanged along sharded dims.
        let mut dims = [1, 0];
        dims.sort_by_key(|&dim| fields.num_shards(&[dim + 2]));
        let cut = |corner: &[i64; 2]| -> Result<A> {
            let mut part = fields.shallow_clone();
            for dim in dims {
                let places = self.index(&part, corner[dim], dim)?;
                part = part.index_select(dim as i64 + 2, &places)?;
            }
            Ok(part.unsqueeze(1)?)
        };
        let parts: Vec<A> = self.corners.iter().map(cut).collect::<Result<_>>()?;
        joined(&A::cat(&parts.iter().collect::<Vec<_>>(), 1)?)
    }

    /// Repeats arrays of samples, `[sample, …]`, for each patch: `[sample · patch, …]`.
    ///
    /// # Errors
    ///
    /// An array without dims.
    pub fn repeat<A: Array>(&self, samples: &A) -> Result<A> {
        let mut shape = samples.shape();
        let dims = shape.len().min(1);
        shape.insert(dims, self.corners.len() as i64);
        joined(&samples.unsqueeze(1)?.expand(&shape)?)
    }

    /// Returns the row and column on the grid of each point of each patch, `[patch, 2, h, w]` (`Int64`), sharded as `patches`,
    /// the result of [`apply`](Self::apply). Does not communicate.
    ///
    /// # Errors
    ///
    /// Arrays of other shapes.
    pub fn global_index<A: Array>(&self, patches: &A) -> Result<A> {
        self.check_patches(patches)?;
        // Only the layout is read, not the values. Numbers of rows and columns are exact in double precision.
        let like = patches.detach()?.narrow(1, 0, 1)?.to_kind(Kind::Double)?;
        let line = |dim: usize| -> Result<A> {
            let last = (self.patch[dim] - 1) as f64;
            Ok(like.linspace_along(dim as i64 + 2, 0.0, last)?.reshape(&along(dim))?)
        };
        let lines = [line(0)?, line(1)?];
        let zeros = lines[0].mul_scalar(0.0)?.add(&lines[1].mul_scalar(0.0)?)?;
        let place = |corner: &[i64; 2], dim: usize| -> Result<A> {
            let last = (self.grid[dim] - 1) as f64;
            // |r| reflects at the first point, and n − 1 − |n − 1 − r| at the last one.
            let reflected = lines[dim].add_scalar(corner[dim] as f64)?.unary(Unary::Abs)?;
            let reflected = reflected.add_scalar(-last)?.unary(Unary::Abs)?.mul_scalar(-1.0)?;
            Ok(zeros.add(&reflected.add_scalar(last)?)?)
        };
        let of_patch =
            |corner: &[i64; 2]| -> Result<A> { Ok(A::cat(&[&place(corner, 0)?, &place(corner, 1)?], 1)?) };
        let each: Vec<A> = self.corners.iter().map(of_patch).collect::<Result<_>>()?;
        Ok(A::cat(&each.iter().collect::<Vec<_>>(), 0)?.to_kind(Kind::Int64)?)
    }

    /// Separates `[sample · patch, channel, h, w]` into the patches: one `[sample, channel, h, w]` for each.
    ///
    /// # Errors
    ///
    /// Arrays of other shapes.
    pub fn separate<A: Array>(&self, patches: &A) -> Result<Vec<A>> {
        self.check_patches(patches)?;
        let (shape, count) = (patches.shape(), self.corners.len() as i64);
        let apart = patches.reshape(&[shape[0] / count, count, shape[1], shape[2], shape[3]])?;
        (0..count).map(|number| Ok(apart.select(1, number)?)).collect()
    }

    /// Joins patches, one `[sample, channel, h, w]` for each corner, to fields with the dtype and layout of `like`
    /// `[sample, channel, height, width]`: their mean at each point. All ranks call.
    ///
    /// # Errors
    ///
    /// Another number of patches, arrays of other shapes, points that no patch covers; an exchange fails.
    pub fn fuse<A: Array>(&self, patches: &[A], like: &A) -> Result<A> {
        self.check_fields(like)?;
        let check = Checker(NAME);
        check.ensure(patches.len() == self.corners.len(), || {
            format!("{} patches to fuse, expected {}", patches.len(), self.corners.len())
        })?;
        let shape = like.shape();
        let want = [shape[0], shape[1], self.patch[0], self.patch[1]];
        let cover = [self.cover(0), self.cover(1)];
        check.ensure(cover.iter().flatten().all(|&count| count > 0.0) && self.is_product(), || {
            "the patches do not cover the grid row by row; make them with `Patching::covering`".to_owned()
        })?;
        let mut sum = like.detach()?.mul_scalar(0.0)?;
        // Zeros over the rows of a patch, in the layout of its rows.
        let rows = self.index(&sum, 0, 0)?;
        let strip = sum.index_select(2, &rows)?.mul_scalar(0.0)?;
        let mut of_rows: Vec<(i64, A)> = Vec::new();
        for (corner, patch) in self.corners.iter().zip(patches) {
            let got = patch.shape();
            if got != want {
                let want = format!("{want:?} for a patch");
                return Err(Error::Input { model: NAME, got, want });
            }
            let mut patch = patch.to_kind(like.kind())?;
            for (dim, &start) in corner.iter().enumerate() {
                if let Some(outside) = self.outside(start, dim) {
                    let mask = named(NAME, &[], outside.f_view(along(dim)))?;
                    patch = patch.masked_fill(&patch.constant(&mask)?, 0.0)?;
                }
            }
            let columns = self.index(&patch, corner[1], 1)?;
            let at = of_rows.iter().position(|(row, _)| *row == corner[0]);
            let so_far = at.map_or(&strip, |at| &of_rows[at].1);
            let added = so_far.index_add(3, &columns, &patch)?;
            match at {
                Some(at) => of_rows[at].1 = added,
                None => of_rows.push((corner[0], added)),
            }
        }
        for (row, strip) in &of_rows {
            sum = sum.index_add(2, &self.index(&sum, *row, 0)?, strip)?;
        }
        for (dim, cover) in cover.iter().enumerate() {
            sum = sum.div(&constant(cover, &along(dim), like)?)?;
        }
        Ok(sum.redistribute_like(like)?)
    }

    /// Returns the positions of a patch's points along a dim; those outside the grid are reflected.
    fn places(&self, start: i64, dim: usize) -> Vec<i64> {
        let last = self.grid[dim] - 1;
        (start..start + self.patch[dim]).map(|place| last - (last - place.abs()).abs()).collect()
    }

    fn index<A: Array>(&self, like: &A, start: i64, dim: usize) -> Result<A> {
        let places = named(NAME, &[], Tensor::f_from_slice(&self.places(start, dim)))?;
        Ok(like.constant(&places)?)
    }

    /// Returns a mask that is true at the points of a patch outside the grid along a dim; `None` if there are none.
    fn outside(&self, start: i64, dim: usize) -> Option<Tensor> {
        let outside = |place: i64| !(0..self.grid[dim]).contains(&place);
        let points: Vec<bool> = (start..start + self.patch[dim]).map(outside).collect();
        points.contains(&true).then(|| Tensor::from_slice(&points))
    }

    /// Returns the distinct first rows, or columns, of the patches.
    fn starts(&self, dim: usize) -> Vec<i64> {
        let mut starts: Vec<i64> = self.corners.iter().map(|corner| corner[dim]).collect();
        starts.sort_unstable();
        starts.dedup();
        starts
    }

    /// Number of patches over each row, or column, of the grid.
    fn cover(&self, dim: usize) -> Vec<f64> {
        let mut cover = vec![0.0; self.grid[dim].max(0) as usize];
        for start in self.starts(dim) {
            let end = (start + self.patch[dim]).min(self.grid[dim]);
            for place in start.max(0)..end {
                cover[place as usize] += 1.0;
            }
        }
        cover
    }

    /// True if each row of patches has the same columns, and none twice.
    fn is_product(&self) -> bool {
        let mut corners = self.corners.clone();
        corners.sort_unstable();
        corners.dedup();
        let count = self.corners.len();
        corners.len() == count && self.starts(0).len() * self.starts(1).len() == count
    }

    fn check_fields<A: Array>(&self, fields: &A) -> Result<()> {
        let got = fields.shape();
        match got.len() == 4 && got[2..] == self.grid {
            true => Ok(()),
            false => {
                let want = format!("[sample, channel, {}, {}]", self.grid[0], self.grid[1]);
                Err(Error::Input { model: NAME, got, want })
            }
        }
    }

    fn check_patches<A: Array>(&self, patches: &A) -> Result<()> {
        let (got, count) = (patches.shape(), self.corners.len() as i64);
        match got.len() == 4 && got[2..] == self.patch && got[0] % count == 0 {
            true => Ok(()),
            false => {
                let want = format!("[sample · {count}, channel, {}, {}]", self.patch[0], self.patch[1]);
                Err(Error::Input { model: NAME, got, want })
            }
        }
    }
}

fn check_shape(grid: [i64; 2], patch: [i64; 2]) -> Result<()> {
    Checker(NAME).ensure(patch.iter().all(|&extent| extent >= 1), || {
        format!("patch_shape is {patch:?}, expected 1 row and 1 column at least")
    })?;
    Checker(NAME).ensure((0..2).all(|dim| (1..=grid[dim]).contains(&patch[dim])), || {
        format!(
            "patch_shape is {patch:?}, expected 1 to {} rows and 1 to {} columns, those of the grid",
            grid[0], grid[1]
        )
    })
}

/// Joins the first two dims.
fn joined<A: Array>(x: &A) -> Result<A> {
    let shape = x.shape();
    Ok(x.reshape(&[&[shape[0] * shape[1]], &shape[2..]].concat())?)
}

/// Returns the shape in which values along the height or the width broadcast to `[sample, channel, height, width]`.
fn along(dim: usize) -> [i64; 4] {
    if dim == 0 { [1, 1, -1, 1] } else { [1, 1, 1, -1] }
}
