//! all_reduce, reduce, broadcast and fused_all_reduce against the combination in rank order, to the bit.

use std::collections::BTreeMap;

use isobar_collectives::{
    Error, ReduceOp, all_reduce, all_to_all_v, broadcast, fused_all_reduce, reduce, reduce_scatter_v,
    scatter_to_parallel_region, start,
};
use tch::{Device, Kind, Tensor};

use super::data::{KINDS, MEMORIES, Memory, is_channels_last, laid_out};
use super::{Case, Suite};

pub(crate) const CASES: &[Case] = &[
    ("channels-last is kept", channels_last),
    ("all_reduce", all_reduces),
    ("reduce", reduces),
    ("broadcast", broadcasts),
    ("fused_all_reduce", fused),
    ("fused_all_reduce of integers", fused_exact),
];

const OPS: [ReduceOp; 5] = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product];

/// Returns whether values of `kind` have the reduction.
pub(crate) fn reducible(op: ReduceOp, kind: Kind) -> bool {
    let complex = matches!(kind, Kind::ComplexFloat | Kind::ComplexDouble);
    let float = complex || matches!(kind, Kind::Half | Kind::BFloat16 | Kind::Float | Kind::Double);
    match op {
        ReduceOp::Sum => kind != Kind::Bool,
        ReduceOp::Avg => float,
        ReduceOp::Min | ReduceOp::Max => !complex,
        ReduceOp::Product => true,
    }
}

/// The combination in rank order, 16-bit floats in fp32 where asked for.
pub(crate) fn combined(parts: &[Tensor], op: ReduceOp, use_fp32: bool) -> Tensor {
    let kind = parts[0].kind();
    let wide = match kind {
        Kind::Half | Kind::BFloat16 if use_fp32 => Kind::Float,
        kind => kind,
    };
    let mut parts_wide = parts.iter().map(|part| part.to_kind(wide).resolve_conj());
    let first = parts_wide.next().unwrap_or_default();
    let sum = parts_wide.fold(first, |sum, part| match op {
        ReduceOp::Sum | ReduceOp::Avg => sum + part,
        ReduceOp::Min => sum.minimum(&part),
        ReduceOp::Max => sum.maximum(&part),
        ReduceOp::Product if kind == Kind::Bool => sum.logical_and(&part),
        ReduceOp::Product => sum * part,
    });
    let sum = if op == ReduceOp::Avg { sum / parts.len() as f64 } else { sum };
    sum.to_kind(kind)
}

/// Shapes and memories: on both sides of the limit between one step and two.
fn forms() -> Vec<(Vec<i64>, Memory)> {
    let mut forms: Vec<(Vec<i64>, Memory)> = MEMORIES.map(|memory| (vec![2, 3, 4, 5], memory)).into();
    for shape in [vec![], vec![1], vec![0, 3], vec![20_011], vec![3, 2, 41, 83]] {
        forms.push((shape, Memory::Contiguous));
    }
    for memory in [Memory::Transposed, Memory::ChannelsLast, Memory::Expanded, Memory::Conjugated] {
        forms.push((vec![3, 2, 41, 83], memory));
    }
    forms
}

fn all_reduces(suite: &mut Suite<'_>) -> Result<(), Error> {
    for kind in KINDS {
        for (n, (shape, memory)) in forms().into_iter().enumerate() {
            for (m, op) in OPS.into_iter().enumerate() {
                // Every form with some reductions, every reduction with small and large tensors.
                if !reducible(op, kind) || ((n + m) % 3 != 0 && n != 0 && n != 10) {
                    continue;
                }
                let inputs = inputs(suite, &shape, kind, memory);
                let own = &inputs[suite.rank()];
                let what = format!("{op:?} of {kind:?} {shape:?} {memory:?}");
                let got = suite.unchanged(&[own], |s| all_reduce(own, op, s.group))?;
                suite.same_reduction(&what, op, &got, &combined(&inputs, op, true));
                suite.check(!is_channels_last(own) || is_channels_last(&got), || {
                    format!("{what}: channels-last was lost")
                });
                if n == 10 {
                    suite.same_everywhere(&what, &got)?;
                }
            }
        }
    }
    Ok(())
}

