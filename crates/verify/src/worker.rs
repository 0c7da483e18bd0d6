//! Worker of one world's ranks: runs the layouts of a list of cases.

use std::path::PathBuf;

use anyhow::{Context, Result};
use isobar_collectives::Group;
use serde::{Deserialize, Serialize};

use super::case::{self, Case};
use super::check;
use super::mesh::Mesh;
use super::operator::{self, Rank};
use super::report::LayoutReport;
use isobar_command::exit;

/// A case for the ranks of one world.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Task {
    /// Its file.
    pub(crate) path: PathBuf,
    /// The arrangements of the ranks on which it runs.
    pub(crate) meshes: Vec<Mesh>,
}

/// Task of the ranks of one world.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Job {
    /// The cases.
    pub(crate) tasks: Vec<Task>,
    /// Folder of gathered tensors.
    pub(crate) dump: Option<PathBuf>,
}

/// Progress events from rank 0 of a world.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Event {
    /// The case of that number in the job begins.
    Begun(usize),
    /// A layout of it was run.
    Layout(Box<LayoutReport>),
    /// All its layouts were run.
    Ended,
    /// An error ended the world; `layout` says where.
    Broken {
        /// The layout in a few words.
        layout: String,
        /// The error.
        error: String,
    },
}

/// Runs a job; all ranks of the world call. Rank 0 tells `sink`. An error ends the world, since its ranks may be at
/// different places; what is left of the job is for another one.
pub(crate) fn run(world: &Group, job: &Job, sink: &mut dyn FnMut(Event) -> Result<()>) -> Result<()> {
    let mut tell = |event| if world.rank() == 0 { sink(event) } else { Ok(()) };
    let mut meshes: Vec<(Mesh, Rank)> = Vec::new();
    for (number, task) in job.tasks.iter().enumerate() {
        tell(Event::Begun(number))?;
        let mut at = "before the first layout".to_owned();
        match run_case(world, task, job, &mut meshes, &mut at, &mut tell) {
            Ok(()) => tell(Event::Ended)?,
            Err(error) => {
                let text = exit::text(&error);
                world.leave(&text);
                tell(Event::Broken { layout: at, error: text })?;
                return Err(error.context(format!("the case {} failed", case::name(&task.path))));
            }
        }
    }
    Ok(())
}

fn run_case(
    world: &Group,
    task: &Task,
    job: &Job,
    meshes: &mut Vec<(Mesh, Rank)>,
    at: &mut String,
    tell: &mut dyn FnMut(Event) -> Result<()>,
) -> Result<()> {
    let case = Case::read(&task.path)?;
    let operator =
        operator::find(&case.header.op).with_context(|| format!("unknown operator {}", case.header.op))?;
    for mesh in &task.meshes {
        let known = meshes.iter().position(|(other, _)| other == mesh);
        let place = match known {
            Some(place) => place,
            None => {
                meshes.push((mesh.clone(), Rank::new(world, mesh)?));
                meshes.len() - 1
            }
        };
        for (n, layout) in operator.layouts(&case.header, mesh)?.iter().enumerate() {
            *at = layout.title(n);
            let report = check::layout(&meshes[place].1, operator, &case, layout, n, job.dump.as_deref())?;
            if let Some(report) = report {
                tell(Event::Layout(Box::new(report)))?;
            }
        }
    }
    Ok(())
}
