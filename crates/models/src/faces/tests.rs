//! Paddings against rotations of whole faces, split against dense, and what they send.

use std::time::Duration;

use isobar_array::{Conv, Generator, Window};
use isobar_collectives::trace::CommTrace;
use isobar_collectives::{Group, threads};
use isobar_mesh::DeviceMesh;
use isobar_shard::{Layout, Placement, ShardTensor, Sizes, forbid_hidden_communication};
use rstest::rstest;
use tch::{Device, IndexOp, Kind, Tensor};

use super::{Cell, Sphere};

fn random(shape: &[i64], seed: u64) -> Tensor {
    Generator::new(seed).normal(&Window::whole(shape), 0.0, 1.0, (Kind::Double, Device::Cpu)).unwrap()
}

/// A face turned by quarters, counter-clockwise.
fn turned(face: &Tensor, quarters: i64) -> Tensor {
    face.rot90(quarters, [-2, -1])
}

/// The three by three faces around and with a face of HEALPix, but for the corners that no face fills.
fn around(x: &Tensor, face: i64) -> [Option<Tensor>; 9] {
    let (zone, i) = (face / 4, face % 4);
    let of = |zone: i64, ahead: i64| x.get(4 * zone + (i + ahead) % 4);
    let some = |face: Tensor, quarters: i64| Some(turned(&face, quarters));
    let own = some(x.get(face), 0);
    match zone {
        0 => [
            some(of(0, 2), 2),
            some(of(0, 1), 1),
            some(of(0, 1), 0),
            some(of(0, 3), -1),
            own,
            some(of(1, 1), 0),
            some(of(0, 3), 0),
            some(of(1, 0), 0),
            some(of(2, 0), 0),
        ],
        1 => [
            None,
            some(of(0, 0), 0),
            some(of(1, 1), 0),
            some(of(0, 3), 0),
            own,
            some(of(2, 0), 0),
            some(of(1, 3), 0),
            some(of(2, 3), 0),
            None,
        ],
        _ => [
            some(of(0, 0), 0),
            some(of(1, 1), 0),
            some(of(2, 1), 0),
            some(of(1, 0), 0),
            own,
            some(of(2, 1), -1),
            some(of(2, 3), 0),
            some(of(2, 3), 1),
            some(of(2, 2), 2),
        ],
    }
}

/// The corner where three faces meet, row by row and column by column from the face outwards.
fn made_corner(above: &Tensor, left: &Tensor, n: i64, width: i64) -> Tensor {
    let corner =
        above.new_zeros([above.size()[0], above.size()[1], width, width], (Kind::Double, Device::Cpu));
    let end = |j: i64| width - 1 - j;
    for j in 0..width {
        let mean = (above.i((.., .., n - 1 - j, 0)) + left.i((.., .., 0, n - 1 - j))) * 0.5;
        corner.i((.., .., end(j), end(j))).copy_(&mean);
        corner.i((.., .., end(j), end(j) + 1..)).copy_(&above.i((.., .., n - 1 - j, ..j)));
        corner.i((.., .., end(j) + 1.., end(j))).copy_(&left.i((.., .., ..j, n - 1 - j)));
    }
    corner
}

/// `[face, batch, channel, n, n]` padded by rotations of whole faces.
fn healpix_by_rotations(x: &Tensor, width: i64) -> Tensor {
    let n = x.size()[4];
    let padded = |face: i64| {
        let mut all = around(x, face).map(|face| face.unwrap_or_else(|| x.get(0).zeros_like()));
        if face / 4 == 1 {
            let patch = |into: &Tensor, corner: Tensor, start: i64| {
                into.narrow(2, start, width).narrow(3, start, width).copy_(&corner);
            };
            patch(&all[0], made_corner(&all[1], &all[3], n, width), n - width);
            // The opposite corner is the same one in the face turned half around.
            let opposite = made_corner(&turned(&all[7], 2), &turned(&all[5], 2), n, width);
            all[8] = all[8].copy();
            patch(&all[8], turned(&opposite, 2), 0);
        }
        let rows: Vec<Tensor> = all.chunks(3).map(|row| Tensor::cat(row, 3)).collect();
        Tensor::cat(&rows, 2).narrow(2, n - width, n + 2 * width).narrow(3, n - width, n + 2 * width)
    };
    Tensor::stack(&(0..12).map(padded).collect::<Vec<_>>(), 0)
}

