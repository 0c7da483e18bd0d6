//! Distances, nearest neighbours and balls on every layout equal the dense ones: values and gradients.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use crate::common::{MESHES, difference, layouts, leaf, numbers, on_mesh};
use isobar_mesh::DeviceMesh;
use isobar_shard::{Layout, Placement, ShardTensor, Sizes, grad};
use isobar_torch::autograd::BackwardOptions;
use rstest::rstest;
use tch::{Device, Kind, Tensor};

fn numbers_of(tensor: &Tensor) -> Vec<i64> {
    Vec::try_from(tensor.flatten(0, -1)).unwrap()
}

/// Pairs of layouts, thinned on larger meshes.
fn pairs(mesh: &DeviceMesh, a: &[i64], b: &[i64]) -> Vec<(Layout, Layout)> {
    let (first, second) = (layouts(mesh, a), layouts(mesh, b));
    let every = if mesh.ndim() > 1 { 11 } else { 1 };
    let all = first.iter().flat_map(|a| second.iter().map(move |b| (a.clone(), b.clone())));
    all.step_by(every).collect()
}

fn full(x: &ShardTensor) -> Tensor {
    assert_eq!(x.local().size(), x.layout().local_shape());
    x.full_tensor(None).unwrap()
}

#[rstest]
fn cdist(#[values(0, 1, 2, 3, 4)] mesh: usize, #[values(0.0, 1.0, 2.0, 3.5, f64::INFINITY)] p: f64) {
    on_mesh(MESHES[mesh], move |mesh| {
        for (a, b) in [(&[6, 3][..], &[5, 3][..]), (&[2, 3, 2], &[2, 4, 2]), (&[3, 2], &[2, 4, 2])] {
            let mut whole = [numbers(a, 1), numbers(b, 2)];
            // A distance of zero.
            let same = whole[0].view([-1, a[a.len() - 1]]).get(1);
            whole[1].view([-1, b[b.len() - 1]]).get(0).copy_(&same);
            let dense = whole.each_mut().map(|x| x.copy().set_requires_grad(true));
            let want = Tensor::cdist(&dense[0], &dense[1], p, 2);
            let cotangent = numbers(&want.size(), 3);
            (&want * &cotangent).sum(None).backward();
            for (la, lb) in pairs(mesh, a, b) {
                let (x, y) = (leaf(&whole[0], &la), leaf(&whole[1], &lb));
                let got = ShardTensor::cdist(&x, &y, p).unwrap();
                assert!(difference(&full(&got), &want) < 1e-9, "{la} {lb}");
                let g = ShardTensor::distribute_as(&cotangent, &got.layout().without_partial()).unwrap();
                got.backward_from(Some(&g), BackwardOptions::default()).unwrap();
                for (x, want) in [&x, &y].iter().zip(&dense) {
                    let got = x.grad().unwrap();
                    assert_eq!(got.layout(), x.layout());
                    assert!(difference(&full(&got), &want.grad()) < 1e-9, "{p}: {la} {lb}");
                }
            }
        }
    });
}

/// Distances and numbers, ascending, ties by number.
fn nearest(points: &Tensor, queries: &Tensor, k: i64) -> (Tensor, Tensor) {
    let (distances, order) = Tensor::cdist(queries, points, 2.0, 2).sort_stable(true, 1, false);
    (distances.narrow(1, 0, k), order.narrow(1, 0, k))
}

#[rstest]
fn knn(#[values(0, 1, 2, 3, 4)] mesh: usize, #[values(1, 4, 11)] k: i64) {
    on_mesh(MESHES[mesh], move |mesh| {
        let whole = [numbers(&[11, 3], 1), numbers(&[7, 3], 2)];
        // A query on a point.
        whole[1].get(2).copy_(&whole[0].get(5));
        let dense = whole.each_ref().map(|x| x.copy().set_requires_grad(true));
        let (want, order) = nearest(&dense[0], &dense[1], k);
        let cotangent = numbers(&[7, k], 3);
        (&want * &cotangent).sum(None).backward();
        for (lp, lq) in pairs(mesh, &[11, 3], &[7, 3]) {
            let (points, queries) = (leaf(&whole[0], &lp), leaf(&whole[1], &lq));
            let (distances, indices) = points.knn(&queries, k).unwrap();
            assert_eq!(full(&indices), order, "{lp} {lq}");
            assert!(difference(&full(&distances), &want) < 1e-12, "{lp} {lq}");
            let g = ShardTensor::distribute_as(&cotangent, distances.layout()).unwrap();
            distances.backward_from(Some(&g), BackwardOptions::default()).unwrap();
            for (x, want) in [&points, &queries].iter().zip(&dense) {
                assert!(difference(&full(&x.grad().unwrap()), &want.grad()) < 1e-9, "{lp} {lq}");
            }
        }
    });
}

