//! The ways of few queries and of traffic; times.

use isobar_shard::{AttentionOptions, AttentionStrategy, Placement, ShardTensor};
use isobar_torch::autograd::BackwardOptions;
use rstest::rstest;
use tch::Kind;

use crate::case::Case;
use crate::common::{SPLITS, Split, difference, leaf, numbers, on_mesh, placements};

#[test]
fn few_queries_stay_on_every_rank() {
    on_mesh(&[3], |mesh| {
        let case = Case::new(&[1, 2, 2, 4], &[1, 2, 60, 4], 4);
        let want = case.dense(None, false, false);
        for placed in [Placement::Replicate, Placement::Shard(2)] {
            for split in SPLITS {
                let layout = |which: usize, placed| split.layout(mesh, &[placed], &case.inputs[which].size());
                let keys = Placement::Shard(2);
                let group = mesh.group("a").unwrap();
                let layouts = [layout(0, placed), layout(1, keys), layout(2, keys)];
                case.check(layouts.each_ref(), &AttentionOptions::default(), &want);
                for shape in [&[2, 2, 60][..], &[60], &[2, 1]] {
                    let added = numbers(shape, 8).set_requires_grad(true);
                    let want = case.dense(Some(&added), false, false);
                    for placed in placements(shape.len(), 1) {
                        let mask = leaf(&added.detach(), &split.layout(mesh, &placed, shape));
                        let options = AttentionOptions { attn_mask: Some(&mask), ..Default::default() };
                        case.check(layouts.each_ref(), &options, &want);
                        let x: Vec<ShardTensor> = case
                            .inputs
                            .iter()
                            .zip(&layouts)
                            .map(|(whole, layout)| leaf(whole, layout))
                            .collect();
                        let y =
                            ShardTensor::scaled_dot_product_attention(&x[0], &x[1], &x[2], &options).unwrap();
                        let g = ShardTensor::distribute_as(&case.cotangent, y.layout()).unwrap();
                        y.backward_from(Some(&g), BackwardOptions::default()).unwrap();
                        let got = mask.grad().unwrap().full_tensor(None).unwrap();
                        assert!(difference(&got, &added.grad()) < 1e-9, "{shape:?} as {placed:?}");
                    }
                }
                let x: Vec<ShardTensor> =
                    case.inputs.iter().zip(&layouts).map(|(whole, layout)| leaf(whole, layout)).collect();
                let before = group.traffic().received;
                ShardTensor::scaled_dot_product_attention(&x[0], &x[1], &x[2], &AttentionOptions::default())
                    .unwrap();
                // Much less than the keys and values of 2 · 2 · 60 · 4 numbers.
                assert!(group.traffic().received - before < 2 * 60 * 4 * 8);
            }
        }
    });
}

/// A rank receives the keys and values once, and in backward their gradients once more.
#[rstest]
fn traffic(#[values(2, 3, 4)] ranks: i64, #[values(false, true)] causal: bool) {
    on_mesh(&[ranks], move |mesh| {
        let shape = [1, 2, 24, 4];
        let layout = Split::Balanced.layout(mesh, &[Placement::Shard(2)], &shape);
        let x: Vec<ShardTensor> = (0..3).map(|seed| leaf(&numbers(&shape, seed), &layout)).collect();
        let options = AttentionOptions {
            strategy: AttentionStrategy::Ring,
            is_causal: causal,
            balance: Some(causal),
            ..Default::default()
        };
        let group = mesh.group("a").unwrap();
        let both = 2 * 8 * shape.iter().product::<i64>() as u64;
        let start = group.traffic().received;
        let y = ShardTensor::scaled_dot_product_attention(&x[0], &x[1], &x[2], &options).unwrap();
        let forward = group.traffic().received - start;
        assert!(forward <= both, "{forward} > {both}");
        let g = ShardTensor::distribute_as(&numbers(&shape, 7), y.layout()).unwrap();
        let start = group.traffic().received;
        y.backward_from(Some(&g), BackwardOptions::default()).unwrap();
        let backward = group.traffic().received - start;
        assert!(backward <= 2 * both, "{backward} > {}", 2 * both);
    });
}

/// Seconds that this thread has been on a processor, which other programs do not lengthen as they do time by the clock.
fn busy() -> f64 {
    let told = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    told.split(' ').next().unwrap().parse::<f64>().unwrap() * 1e-9
}

/// Times of one step, forward and backward, on one rank and on two; run by hand with `--ignored --nocapture`.
#[rstest]
#[ignore = "measures; the machine must be idle"]
fn speed(#[values(4096, 16384)] length: i64, #[values(false, true)] causal: bool) {
    let time = |ranks: i64| {
        let times = on_mesh(&[ranks], move |mesh| {
            tch::set_num_threads(1);
            let shape = [1, 8, length, 64];
            let layout = Split::Chunk.layout(mesh, &[Placement::Shard(2)], &shape);
            let x: Vec<ShardTensor> =
                (0..3).map(|seed| leaf(&numbers(&shape, seed).to_kind(Kind::Float), &layout)).collect();
            let options = AttentionOptions { is_causal: causal, ..Default::default() };
            let step = || {
                let (start, used) = (std::time::Instant::now(), busy());
                let y = ShardTensor::scaled_dot_product_attention(&x[0], &x[1], &x[2], &options).unwrap();
                y.backward_from(Some(&x[0].detach()), BackwardOptions::default()).unwrap();
                [start.elapsed().as_secs_f64(), busy() - used]
            };
            step();
            let steps = (0..if length > 5000 { 1 } else { 5 }).map(|_| step());
            steps.fold([f64::MAX; 2], |best, now| [best[0].min(now[0]), best[1].min(now[1])])
        });
        times
            .into_iter()
            .fold([0.0; 2], |worst, rank| [f64::max(worst[0], rank[0]), f64::max(worst[1], rank[1])])
    };
    let (one, two) = (time(1), time(2));
    let say = |what: &str, index: usize| {
        let (one, two) = (one[index], two[index]);
        format!("{one:.3} s and on two ranks {two:.3} s {what}, ratio {:.3}", two / one)
    };
    eprintln!("{length}, causal {causal}: {}; {}", say("by the clock", 0), say("busy", 1));
}
