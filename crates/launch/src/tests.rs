use rstest::rstest;

use super::*;
use crate::Environment;

fn environment(text: &str) -> Environment {
    text.split_whitespace().filter_map(|pair| pair.split_once('=')).collect()
}

fn found(text: &str) -> Result<Launch, String> {
    let environment = environment(text);
    let forced = forced_method(&environment).map_err(|error| error.to_string())?;
    detect(&environment, forced).map_err(|error| error.to_string())
}

const ENV: &str = "RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500";
const SLURM: &str = "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=2 SLURM_NPROCS=4 SLURM_STEP_NUM_TASKS=4 SLURM_LOCALID=0 \
                     SLURM_LAUNCH_NODE_IPADDR=10.0.0.2";
const BATCH: &str = "SLURM_JOB_ID=7 SLURM_PROCID=0 SLURM_NPROCS=4 SLURM_LOCALID=0";
const OPENMPI: &str = "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=3 \
                       OMPI_COMM_WORLD_LOCAL_SIZE=4 PMIX_RANK=3 PMIX_NAMESPACE=123";
const HYDRA: &str = "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 PMI_FD=7";

#[rstest]
#[case::nothing("", Method::Single, 0, Some(1), Some(0), None)]
#[case::env(ENV, Method::Env, 1, Some(4), Some(1), Some("10.0.0.1"))]
#[case::env_local_rank_on_one_host(
    "RANK=1 WORLD_SIZE=4 MASTER_ADDR=localhost MASTER_PORT=1",
    Method::Env,
    1,
    Some(4),
    Some(1),
    Some("localhost")
)]
#[case::env_local_rank_unknown(
    "RANK=1 WORLD_SIZE=4 MASTER_ADDR=10.0.0.1 MASTER_PORT=1",
    Method::Env,
    1,
    Some(4),
    None,
    Some("10.0.0.1")
)]
#[case::env_of_one("RANK=0 WORLD_SIZE=1", Method::Env, 0, Some(1), Some(0), None)]
#[case::slurm(SLURM, Method::Slurm, 2, Some(4), Some(0), Some("10.0.0.2"))]
#[case::slurm_without_step_number(
    "SLURM_PROCID=2 SLURM_NPROCS=4 SLURM_LOCALID=0 SLURM_LAUNCH_NODE_IPADDR=10.0.0.2",
    Method::Slurm,
    2,
    Some(4),
    Some(0),
    Some("10.0.0.2")
)]
#[case::slurm_step_number_alone(
    "SLURM_STEP_ID=0 SLURM_PROCID=2 SLURM_STEP_NUM_TASKS=4 SLURM_LOCALID=0 \
     SLURM_LAUNCH_NODE_IPADDR=10.0.0.2",
    Method::Slurm,
    2,
    Some(4),
    Some(0),
    Some("10.0.0.2")
)]
#[case::slurm_tasks_alone(
    "SLURM_STEPID=0 SLURM_PROCID=2 SLURM_NTASKS=4 SLURM_LOCALID=0 SLURM_LAUNCH_NODE_IPADDR=10.0.0.2",
    Method::Slurm,
    2,
    Some(4),
    Some(0),
    Some("10.0.0.2")
)]
#[case::slurm_step_smaller_than_its_job(
    "SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_NTASKS=4 SLURM_NPROCS=4 SLURM_LOCALID=0",
    Method::Slurm,
    1,
    Some(2),
    Some(0),
    None
)]
#[case::openmpi(OPENMPI, Method::OpenMpi, 3, Some(4), Some(3), Some("127.0.0.1"))]
#[case::mpich(HYDRA, Method::Mpich, 1, Some(2), Some(1), Some("127.0.0.1"))]
#[case::pmi("PMI_RANK=1 PMI_SIZE=2", Method::Pmi, 1, Some(2), None, None)]
#[case::pmix("PMIX_RANK=1 PMIX_NAMESPACE=x", Method::Pmix, 1, None, None, None)]
#[case::plain_process_in_batch_shell(BATCH, Method::Single, 0, Some(1), Some(0), None)]
#[case::plain_process_in_salloc("SLURM_JOB_ID=7 SLURM_NPROCS=4", Method::Single, 0, Some(1), Some(0), None)]
#[case::interactive_step(
    "SLURM_JOB_ID=7 SLURM_STEP_ID=4294967290 SLURM_PROCID=0 SLURM_NPROCS=1 SLURM_LAUNCH_NODE_IPADDR=10.0.0.2",
    Method::Single,
    0,
    Some(1),
    Some(0),
    None
)]
#[case::empty_variables_are_unset("RANK= WORLD_SIZE=", Method::Single, 0, Some(1), Some(0), None)]
fn detects(
    #[case] variables: &str,
    #[case] method: Method,
    #[case] rank: usize,
    #[case] size: Option<usize>,
    #[case] local_rank: Option<usize>,
    #[case] addr: Option<&str>,
) {
    let launch = found(variables).unwrap();
    assert_eq!(
        (launch.method, launch.rank, launch.world_size, launch.local_rank, launch.addr.as_deref()),
        (method, rank, size, local_rank, addr)
    );
}

