use std::time::Duration;

use isobar_collectives::{ReduceOp, all_reduce, threads};
use rstest::rstest;
use tch::Tensor;

use super::*;
use crate::{Error, ProcessGroupNode};

const DEADLINE: Duration = Duration::from_secs(60);

/// Runs a body on ranks that are threads, each with its manager.
fn on_ranks<T: Send>(ranks: usize, body: impl Fn(DistributedManager) -> T + Sync) -> Vec<T> {
    threads::run(ranks, DEADLINE, |world| {
        let _binding = DistributedManager::bind_thread(&world);
        body(DistributedManager::get().unwrap())
    })
}

/// The sum of the world ranks of a group, by communication within it.
fn sum_of_ranks(manager: &DistributedManager, group: &Group) -> i64 {
    let rank = Tensor::from_slice(&[manager.rank() as i64]);
    all_reduce(&rank, ReduceOp::Sum, group).unwrap().f_int64_value(&[0]).unwrap()
}

fn check_group(manager: &DistributedManager, group: &Group, expected: &[usize]) {
    assert_eq!(group.ranks(), expected);
    assert_eq!(group.ranks()[group.rank()], manager.rank());
    assert_eq!(sum_of_ranks(manager, group), expected.iter().sum::<usize>() as i64);
}

#[rstest]
fn a_rank_knows_its_place(#[values(1, 2, 4, 6, 8)] ranks: usize) {
    let places = on_ranks(ranks, |manager| {
        assert_eq!((manager.world_size(), manager.device()), (ranks, Device::Cpu));
        assert_eq!((manager.distributed(), manager.cuda()), (ranks > 1, false));
        assert_eq!(
            (manager.group_size(None).unwrap(), manager.group_rank(None).unwrap()),
            (ranks, manager.rank())
        );
        assert_eq!(manager.group_names(), Vec::<String>::new());
        assert_eq!(manager.group_name(&manager.group(None).unwrap()), None);
        // A rank that is a thread keeps its own manager whatever the process does.
        assert_eq!(DistributedManager::initialize().unwrap().rank(), manager.rank());
        manager.rank()
    });
    assert_eq!(places, (0..ranks).collect::<Vec<_>>());
    assert!(matches!(DistributedManager::get(), Err(Error::Uninitialized)));
}

#[test]
fn settings_are_kept() {
    on_ranks(1, |manager| {
        assert!(!manager.broadcast_buffers() && !manager.find_unused_parameters());
        manager.set_broadcast_buffers(true);
        manager.set_find_unused_parameters(true);
        let again = DistributedManager::get().unwrap();
        assert!(again.broadcast_buffers() && again.find_unused_parameters());
        assert_eq!(
            manager.to_string(),
            "rank 0 of 1, local rank 0, on cpu, over threads, started by THREADS"
        );
    });
}

#[test]
fn threads_leave_the_process_alone() {
    on_ranks(2, |manager| {
        assert!(matches!(manager.seed(1), Err(Error::ThreadRank(_))));
        assert!(matches!(DistributedManager::setup(SetupOptions::default()), Err(Error::ThreadRank(_))));
        assert!(matches!(crate::logging::init(&Default::default(), 0, None), Err(Error::ThreadRank(_))));
        DistributedManager::cleanup(true).unwrap();
        assert!(DistributedManager::is_initialized());
    });
}

#[test]
fn bindings_nest() {
    let inner = Group::single();
    on_ranks(2, |manager| {
        {
            let _binding = DistributedManager::bind_thread(&inner);
            assert_eq!(DistributedManager::get().unwrap().world_size(), 1);
        }
        assert_eq!(DistributedManager::get().unwrap().world_size(), manager.world_size());
    });
}