fn reduces(suite: &mut Suite<'_>) -> Result<(), Error> {
    for (k, kind) in KINDS.into_iter().enumerate() {
        for (n, (shape, memory)) in forms().into_iter().enumerate() {
            let op = OPS[(n + k) % 5];
            if !reducible(op, kind) {
                continue;
            }
            let dst = (n + k) % suite.ranks();
            let inputs = inputs(suite, &shape, kind, memory);
            let own = &inputs[suite.rank()];
            let what = format!("{op:?} of {kind:?} {shape:?} {memory:?} at {dst}");
            let got = suite.unchanged(&[own], |s| reduce(own, op, dst, s.group))?;
            match suite.rank() == dst {
                true => {
                    suite.same_reduction(&what, op, &got, &combined(&inputs, op, true));
                    suite.check(!is_channels_last(own) || is_channels_last(&got), || {
                        format!("{what}: channels-last was lost")
                    });
                }
                false => suite.same(&what, &got, &Tensor::zeros([0], (kind, Device::Cpu))),
            }
        }
    }
    Ok(())
}

fn channels_last(suite: &mut Suite<'_>) -> Result<(), Error> {
    let ranks = suite.ranks() as i64;
    let id = suite.fresh();
    let own = suite.data(id, suite.rank(), &[2 * ranks, 3 * ranks, 4 * ranks, 5], Kind::Float);
    let own = laid_out(&own, Memory::ChannelsLast);
    for dim in 0..3 {
        let results = [
            ("reduce_scatter_v", reduce_scatter_v(&own, None, dim, ReduceOp::Sum, true, suite.group)?),
            ("all_to_all_v", all_to_all_v(&own, None, None, dim, suite.group)?),
            ("scatter_to_parallel_region", scatter_to_parallel_region(&own, dim, None, suite.group)?),
            ("fused_all_reduce", fused_all_reduce(&own, ReduceOp::Sum, None, suite.group)?),
        ];
        for (what, result) in results {
            suite.check(is_channels_last(&result), || format!("{what} along {dim}: channels-last was lost"));
        }
    }
    Ok(())
}

fn broadcasts(suite: &mut Suite<'_>) -> Result<(), Error> {
    for (k, kind) in KINDS.into_iter().enumerate() {
        for (n, (shape, memory)) in forms().into_iter().enumerate() {
            let root = (n + k) % suite.ranks();
            let inputs = inputs(suite, &shape, kind, memory);
            let own = &inputs[suite.rank()];
            let what = format!("{kind:?} {shape:?} {memory:?} from {root}");
            let mut got = suite.unchanged(&[own], |s| broadcast(own, root, s.group))?;
            suite.same(&what, &got, &inputs[root]);
            suite.check(!is_channels_last(own) || is_channels_last(&got), || {
                format!("{what}: channels-last was lost")
            });
            if suite.ranks() > 1 && memory != Memory::Expanded {
                // Changing the result does not change the input, on the root either.
                suite.unchanged(&[own], |_| {
                    let _: () = drop(got.fill_(1));
                    Ok(())
                })?;
            }
        }
    }
    Ok(())
}

