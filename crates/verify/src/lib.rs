//! `isobar verify`: golden cases on every layout, over every backend.
//!
//! It depends on no run or data set: cases come from files.

mod bytes;
mod case;
mod check;
mod launch;
mod layout;
#[cfg(test)]
mod made;
mod mesh;
mod operator;
#[cfg(test)]
mod planted;
mod report;
mod table;
mod worker;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use indicatif::ProgressBar;

use self::case::Header;
use self::launch::Backend;
use self::mesh::Mesh;
use self::report::{CaseReport, LayoutReport, Report, Verdict};
use self::worker::{Event, Job, Task};
use isobar_command::exit::{self, Because, Exit};
use isobar_command::{outputs, terminal};

/// Environment variable for the number of threads of each rank; 1 where it is not set.
const THREADS: &str = "OMP_NUM_THREADS";

/// Arguments of `isobar verify`.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// Golden cases: .safetensors files, or folders of them
    #[arg(required_unless_present = "list", value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// Show the operators of sharded tensors, the program's own among them, as a table in Markdown, and run nothing
    #[arg(long)]
    list: bool,
    /// Transport between the ranks, which this command starts itself
    #[arg(long, value_enum, default_value = "threads")]
    backend: Backend,
    /// Numbers of ranks, and meshes of ranks, on which to run each case
    #[arg(long, value_delimiter = ',', default_value = "1,2,3,4,2x2", value_name = "N,…")]
    ranks: Vec<Mesh>,
    /// Only the cases of these operators, by the names in the cases
    #[arg(long, value_delimiter = ',', value_name = "OP,…")]
    ops: Vec<String>,
    /// Write every layout that was run, with its error and its bytes, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the gathered outputs and gradients of every layout as DIR/CASE/RANKS-N.safetensors
    #[arg(long, value_name = "DIR")]
    dump: Option<PathBuf>,
    /// Seconds that a rank waits for another
    #[arg(long, default_value_t = 60.0, value_name = "SECONDS", value_parser = seconds)]
    timeout: f64,
}

/// Arguments of a rank that `isobar verify` has started.
#[derive(Debug, Args)]
pub struct RankArgs {
    /// The folder of the job
    folder: PathBuf,
    #[arg(long, value_enum)]
    backend: Backend,
    #[arg(long, value_parser = seconds)]
    timeout: f64,
}