/// The public golden cases on every layout.
#[rstest]
fn golden(#[values(0, 1, 2, 3, 4)] mesh: usize) {
    on_mesh(MESHES[mesh], |mesh| {
        let read = |name: &str| {
            let file = format!("{}/../../tests/golden/{name}.safetensors", env!("CARGO_MANIFEST_DIR"));
            isobar_shard::read_safetensors(file).unwrap()
        };
        let case = read("knn");
        for (lp, lq) in pairs(mesh, &case["points"].size(), &case["queries"].size()) {
            let (points, queries) = (leaf(&case["points"], &lp), leaf(&case["queries"], &lq));
            let (distances, indices) = points.knn(&queries, 4).unwrap();
            assert!(difference(&full(&distances), &case["output.0"]) < 1e-9);
            assert_eq!(full(&indices), case["output.1"]);
        }
        let case = read("cdist");
        for (la, lb) in pairs(mesh, &case["a"].size(), &case["b"].size()) {
            let (a, b) = (leaf(&case["a"], &la), leaf(&case["b"], &lb));
            let got = ShardTensor::cdist(&a, &b, 2.0).unwrap();
            assert!(difference(&full(&got), &case["output"]) < 1e-8);
            let g =
                ShardTensor::distribute_as(&case["grad.output"], &got.layout().without_partial()).unwrap();
            got.backward_from(Some(&g), BackwardOptions::default()).unwrap();
            for (x, name) in [(&a, "grad.a"), (&b, "grad.b")] {
                assert!(difference(&full(&x.grad().unwrap()), &case[name]) < 1e-7);
            }
        }
    });
}

/// Points on a grid: many are equally far.
#[test]
fn ties_go_to_lower_numbers_on_every_layout() {
    for shape in MESHES {
        on_mesh(shape, |mesh| {
            let axis = Tensor::arange(5, (Kind::Double, Device::Cpu));
            let points = Tensor::cartesian_prod(&[&axis, &axis]);
            let queries = points.narrow(0, 6, 9).copy();
            for k in [1, 3, 8] {
                let (want, order) = nearest(&points, &queries, k);
                for (lp, lq) in pairs(mesh, &[25, 2], &[9, 2]).iter().step_by(3) {
                    let (points, queries) = (leaf(&points, lp), leaf(&queries, lq));
                    let (distances, indices) = points.knn(&queries, k).unwrap();
                    assert_eq!(full(&indices), order, "{lp} {lq}");
                    assert_eq!(full(&distances), want);
                }
            }
        });
    }
}

#[rstest]
fn gradients_of_gradients(#[values(0, 2, 4)] mesh: usize) {
    on_mesh(MESHES[mesh], |mesh| {
        let whole = [numbers(&[8, 2], 1), numbers(&[5, 2], 2)];
        let dense = whole.each_ref().map(|x| x.copy().set_requires_grad(true));
        let (_, order) = nearest(&whole[0], &whole[1], 3);
        let chosen = dense[0].index_select(0, &order.flatten(0, -1)).view([5, 3, 2]);
        let distances =
            (dense[1].unsqueeze(1) - chosen).pow_tensor_scalar(2).sum_dim_intlist(-1, false, None).sqrt();
        let first = Tensor::run_backward(
            &[distances.pow_tensor_scalar(2).sum(None) + distances.sum(None)],
            &dense,
            true,
            true,
        );
        let penalty: Tensor = first.iter().map(|g| (g * g).sum(None)).sum();
        let want = Tensor::run_backward(&[penalty], &dense, false, false);
        for (lp, lq) in pairs(mesh, &[8, 2], &[5, 2]).iter().step_by(2) {
            let x = [leaf(&whole[0], lp), leaf(&whole[1], lq)];
            let (distances, _) = x[0].knn(&x[1], 3).unwrap();
            let loss = distances.mul(&distances).unwrap().add(&distances).unwrap();
            let create = BackwardOptions { create_graph: true, ..Default::default() };
            let first: Vec<ShardTensor> =
                grad(&[&loss], &[&x[0], &x[1]], &[], create).unwrap().into_iter().flatten().collect();
            let squares: Vec<ShardTensor> = first.iter().map(|g| g.mul(g).unwrap()).collect();
            let outputs: Vec<&ShardTensor> = squares.iter().collect();
            let second = grad(&outputs, &[&x[0], &x[1]], &[], BackwardOptions::default()).unwrap();
            for (got, want) in second.iter().zip(&want) {
                assert!(difference(&full(got.as_ref().unwrap()), want) < 1e-8, "{lp} {lq}");
            }
        }
    });
}

