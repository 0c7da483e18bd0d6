use isobar_launch::{Environment, Method};
use rstest::rstest;

use super::*;

const STEP: &str = "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=2 SLURM_NPROCS=4 SLURM_STEP_NUM_TASKS=4 \
                    SLURM_LAUNCH_NODE_IPADDR=10.0.0.2";

fn variables(text: &str) -> Environment {
    text.split_whitespace().filter_map(|pair| pair.split_once('=')).collect()
}

#[rstest]
#[case::alone("", Method::Single, false, 1, None)]
#[case::srun(STEP, Method::Slurm, false, 4, None)]
#[case::mpirun("OMPI_COMM_WORLD_SIZE=4", Method::OpenMpi, false, 4, None)]
#[case::mpirun_of_one("OMPI_COMM_WORLD_SIZE=1", Method::OpenMpi, false, 1, None)]
#[case::step_of_one(
    "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=4",
    Method::Slurm,
    false,
    1,
    None
)]
#[case::no_srun(
    "SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_PROCID=0", Method::Single, false, 1,
    Some((Severity::Warning, "this job of SLURM has 4 tasks, and this is one process outside of srun"))
)]
#[case::one_task("SLURM_JOB_ID=7 SLURM_NTASKS=1 SLURM_PROCID=0", Method::Single, false, 1, None)]
#[case::forced_under_srun(
    STEP, Method::Single, true, 1,
    Some((Severity::Warning, "srun started 4 processes (SLURM_STEP_NUM_TASKS), and each takes itself for the only rank"))
)]
#[case::forced_under_srun_without_step_number(
    "SLURM_JOB_ID=7 SLURM_STEPID=0 SLURM_PROCID=2 SLURM_NTASKS=4", Method::Single, true, 1,
    Some((Severity::Warning, "srun started 4 processes (SLURM_NTASKS), and each takes itself for the only rank"))
)]
#[case::forced_under_mpirun(
    "OMPI_COMM_WORLD_SIZE=2", Method::Single, true, 1,
    Some((Severity::Warning, "mpirun started 2 processes"))
)]
#[case::other_mpi(
    "PMI_SIZE=2 PMI_RANK=0", Method::Pmi, false, 1,
    Some((Severity::Error, "mpiexec started 2 processes (PMI_SIZE), and each takes itself for the only rank"))
)]
#[case::torchrun_by_srun(
    &format!("{STEP} TORCHELASTIC_RUN_ID=none GROUP_WORLD_SIZE=1"), Method::Env, false, 2,
    Some((Severity::Error, "torchrun in each a job of its own of 2 ranks"))
)]
#[case::torchrun_on_nodes(
    &format!("{STEP} TORCHELASTIC_RUN_ID=none GROUP_WORLD_SIZE=4"), Method::Env, false, 8, None
)]
#[case::the_program_knows(STEP, Method::Explicit, false, 1, None)]
fn launchers_that_were_mixed_up(
    #[case] text: &str,
    #[case] method: Method,
    #[case] forced: bool,
    #[case] world_size: usize,
    #[case] expected: Option<(Severity, &str)>,
) {
    let found = environment(&variables(text), method, forced, world_size);
    match expected {
        None => assert_eq!(found, []),
        Some((severity, words)) => {
            assert_eq!((found.len(), found[0].severity), (1, severity), "{found:?}");
            assert!(found[0].text.contains(words), "{}", found[0].text);
        }
    }
}

/// Ranks of two hosts, two on each, with four cores and two GPUs each, on which nothing is wrong.
fn ranks() -> Vec<Facts> {
    let rank = |rank: usize| Facts {
        rank,
        local_rank: rank % 2,
        host: format!("node{}", 7 + rank / 2),
        method: "OPENMPI".to_owned(),
        backend: "mpi".to_owned(),
        nccl: true,
        mpi: Some("Open MPI v4.1.4".to_owned()),
        mpirun: true,
        mpi_takes_cuda: Some(false),
        gpu: Some((rank % 2).to_string()),
        gpus: 2,
        cores: (0..4).collect(),
        threads: 2,
        clock_ahead_s: Some(0.01),
        folder: Some(FolderFacts {
            path: "runs/x".to_owned(),
            problem: None,
            shared: true,
            free: Some(1 << 40),
        }),
        ..Facts::default()
    };
    (0..4).map(rank).collect()
}