/// Runs the command.
///
/// # Errors
///
/// A case that cannot be read; ranks that cannot start; a report that cannot be written.
pub fn run(args: &VerifyArgs) -> Result<Exit> {
    if args.list {
        terminal::line(table::markdown().trim_end());
        return Ok(Exit::Good);
    }
    if std::env::var_os(THREADS).is_none() {
        tch::set_num_threads(1);
    }
    let mut cases = select(args)?;
    let read: Vec<PathBuf> = cases.iter().map(|case| case.path.clone()).collect();
    outputs::check("--json", args.json.as_slice(), &read)?;
    let deadline = Duration::from_secs_f64(args.timeout);
    let spinner = ProgressBar::new_spinner();
    spinner.enable_steady_tick(Duration::from_millis(200));
    for (ranks, tasks) in tasks(&cases, &args.ranks) {
        spinner.set_message(format!("{} cases on {ranks} ranks", tasks.len()));
        run_world(args, deadline, ranks, tasks, &mut cases)?;
    }
    spinner.finish_and_clear();
    let reports: Vec<CaseReport> = cases.into_iter().map(Selected::report).collect();
    let report = Report::new(args.backend.name(), reports);
    let width = report.cases.iter().map(|case| case.name.len()).max().unwrap_or(0);
    for case in &report.cases {
        terminal::line(&case.line(width));
    }
    terminal::line(&report.summary());
    if let Some(file) = &args.json {
        let text = serde_json::to_string_pretty(&report)? + "\n";
        isobar_files::write(file, text).with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(if report.failed == 0 { Exit::Good } else { Exit::Failed })
}

/// Runs one rank of a world that [`run`] started.
///
/// # Errors
///
/// The parent process or another rank is lost.
pub fn run_rank(args: &RankArgs) -> Result<Exit> {
    launch::serve(args.backend, Duration::from_secs_f64(args.timeout), &args.folder)?;
    Ok(Exit::Good)
}

/// A case that was asked for, and what was found so far.
struct Selected {
    path: PathBuf,
    header: Header,
    layouts: Vec<LayoutReport>,
    notes: Vec<String>,
    problem: Option<String>,
    supported: bool,
}

impl Selected {
    fn report(self) -> CaseReport {
        let wrong = self.problem.is_some() || self.layouts.iter().any(|layout| !layout.problems.is_empty());
        let verdict = match (self.supported, wrong || self.layouts.is_empty()) {
            (false, _) => Verdict::Unsupported,
            (true, true) => Verdict::Fail,
            (true, false) => Verdict::Pass,
        };
        CaseReport {
            name: case::name(&self.path),
            op: self.header.op,
            verdict,
            error: self.layouts.iter().map(|layout| layout.error).fold(0.0, f64::max),
            notes: self.notes,
            problem: self.problem,
            layouts: self.layouts,
        }
    }
}

/// The cases that the command line names.
fn select(args: &VerifyArgs) -> Result<Vec<Selected>> {
    let mut selected = Vec::new();
    for path in case::files(&args.paths)? {
        let header = Header::read(&path)?;
        if args.ops.is_empty() || args.ops.contains(&header.op) {
            let operator = operator::find(&header.op);
            let notes = match operator {
                Some(operator) => operator.notes(&header, &args.ranks)?,
                None => vec![format!("no operator {}", header.op)],
            };
            let supported = operator.is_some();
            selected.push(Selected { path, header, layouts: Vec::new(), notes, problem: None, supported });
        }
    }
    let missing = args.ops.iter().find(|&op| !selected.iter().any(|case| case.header.op == *op));
    if let Some(op) = missing {
        bail!(Exit::Failed.because(format!("no case of the operator `{op}` is among the paths given")));
    }
    Ok(selected)
}

/// Returns the tasks of each world, by its number of ranks: indices of cases, each with its meshes.
fn tasks(cases: &[Selected], ranks: &[Mesh]) -> BTreeMap<usize, Vec<(usize, Vec<Mesh>)>> {
    let mut worlds: BTreeMap<usize, Vec<(usize, Vec<Mesh>)>> = BTreeMap::new();
    for (index, case) in cases.iter().enumerate() {
        let operator = operator::find(&case.header.op);
        let meshes =
            operator.and_then(|operator| operator.meshes(&case.header, ranks).ok()).unwrap_or_default();
        let mut sizes: Vec<usize> = meshes.iter().map(Mesh::ranks).collect();
        sizes.sort_unstable();
        sizes.dedup();
        for size in sizes {
            let of_size = meshes.iter().filter(|mesh| mesh.ranks() == size).cloned().collect();
            worlds.entry(size).or_default().push((index, of_size));
        }
    }
    worlds
}

/// Runs tasks on worlds of so many ranks: on one, unless a case ends it; the rest then goes to a fresh one.
fn run_world(
    args: &VerifyArgs,
    deadline: Duration,
    ranks: usize,
    mut tasks: Vec<(usize, Vec<Mesh>)>,
    cases: &mut [Selected],
) -> Result<()> {
    while !tasks.is_empty() {
        let to_task = |(index, meshes): &(usize, Vec<Mesh>)| Task {
            path: cases[*index].path.clone(),
            meshes: meshes.clone(),
        };
        let job = Job { tasks: tasks.iter().map(to_task).collect(), dump: args.dump.clone() };
        let mut done = 0;
        let mut begun = false;
        let mut broken = None;
        let mut sink = |event| {
            match event {
                Event::Begun(_) => begun = true,
                Event::Layout(layout) => cases[tasks[done].0].layouts.push(*layout),
                Event::Ended => done += 1,
                Event::Broken { layout, error } => broken = Some(format!("{layout}: {error}")),
            }
            Ok(())
        };
        let result = args.backend.run(ranks, deadline, &job, &mut sink);
        match result {
            Ok(()) if done == tasks.len() => return Ok(()),
            // A world that never began is no fault of a case.
            Err(error) if !begun => {
                let why = format!("{ranks} ranks could not start: {}", exit::text(&error));
                let known = exit::of(&error);
                bail!(if known == Exit::Failed { Exit::Lost } else { known }.because(why));
            }
            Ok(()) => {
                broken.get_or_insert_with(|| format!("{ranks} ranks ended before all cases were run"));
            }
            Err(error) => {
                broken.get_or_insert_with(|| format!("{ranks} ranks: {}", exit::text(&error)));
            }
        }
        if let Some((index, _)) = tasks.get(done) {
            let problem = &mut cases[*index].problem;
            let text = broken.unwrap_or_default();
            *problem = Some(problem.take().map_or(text.clone(), |earlier| format!("{earlier}; {text}")));
        }
        tasks.drain(..(done + 1).min(tasks.len()));
    }
    Ok(())
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(value) if (0.1..1e6).contains(&value) => Ok(value),
        _ => Err("expected a number of seconds from 0.1 to 1000000".to_owned()),
    }
}