#[rstest]
#[case::env_before_slurm(&[ENV, "TORCHELASTIC_RUN_ID=x", SLURM], Method::Env, 1)]
#[case::env_before_openmpi(&["RANK=3 WORLD_SIZE=4 MASTER_ADDR=localhost MASTER_PORT=1", OPENMPI], Method::Env, 3)]
#[case::mpirun_in_batch_shell(&[BATCH, OPENMPI], Method::OpenMpi, 3)]
#[case::mpirun_daemon_started_by_srun(&[SLURM, OPENMPI], Method::OpenMpi, 3)]
#[case::srun_step_with_its_own_pmix(
    &[OPENMPI, "PMIX_NAMESPACE=slurm.pmix.7.0", SLURM], Method::Slurm, 2
)]
#[case::slurm_before_openmpi_where_they_agree(
    &[SLURM, "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4"], Method::Slurm, 2
)]
#[case::slurm_before_openmpi_by_the_step(
    &["SLURM_STEPID=0 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_NPROCS=4 SLURM_LOCALID=0",
      "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2"], Method::Slurm, 1
)]
#[case::intel(&[HYDRA, "I_MPI_HYDRA_BOOTSTRAP=ssh"], Method::IntelMpi, 1)]
#[case::forced_openmpi(&[ENV, OPENMPI, "ISOBAR_DISTRIBUTED_INITIALIZATION_METHOD=OPENMPI"], Method::OpenMpi, 3)]
#[case::forced_slurm(&[ENV, SLURM, "PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD=slurm"], Method::Slurm, 2)]
#[case::forced_env(&[SLURM, ENV, "ISOBAR_DISTRIBUTED_INITIALIZATION_METHOD=ENV"], Method::Env, 1)]
#[case::forced_single(&[OPENMPI, "ISOBAR_DISTRIBUTED_INITIALIZATION_METHOD=single"], Method::Single, 0)]
fn chooses_between_launchers(#[case] variables: &[&str], #[case] method: Method, #[case] rank: usize) {
    let launch = found(&variables.join(" ")).unwrap();
    assert_eq!((launch.method, launch.rank), (method, rank));
}