fn fused(suite: &mut Suite<'_>) -> Result<(), Error> {
    type Nested = BTreeMap<String, Vec<Option<Tensor>>>;
    let shapes: [(&[i64], Kind); 5] = [
        (&[3, 4], Kind::Float),
        (&[], Kind::Double),
        (&[0, 2], Kind::Half),
        (&[5], Kind::BFloat16),
        (&[2, 3, 4, 5], Kind::Float),
    ];
    let ranks = suite.ranks();
    let id = suite.fresh();
    let structure = |suite: &Suite<'_>, rank: usize| -> Nested {
        let tensors: Vec<Option<Tensor>> =
            shapes.iter().map(|(shape, kind)| Some(suite.data(id, rank, shape, *kind))).collect();
        [("b".into(), tensors), ("a".into(), vec![None, Some(suite.data(id + 1, rank, &[7], Kind::Float))])]
            .into()
    };
    let all: Vec<Nested> = (0..ranks).map(|rank| structure(suite, rank)).collect();
    for (op, buffer) in [(ReduceOp::Sum, None), (ReduceOp::Avg, None), (ReduceOp::Max, Some(Kind::Float))] {
        let own = &all[suite.rank()];
        let inputs: Vec<&Tensor> = own.values().flatten().flatten().collect();
        let got = suite.unchanged(&inputs, |s| fused_all_reduce(own, op, buffer, s.group))?;
        suite.check(got.keys().eq(own.keys()) && got["a"][0].is_none(), || "the structure changed".into());
        for (key, list) in own {
            for (n, leaf) in list.iter().enumerate() {
                let Some(leaf) = leaf else { continue };
                let wide = buffer.unwrap_or(Kind::Double);
                let parts: Vec<Tensor> = all
                    .iter()
                    .filter_map(|one| one[key][n].as_ref())
                    .map(|leaf| leaf.to_kind(wide))
                    .collect();
                let want = combined(&parts, op, true).to_kind(leaf.kind());
                let what = format!("{op:?} of leaf {n} of {key}");
                match &got[key][n] {
                    Some(got) => suite.same(&what, got, &want),
                    None => suite.fail(format!("{what} is missing")),
                }
            }
        }
    }
    let got = start::fused_all_reduce(&Vec::<Tensor>::new(), ReduceOp::Sum, None, suite.group)?.wait()?;
    suite.check(got.is_empty(), || "a result of empty inputs has elements".into());
    let got = start::fused_all_reduce(&all[suite.rank()], ReduceOp::Sum, None, suite.group)?.wait()?;
    let want = fused_all_reduce(&all[suite.rank()], ReduceOp::Sum, None, suite.group)?;
    for (got, want) in got.values().flatten().flatten().zip(want.values().flatten().flatten()) {
        suite.same("asynchronous", got, want);
    }
    Ok(())
}

/// Integers that no float holds stay exact.
fn fused_exact(suite: &mut Suite<'_>) -> Result<(), Error> {
    let ranks = suite.ranks() as i64;
    let rank = suite.rank() as i64;
    let own = vec![
        Tensor::from_slice(&[(1_i64 << 60) / ranks + rank, -1]),
        Tensor::from_slice(&[100_i8]),
        Tensor::from_slice(&[3_u8, 4]),
        Tensor::from_slice(&[true, false]),
    ];
    let got = fused_all_reduce(&own, ReduceOp::Sum, None, suite.group)?;
    let large = (1_i64 << 60) / ranks * ranks + ranks * (ranks - 1) / 2;
    suite.same("large integers", &got[0], &Tensor::from_slice(&[large, -ranks]));
    suite.same("unsigned bytes", &got[2], &Tensor::from_slice(&[(3 * ranks) as u8, (4 * ranks) as u8]));
    let bytes = vec![Tensor::from_slice(&[-100_i8]), Tensor::from_slice(&[200_u8])];
    let got = fused_all_reduce(&bytes, ReduceOp::Min, None, suite.group)?;
    suite.same("a signed byte", &got[0], &bytes[0]);
    suite.same("an unsigned byte", &got[1], &bytes[1]);
    // Asked for a buffer kind, integers may stand among floats.
    let mixed = vec![Tensor::from_slice(&[rank]), Tensor::from_slice(&[0.5_f32])];
    let got = fused_all_reduce(&mixed, ReduceOp::Sum, Some(Kind::Double), suite.group)?;
    suite.same("an integer among floats", &got[0], &Tensor::from_slice(&[ranks * (ranks - 1) / 2]));
    suite.same("a float among integers", &got[1], &Tensor::from_slice(&[0.5 * ranks as f32]));
    Ok(())
}

impl Suite<'_> {
    /// Checks that `got` has the bits of `want`. Products of complex numbers are compared approximately, since vectorised
    /// code rounds them differently.
    pub(crate) fn same_reduction(&mut self, what: &str, op: ReduceOp, got: &Tensor, want: &Tensor) {
        match (op, want.kind()) {
            (ReduceOp::Product, Kind::ComplexFloat) => self.near(what, got, want, 1e-5),
            (ReduceOp::Product, Kind::ComplexDouble) => self.near(what, got, want, 1e-13),
            _ => self.same(what, got, want),
        }
    }
}

fn inputs(suite: &mut Suite<'_>, shape: &[i64], kind: Kind, memory: Memory) -> Vec<Tensor> {
    let id = suite.fresh();
    (0..suite.ranks()).map(|rank| laid_out(&suite.data(id, rank, shape, kind), memory)).collect()
}