#[rstest]
fn healpix_faces_continue_in_their_neighbours(
    #[values((4, 1), (4, 2), (5, 3), (4, 4))] (n, width): (i64, i64),
) {
    let x = random(&[12, 2, 3, n, n], 1);
    let got = Sphere::Healpix.pad(&x.reshape([24, 3, n, n]), width).unwrap();
    let want = healpix_by_rotations(&x, width).reshape([24, 3, n + 2 * width, n + 2 * width]);
    assert_eq!(got, want);
}

#[test]
fn cube_faces_continue_in_their_neighbours() {
    let n = 4;
    let cell = |face, row, column| Sphere::Cube.sources(Cell { face, row, column }, n)[0];
    let at = |face, row, column| Cell { face, row, column };
    // Left and right around the equator; corners repeat the end of a row.
    assert_eq!([cell(0, 2, -1), cell(3, 1, 4)], [at(3, 2, 3), at(0, 1, 0)]);
    assert_eq!([cell(0, -1, -1), cell(0, -1, 0), cell(0, 4, 4)], [at(4, 3, 0), at(4, 3, 0), at(5, 0, 3)]);
    // The rows below the poles turn with the face: of face 1 they are a column.
    assert_eq!([cell(1, -1, 0), cell(1, 4, 0)], [at(4, 3, 3), at(5, 0, 3)]);
    assert_eq!([cell(2, -1, 1), cell(3, -1, 0)], [at(4, 0, 2), at(4, 0, 0)]);
    // At the poles, columns go on in faces 3 and 1, and their ends are the corners.
    assert_eq!(
        [cell(4, -1, 2), cell(4, 4, 2), cell(5, -1, 2), cell(5, 4, 2)],
        [at(5, 3, 2), at(0, 0, 2), at(0, 3, 2), at(4, 0, 2)]
    );
    assert_eq!(cell(4, -1, -1), cell(4, 0, -1));
    assert_eq!(cell(5, 4, 4), cell(5, 3, 4));
}

/// Sizes of the shards of a dim: more for each further rank, or nothing for the first.
fn sizes(extent: i64, ranks: i64, empty: bool) -> Vec<i64> {
    let mut sizes: Vec<i64> =
        (0..ranks).map(|rank| extent * (rank + 1) / (ranks * (ranks + 1) / 2)).collect();
    if empty && ranks > 1 {
        sizes[1] += std::mem::take(&mut sizes[0]);
    }
    sizes[ranks as usize - 1] += extent - sizes.iter().sum::<i64>();
    sizes
}

/// Runs on a mesh with `[face · batch, channel, n, n]` split unevenly along these dims of `[face, batch, channel, n, n]`.
fn on_mesh(
    axes: &'static [(i64, usize)],
    x: (i64, i64, bool),
    run: impl Fn((&DeviceMesh, &Group), &Tensor, ShardTensor) + Send + Sync + Clone + 'static,
) {
    let (faces, n, empty) = x;
    let count = axes.iter().map(|(ranks, _)| *ranks).product::<i64>() as usize;
    threads::run(count, Duration::from_secs(60), move |group| {
        let shape: Vec<i64> = axes.iter().map(|(ranks, _)| *ranks).collect();
        let mesh = DeviceMesh::new(&group, &shape, &["a", "b"][..shape.len()]).unwrap();
        let whole = random(&[faces, 2, 3, n, n], 5);
        let placements: Vec<Placement> = axes.iter().map(|(_, dim)| Placement::Shard(*dim)).collect();
        let parts = axes
            .iter()
            .map(|&(ranks, dim)| (dim, sizes(whole.size()[dim], ranks, empty)))
            .collect::<Vec<_>>();
        let layout = Layout::new(&mesh, &placements, &whole.size(), &Sizes::Explicit(parts)).unwrap();
        let x = ShardTensor::distribute_as(&whole, &layout).unwrap();
        let local = x.local().detach().set_requires_grad(true);
        run((&mesh, &group), &whole, ShardTensor::from_parts(&local, &layout).unwrap());
    });
}