#[rstest]
#[case(1, 1)]
#[case(2, 1)]
#[case(4, 2)]
#[case(6, 3)]
#[case(8, 8)]
fn subgroups_are_blocks_and_orthogonal_groups_cross_them(#[case] ranks: usize, #[case] size: usize) {
    on_ranks(ranks, |manager| {
        let rank = manager.rank();
        let block = manager.create_process_subgroup("model", size as i64, None, true).unwrap();
        let first = rank / size * size;
        check_group(&manager, &block, &(first..first + size).collect::<Vec<_>>());
        let across = manager.create_orthogonal_process_group("data", "model", true).unwrap();
        check_group(&manager, &across, &(rank % size..ranks).step_by(size).collect::<Vec<_>>());

        assert_eq!(manager.group_names(), ["data", "model"]);
        assert_eq!(manager.group_size(Some("model")).unwrap(), size);
        assert_eq!(manager.group_rank(Some("data")).unwrap(), rank / size);
        assert_eq!(manager.group_name(&across).as_deref(), Some("data"));
    });
}

#[test]
fn groups_are_cut_from_every_instance_of_a_parent() {
    on_ranks(8, |manager| {
        let first = manager.rank() / 4 * 4;
        manager.create_process_subgroup("four", 4, None, false).unwrap();
        let across = manager.create_orthogonal_process_group("across", "four", false).unwrap();
        check_group(&manager, &across, &[manager.rank() % 4, manager.rank() % 4 + 4]);
        let two = manager.create_process_subgroup("two", 2, Some("four"), false).unwrap();
        let start = first + manager.rank() % 4 / 2 * 2;
        check_group(&manager, &two, &[start, start + 1]);
    });
}

#[test]
fn wrong_groups_are_refused_on_all_ranks() {
    on_ranks(4, |manager| {
        manager.create_process_subgroup("two", 2, None, false).unwrap();
        let text = |result: Result<Group>| result.unwrap_err().to_string();
        let cut = |name, size, parent| text(manager.create_process_subgroup(name, size, parent, false));
        assert_eq!(
            cut("three", 3, None),
            "groups \"three\" of 3 ranks cannot be cut from the world of 4 ranks; the size must divide it"
        );
        assert!(cut("none", 0, None).contains("of 0 ranks"));
        assert!(cut("many", 4, Some("two")).contains("from group \"two\" of 2 ranks"));
        assert_eq!(cut("two", 2, None), "there is already a group \"two\"; choose another name");
        assert_eq!(cut("x", 1, Some("tow")), "there is no group \"tow\"; expected one of two");
        assert!(matches!(
            manager.group(Some("tow")),
            Err(Error::Mesh(isobar_mesh::Error::UndefinedGroup { .. }))
        ));
        assert!(matches!(
            manager.create_orthogonal_process_group("x", "tow", false),
            Err(Error::Mesh(isobar_mesh::Error::UndefinedGroup { .. }))
        ));
        // All refused alike, and the world goes on.
        assert_eq!(sum_of_ranks(&manager, &manager.group(None).unwrap()), 6);
    });
}

#[test]
fn ranks_that_ask_for_different_groups_are_told() {
    let texts = on_ranks(3, |manager| {
        let size = if manager.rank() == 2 { 3 } else { 1 };
        manager.create_process_subgroup("g", size, None, false).unwrap_err().to_string()
    });
    for text in texts {
        assert_eq!(
            text,
            "create_process_subgroup: ranks do not agree: ranks 0, 1 ask for \"g\" of 1 ranks in None; rank 2 asks for \
             \"g\" of 3 ranks in None; all ranks must make the same call"
        );
    }
}

fn tree(sizes: &[(&str, i64)]) -> ProcessGroupConfig {
    let mut config = ProcessGroupConfig::new(ProcessGroupNode::new("all"));
    config.add_node(ProcessGroupNode::new("model_parallel"), "all").unwrap();
    config.add_node(ProcessGroupNode::new("data_parallel"), "all").unwrap();
    config.add_node(ProcessGroupNode::new("spatial"), "model_parallel").unwrap();
    config.add_node(ProcessGroupNode::new("channel"), "model_parallel").unwrap();
    config.set_leaf_group_sizes(sizes).unwrap();
    config
}