/// Rows, columns and distances of all pairs within the radius, as libtorch finds them.
fn within(points: &Tensor, queries: &Tensor, radius: f64) -> (Tensor, Tensor, Tensor) {
    let distances = Tensor::cdist(queries, points, 2.0, 2);
    let near = distances.le(radius).nonzero();
    let (rows, columns) = (near.select(1, 0), near.select(1, 1));
    let values = distances.index(&[Some(&rows), Some(&columns)]);
    (rows, columns, values)
}

#[rstest]
fn balls(#[values(0, 1, 2, 3, 4)] mesh: usize, #[values(0.0, 1.2, 100.0)] radius: f64) {
    on_mesh(MESHES[mesh], move |mesh| {
        let whole = [numbers(&[11, 3], 1), numbers(&[7, 3], 2)];
        whole[1].get(2).copy_(&whole[0].get(5));
        let dense = whole.each_ref().map(|x| x.copy().set_requires_grad(true));
        let (rows, columns, want) = within(&dense[0], &dense[1], radius);
        let cotangent = numbers(&want.size(), 3);
        (&want * &cotangent).sum(None).backward();
        let counts = rows.bincount(None::<Tensor>, 7);
        let ends = counts.cumsum(0, Kind::Int64);
        let offsets = Tensor::cat(&[Tensor::zeros([1], (Kind::Int64, Device::Cpu)), ends], 0);
        for (lp, lq) in pairs(mesh, &[11, 3], &[7, 3]) {
            let (points, queries) = (leaf(&whole[0], &lp), leaf(&whole[1], &lq));
            let ball = points.ball_query(&queries, radius).unwrap();
            assert_eq!(numbers_of(&full(&ball.offsets)), numbers_of(&offsets), "{lp} {lq}");
            assert_eq!(numbers_of(&full(&ball.indices)), numbers_of(&columns));
            assert!(difference(&full(&ball.distances), &want) < 1e-12);
            let g = ShardTensor::distribute_as(&cotangent, ball.distances.layout()).unwrap();
            ball.distances.backward_from(Some(&g), BackwardOptions::default()).unwrap();
            for (x, want) in [&points, &queries].iter().zip(&dense) {
                assert!(difference(&full(&x.grad().unwrap()), &want.grad()) < 1e-9, "{lp} {lq}");
            }
        }
    });
}

#[rstest]
fn limited_balls(#[values(0, 1, 2, 3, 4)] mesh: usize, #[values(1, 3, 20)] limit: i64) {
    on_mesh(MESHES[mesh], move |mesh| {
        let whole = [numbers(&[11, 3], 1), numbers(&[7, 3], 2)];
        let dense = whole.each_ref().map(|x| x.copy().set_requires_grad(true));
        let (rows, columns, values) = within(&dense[0], &dense[1], 1.6);
        let mut indices = vec![-1; 7 * limit as usize];
        let mut counts = vec![0; 7];
        let (mut places, mut chosen) = (Vec::new(), Vec::new());
        for (entry, (row, column)) in numbers_of(&rows).into_iter().zip(numbers_of(&columns)).enumerate() {
            if counts[row as usize] < limit {
                let place = row * limit + counts[row as usize];
                indices[place as usize] = column;
                counts[row as usize] += 1;
                places.push(place);
                chosen.push(entry as i64);
            }
        }
        let zeros = Tensor::zeros([7 * limit], (Kind::Double, Device::Cpu));
        let kept = values.index_select(0, &Tensor::from_slice(&chosen));
        let want = zeros.index_add(0, &Tensor::from_slice(&places), &kept).view([7, limit]);
        let cotangent = numbers(&[7, limit], 3);
        (&want * &cotangent).sum(None).backward();
        for (lp, lq) in pairs(mesh, &[11, 3], &[7, 3]) {
            let (points, queries) = (leaf(&whole[0], &lp), leaf(&whole[1], &lq));
            let ball = points.ball_query_limited(&queries, 1.6, limit).unwrap();
            assert_eq!(numbers_of(&full(&ball.indices)), indices, "{lp} {lq}");
            assert_eq!(numbers_of(&full(&ball.counts)), counts);
            assert!(difference(&full(&ball.distances), &want) < 1e-12);
            let g = ShardTensor::distribute_as(&cotangent, ball.distances.layout()).unwrap();
            ball.distances.backward_from(Some(&g), BackwardOptions::default()).unwrap();
            for (x, want) in [&points, &queries].iter().zip(&dense) {
                assert!(difference(&full(&x.grad().unwrap()), &want.grad()) < 1e-9, "{lp} {lq}");
            }
        }
    });
}

