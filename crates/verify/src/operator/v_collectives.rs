//! The v-collectives. Their cases name what each rank holds, and run on as many ranks as they say.

use anyhow::{Context, Result};
use isobar_collectives::{all_gather_v, gather_v, indexed_all_to_all_v, scatter_v};
use tch::Tensor;

use super::{Entry, Forward, LocalTensor, Operator, Part, Rank, bytes};
use crate::case::{Case, Header};
use crate::layout::{Layout, Placement, Sizes};
use crate::mesh::Mesh;

struct VCollective {
    name: &'static str,
    /// True if all ranks get the same result.
    identical: bool,
    /// Tensor of which each rank has a part.
    split: &'static str,
    run: fn(&Tensor, &Rank, &Case) -> Result<Tensor>,
    /// Returns the bytes of the gradients of what a rank with that input sends.
    sent: fn(&Tensor, usize, &Case) -> Result<u64>,
}

inventory::submit! { Entry(&VCollective {
    name: "all_gather_v",
    identical: true,
    split: "input",
    run: |input, rank, case| {
        let sizes: Vec<i64> = case.header.attr("sizes")?;
        Ok(all_gather_v(input, Some(&sizes), case.header.attr("dim")?, true, &rank.world)?)
    },
    sent: |input, _, case| Ok((case.header.number("world")? as u64 - 1) * bytes(input)),
}) }

inventory::submit! { Entry(&VCollective {
    name: "gather_v",
    identical: false,
    split: "input",
    run: |input, rank, case| {
        let sizes: Vec<i64> = case.header.attr("sizes")?;
        Ok(gather_v(input, Some(&sizes), case.header.attr("dim")?, case.header.number("dst")?, &rank.world)?)
    },
    sent: |input, _, _| Ok(bytes(input)),
}) }

inventory::submit! { Entry(&VCollective {
    name: "scatter_v",
    identical: false,
    split: "output",
    run: |input, rank, case| {
        let sizes: Vec<i64> = case.header.attr("sizes")?;
        Ok(scatter_v(input, Some(&sizes), case.header.attr("dim")?, case.header.number("src")?, &rank.world)?)
    },
    sent: |input, _, _| Ok(bytes(input)),
}) }

inventory::submit! { Entry(&VCollective {
    name: "indexed_all_to_all_v",
    identical: false,
    split: "input",
    run: |input, rank, case| {
        let sizes: Vec<Vec<i64>> = case.header.attr("sizes")?;
        let to = |peer| Ok(case.tensor(&format!("indices.{}.{peer}", rank.number()))?.shallow_clone());
        let indices: Vec<Tensor> = (0..rank.world.size()).map(to).collect::<Result<_>>()?;
        Ok(indexed_all_to_all_v(input, &indices, &sizes, true, case.header.attr("dim")?, &rank.world)?)
    },
    sent: |input, rank, case| {
        let sizes: Vec<Vec<u64>> = case.header.attr("sizes")?;
        let row = input.f_select(case.header.attr("dim")?, 0).ok().map_or(0, |row| bytes(&row));
        Ok(sizes.get(rank).context("`attrs.sizes` has no row for each rank")?.iter().sum::<u64>() * row)
    },
}) }

impl Operator for VCollective {
    fn name(&self) -> &'static str {
        self.name
    }

    fn meshes(&self, header: &Header, _asked: &[Mesh]) -> Result<Vec<Mesh>> {
        Ok(vec![Mesh::line(header.number("world")?)])
    }

    fn layouts(&self, header: &Header, mesh: &Mesh) -> Result<Vec<Layout>> {
        // A dim may count from the last, where the header alone does not tell which it is.
        let dim: i64 = header.attr("dim")?;
        let placed = |dim| (self.split.to_owned(), vec![Placement::Shard(dim)]);
        let placements = usize::try_from(dim).ok().map(placed).into_iter().collect();
        Ok(vec![Layout { sizes: Sizes::Given, placements, ..Layout::replicated(mesh) }])
    }

    fn forward(&self, rank: &Rank, case: &Case, _layout: &Layout) -> Result<Forward> {
        let name = format!("input.{}", rank.number());
        // Alike on all ranks, since backward is theirs together; dtypes without gradients have none in the case.
        let with_gradients = case.results().iter().any(|result| result.starts_with("grad.input."));
        let input =
            case.tensor(&name)?.f_contiguous()?.f_detach_copy()?.f_set_requires_grad(with_gradients)?;
        let output = (self.run)(&input, rank, case)?;
        let input = LocalTensor { name, tensor: input, part: Part::Own { identical: false } };
        let name = format!("output.{}", rank.number());
        let there = case.get(&name).is_some();
        let part = if there { Part::Own { identical: self.identical } } else { Part::Nothing };
        Ok(Forward::Ran { outputs: vec![LocalTensor { name, tensor: output, part }], leaves: vec![input] })
    }

    /// Forward, what the rank has in the end and does not have from the start; backward, the gradients of what it sent.
    fn budget(&self, case: &Case, _layout: &Layout, rank: &Rank) -> Result<u64> {
        let rank = rank.number();
        let input = case.tensor(&format!("input.{rank}"))?;
        let output = case.get(&format!("output.{rank}")).map_or(0, bytes);
        Ok(output + (self.sent)(input, rank, case)?)
    }
}