#[rstest]
#[case::all_well(|_: &mut Vec<Facts>| (), &[])]
#[case::one_gpu_while_others_are_free(
    |ranks: &mut Vec<Facts>| ranks[1].gpu = Some("0".to_owned()),
    &["warning: ranks 0, 1 of node7 share GPU 0, and 1 of its 2 GPUs are without a rank"]
)]
#[case::more_ranks_than_gpus(
    |ranks: &mut Vec<Facts>| for rank in &mut ranks[..2] { rank.gpus = 1; rank.gpu = Some("0".to_owned()); },
    &["warning: 2 ranks of node7 share 1 GPU"]
)]
#[case::one_without_gpu(|ranks: &mut Vec<Facts>| ranks[3].gpu = None, &["warning: without a GPU on node8: rank 3, while"])]
#[case::through_host_memory(
    |ranks: &mut Vec<Facts>| ranks.iter_mut().for_each(|rank| rank.nccl = false),
    &["warning: tensors on GPUs travel through pinned host memory, over Open MPI v4.1.4, which cannot take CUDA memory"]
)]
#[case::too_many_threads(
    |ranks: &mut Vec<Facts>| ranks[0].threads = 3,
    &["warning: on node7 2 ranks compute with 5 threads in all, on the 4 cores that they may use; set OMP_NUM_THREADS=2"]
)]
#[case::too_many_ranks(
    |ranks: &mut Vec<Facts>| for rank in &mut ranks[..2] { rank.cores = vec![3]; rank.threads = 1; },
    &["warning: on node7 2 ranks compute with 2 threads in all, on the 1 cores that they may use; start fewer ranks there"]
)]
#[case::bound(
    |ranks: &mut Vec<Facts>| ranks[1].cores = vec![1],
    &["warning: rank 1 of node7 may use 1 of the 4 cores there, for 2 threads: start with `mpirun --bind-to none`"]
)]
#[case::clocks(
    |ranks: &mut Vec<Facts>| for rank in &mut ranks[2..] { rank.clock_ahead_s = Some(-3.24); },
    &["warning: the clock of node8 (ranks 2, 3) is 3.2 s behind that of node7 (rank 0)"]
)]
#[case::not_shared(
    |ranks: &mut Vec<Facts>| for rank in &mut ranks[2..] { rank.folder.as_mut().unwrap().shared = false; },
    &["error: ranks 2, 3 (node8) do not see in runs/x what rank 0 (node7) writes there"]
)]
#[case::not_writable(
    |ranks: &mut Vec<Facts>| ranks[2].folder.as_mut().unwrap().problem = Some("Read-only file system".to_owned()),
    &["error: rank 2 (node8) cannot write to runs/x: Read-only file system"]
)]
#[case::full(
    |ranks: &mut Vec<Facts>| ranks.iter_mut().for_each(|rank| rank.folder.as_mut().unwrap().free = Some(0)),
    &["error: runs/x: nothing is free on its disk"]
)]
#[case::mpirun_in_each_task_of_srun(
    |ranks: &mut Vec<Facts>| for rank in ranks { rank.step = Some(StepFacts { name: "7.0".to_owned(), task: 1, tasks: 2 }); },
    &["error: srun started 2 processes, and mpirun in each a job of its own of 4 ranks"]
)]
#[case::daemons_of_mpirun(
    |ranks: &mut Vec<Facts>| for rank in &mut ranks[2..] { rank.step = Some(StepFacts { name: "7.0".to_owned(), task: 0, tasks: 1 }); },
    &[]
)]
#[case::ranks_of_srun(
    |ranks: &mut Vec<Facts>| for rank in ranks {
        rank.mpirun = false;
        rank.step = Some(StepFacts { name: "7.0".to_owned(), task: rank.rank, tasks: 4 });
    },
    &[]
)]
#[case::found_by_some(
    |ranks: &mut Vec<Facts>| for rank in &mut ranks[..2] { rank.own = vec![Finding::warning("it rains".to_owned())]; },
    &["warning: ranks 0, 1: it rains"]
)]
#[case::found_by_all(
    |ranks: &mut Vec<Facts>| for rank in ranks { rank.own = vec![Finding::error("it snows".to_owned())]; },
    &["error: it snows"]
)]
fn what_ranks_together_show(#[case] change: fn(&mut Vec<Facts>), #[case] expected: &[&str]) {
    let mut ranks = ranks();
    change(&mut ranks);
    let told = |finding: &Finding| match finding.severity {
        Severity::Warning => format!("warning: {finding}"),
        Severity::Error => format!("error: {finding}"),
    };
    let found: Vec<String> = findings(&ranks).iter().map(told).collect();
    assert_eq!(found.len(), expected.len(), "{found:?}");
    for (found, expected) in found.iter().zip(expected) {
        assert!(found.starts_with(expected), "{found}\ninstead of\n{expected}");
    }
    // Facts are sent to the other ranks before clocks are compared.
    ranks.iter_mut().for_each(|rank| rank.clock_ahead_s = None);
    let again: Vec<Facts> = ranks.iter().map(|rank| Facts::from_bytes(&rank.to_bytes())).collect();
    assert_eq!(again, ranks);
}