/// A rank receives the points once, and in backward their gradients once.
#[rstest]
fn traffic(#[values(2, 3, 4)] ranks: i64) {
    on_mesh(&[ranks], |mesh| {
        let split = |whole: &Tensor| {
            let layout = Layout::new(mesh, &[Placement::Shard(0)], &whole.size(), &Sizes::Balanced).unwrap();
            leaf(whole, &layout)
        };
        let (points, queries) = (split(&numbers(&[40, 3], 1)), split(&numbers(&[33, 3], 2)));
        let group = mesh.group("a").unwrap();
        let bytes = 40 * 3 * 8;
        let start = group.traffic().received;
        let (distances, _) = points.knn(&queries, 5).unwrap();
        let forward = group.traffic().received - start;
        assert!(forward <= bytes, "{forward}");
        let start = group.traffic().received;
        distances.backward_from(None, BackwardOptions::default()).unwrap();
        let backward = group.traffic().received - start;
        assert!(backward <= bytes, "{backward}");
        let start = group.traffic().received;
        points.ball_query(&queries, 1.0).unwrap();
        assert!(group.traffic().received - start <= bytes + 8 * mesh.size() as u64);
    });
}

#[test]
fn half_precision() {
    on_mesh(&[2], |mesh| {
        let split = |whole: &Tensor| {
            let layout = Layout::new(mesh, &[Placement::Shard(0)], &whole.size(), &Sizes::Chunk).unwrap();
            leaf(whole, &layout)
        };
        let points = split(&numbers(&[9, 3], 1).to_kind(Kind::BFloat16));
        let queries = split(&numbers(&[5, 3], 2).to_kind(Kind::BFloat16));
        let (distances, _) = points.knn(&queries, 4).unwrap();
        assert_eq!(distances.kind(), Kind::BFloat16);
        distances.backward_from(None, BackwardOptions::default()).unwrap();
        assert_eq!(points.grad().unwrap().kind(), Kind::BFloat16);
        assert_eq!(ShardTensor::cdist(&points, &queries, 2.0).unwrap().kind(), Kind::BFloat16);
    });
}

#[test]
fn wrong_arguments_are_errors() {
    on_mesh(&[2], |mesh| {
        let tensor = |shape: &[i64]| {
            let layout = Layout::new(mesh, &[Placement::Shard(0)], shape, &Sizes::Chunk).unwrap();
            leaf(&numbers(shape, 1), &layout)
        };
        let (points, queries) = (tensor(&[5, 3]), tensor(&[4, 3]));
        let text = |error: isobar_shard::Error| error.to_string();
        assert!(text(points.knn(&queries, 6).err().unwrap()).contains("6 neighbours of 5 points"));
        assert!(text(points.knn(&queries, 0).err().unwrap()).contains("0 neighbours"));
        assert!(text(points.knn(&tensor(&[4, 2]), 1).err().unwrap()).contains("features"));
        assert!(text(points.ball_query(&queries, -1.0).err().unwrap()).contains("radius"));
        assert!(text(points.ball_query(&queries, f64::NAN).err().unwrap()).contains("radius"));
        assert!(text(points.ball_query_limited(&queries, 1.0, 0).err().unwrap()).contains("at most"));
        assert!(text(ShardTensor::cdist(&points, &tensor(&[4, 2]), 2.0).err().unwrap()).contains("features"));
        assert!(text(ShardTensor::cdist(&points, &queries, -1.0).err().unwrap()).contains("0 or more"));
    });
}