#[rstest]
#[case::no_world_size("RANK=0", "ENV launch: RANK is set but WORLD_SIZE is not")]
#[case::no_rank("WORLD_SIZE=2", "ENV launch: WORLD_SIZE is set but RANK is not")]
#[case::local_rank_alone("LOCAL_RANK=1 MASTER_ADDR=x MASTER_PORT=1", "LOCAL_RANK is set but RANK is not")]
#[case::no_addr("RANK=0 WORLD_SIZE=2 MASTER_PORT=1", "RANK is set but MASTER_ADDR is not")]
#[case::no_port("RANK=0 WORLD_SIZE=2 MASTER_ADDR=x", "RANK is set but MASTER_PORT is not")]
#[case::half_env_under_mpirun(
    "RANK=0 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2",
    "RANK is set but WORLD_SIZE is not"
)]
#[case::no_number("RANK=zero WORLD_SIZE=2", "RANK=zero is not a number from 0")]
#[case::negative("RANK=-1 WORLD_SIZE=2", "RANK=-1 is not a number from 0")]
#[case::bad_port("RANK=0 WORLD_SIZE=2 MASTER_ADDR=x MASTER_PORT=99999", "MASTER_PORT=99999 is not a port")]
#[case::rank_too_large("RANK=2 WORLD_SIZE=2", "RANK is 2, but there are 2 ranks, numbered from 0")]
#[case::no_ranks("RANK=0 WORLD_SIZE=0", "WORLD_SIZE is 0, expected 1 to 1048576")]
#[case::too_many_ranks("RANK=0 WORLD_SIZE=999999999999", "WORLD_SIZE is 999999999999, expected 1 to 1048576")]
#[case::left_over_env_under_mpirun(
    "RANK=0 WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2",
    "WORLD_SIZE=1, but OMPI_COMM_WORLD_SIZE=2: two launchers disagree"
)]
#[case::left_over_env_under_srun(
    "RANK=0 WORLD_SIZE=1 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NPROCS=2 SLURM_STEP_NUM_TASKS=2",
    "WORLD_SIZE=1, but SLURM_STEP_NUM_TASKS=2: two launchers disagree"
)]
#[case::left_over_env_under_srun_without_step_number(
    "RANK=0 WORLD_SIZE=1 SLURM_STEPID=0 SLURM_PROCID=0 SLURM_NTASKS=2",
    "WORLD_SIZE=1, but SLURM_NTASKS=2: two launchers disagree"
)]
#[case::slurm_tasks_no_number(
    "SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=two",
    "SLURM_NTASKS=two is not a number"
)]
#[case::slurm_no_size(
    "SLURM_PROCID=1 SLURM_LAUNCH_NODE_IPADDR=x",
    "SLURM launch: SLURM_PROCID is set but SLURM_NPROCS is not"
)]
#[case::slurm_no_local(
    "SLURM_PROCID=1 SLURM_NPROCS=2 SLURM_LAUNCH_NODE_IPADDR=x",
    "SLURM_PROCID is set but SLURM_LOCALID is not"
)]
#[case::openmpi_no_size(
    "OMPI_COMM_WORLD_RANK=1",
    "OMPI_COMM_WORLD_RANK is set but OMPI_COMM_WORLD_SIZE is not"
)]
#[case::pmi_no_rank("PMI_SIZE=2", "PMI_SIZE is set but PMI_RANK is not")]
#[case::forced_but_absent(
    "ISOBAR_DISTRIBUTED_INITIALIZATION_METHOD=SLURM",
    "initialization method SLURM is forced, but SLURM_PROCID is not set; start the ranks by `srun"
)]
#[case::unknown_method(
    "ISOBAR_DISTRIBUTED_INITIALIZATION_METHOD=SLRUM",
    "=SLRUM is not an initialization method; expected one of ENV, SLURM, OPENMPI, PMIX, INTELMPI, MPICH, PMI, \
     SINGLE; did you mean SLURM?"
)]
#[case::two_methods(
    "ISOBAR_DISTRIBUTED_INITIALIZATION_METHOD=SLURM PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD=ENV",
    "disagree; unset one"
)]
fn refuses(#[case] variables: &str, #[case] expected: &str) {
    let error = found(variables).unwrap_err();
    assert!(error.contains(expected), "{error}");
}

#[test]
fn jobs_get_ports_of_their_own() {
    let port = |text: &str| found(text).unwrap().port.unwrap();
    let first = port(SLURM);
    assert_eq!(first, port(&format!("{SLURM} SLURM_LOCALID=1")));
    assert_ne!(first, port(&format!("{SLURM} SLURM_STEP_ID=1")));
    assert_eq!(first, port(&SLURM.replace("SLURM_STEP_ID", "SLURM_STEPID")));
    assert!((15_000..30_000).contains(&first));
    assert_eq!(port(&format!("{SLURM} MASTER_PORT=4000")), 4000);
}

const SLURM_OF_ONE: &str = "SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NPROCS=1 SLURM_LOCALID=0";
const PMIX: &str = " PMIX_RANK=2 PMIX_NAMESPACE=slurm.pmix.7.0";