#[test]
fn trees_make_siblings_orthogonal() {
    on_ranks(8, |manager| {
        manager
            .create_groups_from_config(&tree(&[("spatial", 2), ("channel", 2), ("data_parallel", -1)]), true)
            .unwrap();
        let rank = manager.rank();
        let check =
            |name, expected: &[usize]| check_group(&manager, &manager.group(Some(name)).unwrap(), expected);
        check("all", &(0..8).collect::<Vec<_>>());
        check("model_parallel", &(rank / 4 * 4..rank / 4 * 4 + 4).collect::<Vec<_>>());
        check("data_parallel", &[rank % 4, rank % 4 + 4]);
        check("spatial", &[rank / 2 * 2, rank / 2 * 2 + 1]);
        let first = rank / 4 * 4 + rank % 2;
        check("channel", &[first, first + 2]);
        check("__orthogonal_to_model_parallel", &[rank % 4, rank % 4 + 4]);
    });
}

#[test]
fn a_tree_of_a_smaller_world_is_refused() {
    on_ranks(6, |manager| {
        let config = tree(&[("spatial", 2), ("channel", 2), ("data_parallel", -1)]);
        assert!(matches!(
            manager.create_groups_from_config(&config, false),
            Err(Error::Mesh(isobar_mesh::Error::GroupTree(_)))
        ));
    });
}

#[rstest]
fn without_a_mesh_there_is_one_of_the_world(#[values(1, 2, 4)] ranks: usize) {
    on_ranks(ranks, |manager| {
        assert_eq!(manager.mesh_dims(), [("world".to_owned(), ranks)]);
        let group = manager.get_mesh_group(&manager.global_mesh()).unwrap();
        assert_eq!(group, manager.group(None).unwrap());
    });
}

#[rstest]
#[case(1, &[1, -1])]
#[case(2, &[-1, 2])]
#[case(4, &[2, 2])]
#[case(6, &[-1, 3])]
#[case(8, &[2, -1])]
fn meshes_have_groups_along_their_axes(#[case] ranks: usize, #[case] shape: &[i64]) {
    on_ranks(ranks, |manager| {
        let mesh = manager.initialize_mesh(shape, &["data", "model"]).unwrap();
        let [data, model] = mesh.shape()[..] else { panic!("two axes") };
        assert_eq!(data * model, ranks);
        let (row, column) = (manager.rank() / model, manager.rank() % model);
        assert_eq!(mesh.coordinates(), Some(vec![row, column]));
        assert_eq!(mesh.coordinate("model").unwrap(), Some(column));
        check_group(
            &manager,
            &mesh.group("model").unwrap(),
            &(row * model..(row + 1) * model).collect::<Vec<_>>(),
        );
        check_group(
            &manager,
            &mesh.group("data").unwrap(),
            &(column..ranks).step_by(model).collect::<Vec<_>>(),
        );

        assert_eq!(manager.mesh_dims(), [("data".to_owned(), data), ("model".to_owned(), model)]);
        assert_eq!(manager.global_mesh(), mesh);
        let slice = manager.mesh(Some("model")).unwrap();
        assert_eq!(manager.get_mesh_group(&slice).unwrap(), mesh.group("model").unwrap());
        let all = manager.get_mesh_group(&mesh).unwrap();
        check_group(&manager, &all, &(0..ranks).collect::<Vec<_>>());
        assert_eq!(manager.get_mesh_group(&mesh).unwrap(), all, "the group is made once");
    });
}

#[test]
fn slices_reorder_and_flatten() {
    on_ranks(8, |manager| {
        let mesh = manager.initialize_mesh(&[2, 2, 2], &["data", "height", "width"]).unwrap();
        let base = manager.rank() / 4 * 4;
        let domain = mesh.slice(&["height", "width"]).unwrap();
        assert_eq!(domain.ranks(), [base, base + 1, base + 2, base + 3]);
        assert_eq!(domain.to_string(), "mesh (height=2, width=2)");

        let turned = mesh.slice(&["width", "height"]).unwrap();
        assert_eq!(turned.ranks(), [base, base + 2, base + 1, base + 3]);
        let flat = turned.flatten("domain").unwrap();
        assert_eq!((flat.names(), flat.shape()), (vec!["domain"], vec![4]));
        check_group(&manager, &flat.group("domain").unwrap(), &turned.ranks());
        let own = flat.coordinate("domain").unwrap().unwrap();
        assert_eq!(flat.ranks()[own], manager.rank());

        let outer = mesh.slice(&["data", "width"]).unwrap();
        let group = manager.get_mesh_group(&outer).unwrap();
        check_group(&manager, &group, &outer.ranks());
        assert_eq!(outer.slice(&["width"]).unwrap().group("width").unwrap(), mesh.group("width").unwrap());
    });
}

