//! Norms against the dense ones, over random shapes and layouts.

use isobar_array::RunningStats;
use isobar_collectives::trace::CommTrace;
use isobar_mesh::DeviceMesh;
use isobar_shard::{Layout, Placement, ShardTensor};
use rstest::rstest;
use tch::Tensor;

use crate::common::{Dice, MESHES, SPLITS, Split, numbers, on_mesh, same};

fn replicated(mesh: &DeviceMesh, shape: &[i64]) -> Layout {
    Split::Chunk.layout(mesh, &vec![Placement::Replicate; mesh.ndim()], shape)
}

#[rstest]
fn norms(#[values(1, 2, 3, 4)] mesh: usize) {
    on_mesh(MESHES[mesh], |mesh| {
        let mut dice = Dice(31);
        for round in 0..60 {
            let shape = [dice.roll(1, 4), 4, dice.roll(2, 7), dice.roll(1, 5)];
            let layout = dice.layout(mesh, &shape, &[0, 1, 2, 3]);
            let x = numbers(&shape, round as i64);
            let (weight, bias) = (numbers(&[4], 1), numbers(&[4], 2));
            let (lw, lb) = (dice.layout(mesh, &[4], &[0]), dice.layout(mesh, &[4], &[0]));
            let all = [(&x, &layout), (&weight, &lw), (&bias, &lb)];
            let groups = *dice.pick(&[1, 2, 4]);
            let what = format!("group_norm of {groups}");
            same(
                &what,
                &all,
                1e-8,
                |t| t[0].group_norm(groups, Some(&t[1]), Some(&t[2]), 1e-5),
                |t| t[0].f_group_norm(groups, Some(&t[1]), Some(&t[2]), 1e-5, false),
            );
            same(
                "instance_norm",
                &all,
                1e-8,
                |t| t[0].instance_norm(Some(&t[1]), Some(&t[2]), 1e-5),
                |t| {
                    t[0].f_instance_norm(
                        Some(&t[1]),
                        Some(&t[2]),
                        None::<&Tensor>,
                        None::<&Tensor>,
                        true,
                        0.1,
                        1e-5,
                        false,
                    )
                },
            );
            same(
                "batch_norm",
                &all,
                1e-8,
                |t| t[0].batch_norm(Some(&t[1]), Some(&t[2]), None, true, 1e-5),
                |t| {
                    t[0].f_batch_norm(
                        Some(&t[1]),
                        Some(&t[2]),
                        None::<&Tensor>,
                        None::<&Tensor>,
                        true,
                        0.1,
                        1e-5,
                        false,
                    )
                },
            );
            let (mean, var) = (numbers(&[4], 3), numbers(&[4], 4).square() + 0.5);
            let statistics =
                [&mean, &var].map(|stat| ShardTensor::distribute_as(stat, &replicated(mesh, &[4])).unwrap());
            same(
                "batch_norm in evaluation",
                &all,
                1e-8,
                |t| {
                    let [mean, var] = &statistics;
                    let running = RunningStats { mean, var, momentum: 0.1 };
                    t[0].batch_norm(Some(&t[1]), Some(&t[2]), Some(running), false, 1e-5)
                },
                |t| {
                    let (mean, var) = (Some(&mean), Some(&var));
                    t[0].f_batch_norm(Some(&t[1]), Some(&t[2]), mean, var, false, 0.1, 1e-5, false)
                },
            );
            let trailing = dice.roll(1, 3) as usize;
            let normalized = shape[4 - trailing..].to_vec();
            let (weight, bias) = (numbers(&normalized, 1), numbers(&normalized, 2));
            let free: Vec<usize> = (0..trailing).collect();
            let (lw, lb) = (dice.layout(mesh, &normalized, &free), dice.layout(mesh, &normalized, &free));
            let all = [(&x, &layout), (&weight, &lw), (&bias, &lb)];
            same(
                "layer_norm",
                &all,
                1e-8,
                |t| t[0].layer_norm(&normalized, Some(&t[1]), Some(&t[2]), 1e-5),
                |t| t[0].f_layer_norm(&normalized, Some(&t[1]), Some(&t[2]), 1e-5, false),
            );
        }
    });
}

/// Norms whose statistics no other rank has a part of: of a tensor split over its batch, with empty shards too.
#[rstest]
fn norms_split_over_the_batch(#[values(0, 1, 2, 3)] mesh: usize, #[values(0, 1, 2, 3)] split: usize) {
    on_mesh(MESHES[mesh], move |mesh| {
        let shape = [5, 4, 3];
        let layout = SPLITS[split].layout(mesh, &[Placement::Shard(0)], &shape);
        let (x, weight, bias) = (numbers(&shape, 1), numbers(&[4], 2), numbers(&[4], 3));
        let vector = replicated(mesh, &[4]);
        let statistics = [numbers(&[4], 4), numbers(&[4], 5).square() + 0.5];
        let [mean, var] = statistics.each_ref().map(|s| ShardTensor::distribute_as(s, &vector).unwrap());
        let all = [(&x, &layout), (&weight, &vector), (&bias, &vector)];
        let check = |what: &str,
                     f: &dyn Fn(&[ShardTensor]) -> isobar_shard::Result<ShardTensor>,
                     g: &dyn Fn(&[Tensor]) -> Result<Tensor, tch::TchError>| {
            let trace = CommTrace::start(&mesh.group("a").unwrap());
            let inputs = all.map(|(whole, layout)| ShardTensor::distribute_as(whole, layout).unwrap());
            let before = trace.received();
            f(&inputs).unwrap();
            assert_eq!(trace.received(), before, "{what} communicates");
            trace.stop();
            same(what, &all, 1e-9, f, g);
        };
        check("group_norm", &|t| t[0].group_norm(2, Some(&t[1]), Some(&t[2]), 1e-5), &|t| {
            t[0].f_group_norm(2, Some(&t[1]), Some(&t[2]), 1e-5, false)
        });
        check("instance_norm", &|t| t[0].instance_norm(Some(&t[1]), Some(&t[2]), 1e-5), &|t| {
            t[0].f_group_norm(4, Some(&t[1]), Some(&t[2]), 1e-5, false)
        });
        check(
            "batch_norm",
            &|t| {
                let running = RunningStats { mean: &mean, var: &var, momentum: 0.1 };
                t[0].batch_norm(Some(&t[1]), Some(&t[2]), Some(running), false, 1e-5)
            },
            &|t| {
                let [mean, var] = statistics.each_ref().map(Some);
                t[0].f_batch_norm(Some(&t[1]), Some(&t[2]), mean, var, false, 0.1, 1e-5, false)
            },
        );
    });
}