#[test]
fn disks_have_room_for_three_checkpoints() {
    assert_eq!(disk_space("runs/x", 30, 10), None);
    let short = disk_space("runs/x", 2_900 << 20, 1 << 30).unwrap();
    assert_eq!(short.severity, Severity::Warning);
    assert!(
        short.text.contains("2.8 GiB are free on its disk, and a checkpoint of this run needs 1.0 GiB"),
        "{short}"
    );
    assert_eq!(disk_space("runs/x", 0, 0).unwrap().severity, Severity::Error);
    let none = disk_space("runs/x", 3 << 20, 27 << 20).unwrap();
    assert_eq!(none.severity, Severity::Error);
    assert!(
        none.text.contains("3.0 MiB are free on its disk, and one checkpoint of this run needs 27.0 MiB"),
        "{none}"
    );
    assert!(free_space(Path::new("/")).is_some());
    assert_eq!(free_space(Path::new("/no/such")), None);
}

#[test]
fn lists_of_cores_are_read() {
    assert_eq!(facts::numbers("\t0-2,5"), [0, 1, 2, 5]);
    assert!(facts::numbers("").is_empty());
}

/// All ranks come to the same report, and leave nothing behind.
#[rstest]
fn ranks_examine_their_environment(#[values(1, 3)] count: usize) {
    let folder = tempfile::tempdir().unwrap();
    let options = Options { folder: Some(folder.path().join("runs/x")), clocks: true };
    let reports = isobar_collectives::threads::run(count, std::time::Duration::from_secs(60), |world| {
        let _rank = DistributedManager::bind_thread(&world);
        let manager = DistributedManager::get().unwrap();
        examine(&manager, &DistributedConfig::default(), &options).unwrap()
    });
    for report in &reports {
        assert_eq!(report, &reports[0]);
        assert_eq!(
            report.ranks.iter().map(|rank| rank.rank).collect::<Vec<_>>(),
            (0..count).collect::<Vec<_>>()
        );
        assert_eq!(report.of(Severity::Error).count(), 0, "{report:?}");
        for rank in &report.ranks {
            assert!(rank.clock_ahead_s.unwrap().abs() < 30.0, "{rank:?}");
            assert!(rank.folder.as_ref().unwrap().shared && !rank.cores.is_empty(), "{rank:?}");
        }
    }
    assert_eq!(std::fs::read_dir(folder.path().join("runs/x")).unwrap().count(), 0);
}

#[test]
fn a_folder_that_is_a_file_is_an_error_on_all_ranks() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let options = Options { folder: Some(file.path().join("x")), clocks: false };
    let reports = isobar_collectives::threads::run(2, std::time::Duration::from_secs(60), |world| {
        let _rank = DistributedManager::bind_thread(&world);
        examine(&DistributedManager::get().unwrap(), &DistributedConfig::default(), &options).unwrap()
    });
    for report in reports {
        let texts: Vec<&str> = report.of(Severity::Error).map(|finding| finding.text.as_str()).collect();
        assert_eq!(texts.len(), 1, "{texts:?}");
        assert!(texts[0].starts_with("rank 0 (") && texts[0].contains("cannot write to "), "{texts:?}");
    }
}