#[test]
fn ranks_outside_a_mesh_take_no_part() {
    on_ranks(6, |manager| {
        let world = manager.group(None).unwrap();
        let mesh = DeviceMesh::with_ranks(&world, &[5, 1, 3, 0], &[2, -1], &["a", "b"]).unwrap();
        let flat = mesh.flatten("all").unwrap();
        match [5, 1, 3, 0].iter().position(|rank| *rank == manager.rank()) {
            Some(place) => {
                assert_eq!(mesh.coordinates(), Some(vec![place / 2, place % 2]));
                check_group(&manager, &flat.group("all").unwrap(), &[5, 1, 3, 0]);
            }
            None => {
                assert_eq!((mesh.coordinates(), mesh.coordinate("a").unwrap()), (None, None));
                let error = mesh.group("a").unwrap_err().to_string();
                let rank = manager.rank();
                assert_eq!(
                    error,
                    format!(
                        "rank {rank} is not in mesh (a=2, b=2), so that it has no group along its axis \"a\""
                    )
                );
            }
        }
    });
}

#[rstest]
#[case(&[], &[], "there is no axis; give at least one")]
#[case(&[2, 2], &["a"], "there are 2 extents but 1 names")]
#[case(&[2, 2], &["a", "a"], "the name \"a\" is empty or given twice")]
#[case(&[4], &[""], "the name \"\" is empty or given twice")]
#[case(&[-1, -1], &["a", "b"], "only one extent may be -1")]
#[case(&[0, -1], &["a", "b"], "every extent must be at least 1, or -1 for what is left")]
#[case(&[3, -1], &["a", "b"], "its extents multiply to 3, which does not divide the 4 ranks")]
#[case(&[2, 1], &["a", "b"], "its extents multiply to 2, not the 4 ranks")]
fn wrong_meshes_are_refused(#[case] shape: &[i64], #[case] names: &[&str], #[case] problem: &str) {
    on_ranks(4, |manager| {
        let error = manager.initialize_mesh(shape, names).unwrap_err().to_string();
        assert_eq!(error, format!("mesh of shape {shape:?} with axes {names:?}: {problem}"));
    });
}

#[test]
fn ranks_must_agree_on_a_mesh() {
    let texts = on_ranks(4, |manager| {
        let shape: &[i64] = if manager.rank() < 3 { &[2, 2] } else { &[4, 1] };
        manager.initialize_mesh(shape, &["a", "b"]).unwrap_err().to_string()
    });
    for text in texts {
        assert!(
            text.contains("ranks 0, 1, 2 ask for shape [2, 2]")
                && text.contains("rank 3 asks for shape [4, 1]"),
            "{text}"
        );
    }
}

#[test]
fn axes_are_checked() {
    on_ranks(4, |manager| {
        let mesh = manager.initialize_mesh(&[2, 2], &["a", "b"]).unwrap();
        assert_eq!(mesh.group("c").unwrap_err().to_string(), "mesh (a=2, b=2) has no axis \"c\"");
        assert!(matches!(mesh.slice(&[]), Err(isobar_mesh::Error::Mesh { .. })));
        assert!(matches!(mesh.slice(&["a", "a"]), Err(isobar_mesh::Error::Mesh { .. })));
        assert!(matches!(manager.mesh(Some("c")), Err(Error::Mesh(isobar_mesh::Error::UnknownAxis { .. }))));
    });
}