#[rstest]
fn split_faces_are_padded_as_dense_ones(
    #[values(
        &[(2, 0)], &[(4, 0)], &[(3, 3)], &[(2, 4)], &[(2, 1)], &[(2, 0), (2, 3)], &[(2, 3), (2, 4)], &[(2, 1), (2, 0)],
        &[(2, 1), (2, 4)]
    )]
    axes: &'static [(i64, usize)],
    #[values(false, true)] empty: bool,
    #[values((Sphere::Cube, 1), (Sphere::Healpix, 1), (Sphere::Healpix, 3))] (sphere, width): (Sphere, i64),
) {
    let (faces, n) = (sphere.faces(), 6);
    on_mesh(axes, (faces, n, empty), move |_, whole, x| {
        let _guard = forbid_hidden_communication();
        let dense = whole.reshape([2 * faces, 3, n, n]).detach().set_requires_grad(true);
        let want = sphere.pad(&dense, width).unwrap();
        let weights = random(&want.size(), 9);
        (&want * &weights).sum(Kind::Double).backward();
        let got = sphere.pad(&x.reshape(&[2 * faces, 3, n, n]).unwrap(), width).unwrap();
        assert_eq!(got.full_tensor(None).unwrap(), want);
        let weights = ShardTensor::distribute_as(&weights, got.layout()).unwrap();
        got.mul(&weights).unwrap().sum().unwrap().backward().unwrap();
        let grad = x.grad().unwrap().full_tensor(None).unwrap();
        let want = dense.grad().reshape([faces, 2, 3, n, n]);
        assert!((grad - want).abs().max().double_value(&[]) < 1e-12);
    });
}

#[rstest]
fn a_padding_sends_strips(
    #[values(&[(4, 0)], &[(4, 3)], &[(4, 4)], &[(2, 0), (2, 3)], &[(2, 3), (2, 4)])] axes: &'static [(
        i64,
        usize,
    )],
    #[values((Sphere::Cube, 1), (Sphere::Healpix, 2))] (sphere, width): (Sphere, i64),
) {
    let (faces, n) = (sphere.faces(), 32);
    on_mesh(axes, (faces, n, false), move |(mesh, group), _, x| {
        let folded = x.reshape(&[2 * faces, 3, n, n]).unwrap();
        let trace = CommTrace::start(group);
        let padded = sphere.pad(&folded, width).unwrap();
        trace.stop();
        let features = (faces * 2 * 3 * 8) as u64;
        // The surroundings of the rank's own shards, elements of which are means of two at the corners of HEALPix's faces.
        let &[own_faces, .., rows, columns] = x.local_shape() else { panic!("faces have five dims") };
        let means = if sphere == Sphere::Healpix { 2 } else { 1 };
        let own = own_faces * 2 * width * (rows + means * (columns + 2 * width));
        let strips = (own * 2 * 3 * 8) as u64;
        assert!(trace.received() <= strips, "{} of {strips}", trace.received());
        let all = group.all_gather_bytes(&trace.received().to_le_bytes()).unwrap();
        assert!(all.iter().any(|received| received.iter().any(|byte| *byte > 0)));

        // A convolution that crops the padding has the field's layout.
        let kernel = ShardTensor::distribute(
            &random(&[3, 3, 2 * width + 1, 2 * width + 1], 2),
            mesh,
            &vec![Placement::Replicate; axes.len()],
        );
        let y = padded.conv(&kernel.unwrap(), None, &Conv::default()).unwrap();
        assert_eq!(y.layout(), folded.layout());

        let loss = padded.sum().unwrap();
        let trace = CommTrace::start(group);
        loss.backward().unwrap();
        trace.stop();
        let ring = 4 * (width * (n + 2 * width)) as u64 * features;
        assert!(trace.received() <= ring, "{} of {ring}", trace.received());
    });
}

#[test]
fn paddings_refuse_what_is_no_sphere() {
    let text = |x: &[i64], width| Sphere::Healpix.pad(&random(x, 1), width).unwrap_err().to_string();
    assert!(
        text(&[13, 1, 4, 4], 1).starts_with("faces: input has shape [13, 1, 4, 4], expected [12 · batch")
    );
    assert!(text(&[12, 1, 4, 3], 1).contains("[12 · batch, channel, n, n]"));
    assert!(text(&[12, 1, 4, 4], 5).contains("n of at least 5, the width of the padding"));
}