#[rstest]
#[case::alone("", BackendChoice::Auto, true, "single")]
#[case::env(ENV, BackendChoice::Auto, true, "gloo 10.0.0.1:29500")]
#[case::env_of_one("RANK=0 WORLD_SIZE=1", BackendChoice::Auto, true, "single")]
#[case::mpirun(OPENMPI, BackendChoice::Auto, true, "mpi")]
#[case::mpirun_of_one("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1", BackendChoice::Auto, true, "mpi")]
#[case::mpirun_without_mpi(&format!("{OPENMPI} MASTER_PORT=4000"), BackendChoice::Auto, false, "gloo 127.0.0.1:4000")]
#[case::gloo_under_mpirun(&format!("{OPENMPI} MASTER_PORT=4000"), BackendChoice::Gloo, true, "gloo 127.0.0.1:4000")]
#[case::srun_with_pmix(&format!("{SLURM}{PMIX}"), BackendChoice::Auto, true, "mpi")]
#[case::srun_with_pmi2(&format!("{SLURM} PMI_RANK=2 PMI_SIZE=4"), BackendChoice::Auto, true, "mpi")]
#[case::srun_without_mpi(&format!("{SLURM} MASTER_PORT=4000"), BackendChoice::Auto, false, "gloo 10.0.0.2:4000")]
#[case::srun_gloo_without_pmix(
    &format!("{SLURM} MASTER_PORT=4000"),
    BackendChoice::Gloo,
    true,
    "gloo 10.0.0.2:4000"
)]
#[case::srun_without_pmix(SLURM, BackendChoice::Auto, true, "error: srun started no PMIx server")]
#[case::srun_of_one_without_pmix(SLURM_OF_ONE, BackendChoice::Auto, true, "single")]
#[case::pmix("PMIX_RANK=1", BackendChoice::Auto, true, "mpi")]
#[case::nccl_under_mpirun(OPENMPI, BackendChoice::Nccl, true, "mpi")]
#[case::nccl_env(ENV, BackendChoice::Nccl, true, "gloo 10.0.0.1:29500")]
#[case::single("", BackendChoice::Single, true, "single")]
#[case::single_mpi("", BackendChoice::Mpi, true, "mpi")]
#[case::single_gloo("", BackendChoice::Gloo, true, "gloo 127.0.0.1:12355")]
#[case::srun_mpi_without_pmix(SLURM, BackendChoice::Mpi, true, "error: srun started no PMIx server")]
#[case::env_mpi(ENV, BackendChoice::Mpi, true, "error: no MPI process manager started it")]
#[case::mpi_not_built(OPENMPI, BackendChoice::Mpi, false, "error: this program was built without MPI")]
#[case::several_single(OPENMPI, BackendChoice::Single, true, "error: each would train alone")]
#[case::unknown_addr(
    "PMI_RANK=0 PMI_SIZE=2",
    BackendChoice::Gloo,
    true,
    "error: the address of rank 0 is not known"
)]
#[case::unknown_size("PMIX_RANK=1", BackendChoice::Auto, false, "error: PMIx does not say how many ranks")]
fn takes_the_transport(
    #[case] variables: &str,
    #[case] backend: BackendChoice,
    #[case] mpi: bool,
    #[case] expected: &str,
) {
    let options = TransportOptions { backend, ..TransportOptions::default() };
    let text = match transport(&found(variables).unwrap(), &options, Available { mpi }) {
        Ok(Transport::Single) => "single".to_owned(),
        Ok(Transport::Mpi) => "mpi".to_owned(),
        Ok(Transport::Gloo { addr, port }) => format!("gloo {addr}:{port}"),
        Err(error) => format!("error: {error}"),
    };
    match expected.strip_prefix("error: ") {
        Some(part) => assert!(text.starts_with("error: ") && text.contains(part), "{text}"),
        None => assert_eq!(text, expected),
    }
}

#[test]
fn the_mend_for_srun_names_pmix() {
    let options = TransportOptions { backend: BackendChoice::Mpi, ..TransportOptions::default() };
    let error = transport(&found(SLURM).unwrap(), &options, Available { mpi: true }).unwrap_err();
    insta::assert_snapshot!(error, @"backend mpi cannot be used under a SLURM launch of 4 ranks: srun started no PMIx server (no PMIX_ variables are set), and every rank would think it is alone; start with `srun --mpi=pmix` (see `srun --mpi=list`), or --set distributed.backend=gloo");
}

#[test]
fn a_port_that_torchruns_agent_keeps_is_left_to_it() {
    let port = |more: &str| {
        let variables =
            format!("RANK=1 WORLD_SIZE=2 MASTER_ADDR=x MASTER_PORT=29500 TORCHELASTIC_RUN_ID=a {more}");
        found(&variables).unwrap().port.unwrap()
    };
    assert_eq!((port(""), port("TORCHELASTIC_USE_AGENT_STORE=False")), (29500, 29500));
    let beside = port("TORCHELASTIC_USE_AGENT_STORE=True LOCAL_RANK=1");
    assert_ne!(beside, 29500);
    // The port is the same on all ranks, also where the agents of two nodes count other restarts.
    assert_eq!(beside, port("TORCHELASTIC_USE_AGENT_STORE=True LOCAL_RANK=0"));
    assert_eq!(beside, port("TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RESTART_COUNT=1"));
}
