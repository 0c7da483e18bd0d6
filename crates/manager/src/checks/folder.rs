//! Check that all ranks see the same folder, and can write to it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use isobar_collectives::Group;

use super::{FolderFacts, free_space};
use crate::Result;

/// A file that rank 0 has left in the folder for the others to find; removed when this is dropped.
#[derive(Debug)]
pub(super) struct Token {
    rank: usize,
    folder: PathBuf,
    /// The name of the file; none where rank 0 could not write it.
    name: Option<String>,
    problem: Option<String>,
}

/// Number of attempts to find a file, since network file systems may be late.
const LOOKS: u32 = 8;
const PAUSE: Duration = Duration::from_millis(20);

impl Token {
    /// All ranks call.
    pub(super) fn leave(world: &Group, folder: &Path) -> Result<Self> {
        let mut token = Self { rank: world.rank(), folder: folder.to_owned(), name: None, problem: None };
        let mut name = String::new();
        if world.rank() == 0 {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
            name = format!(".isobar-check-{:x}-{now:x}", std::process::id());
            let written = fs::create_dir_all(folder).and_then(|()| fs::write(folder.join(&name), "isobar\n"));
            if let Err(error) = written {
                token.problem = Some(error.to_string());
                name.clear();
            }
        }
        let told = world.broadcast_bytes(name.as_bytes(), 0)?;
        token.name = Some(String::from_utf8_lossy(&told).into_owned()).filter(|name| !name.is_empty());
        Ok(token)
    }

    /// Collects this rank's view; the first rank of each host also tries to write.
    pub(super) fn look(&self, local_rank: usize) -> FolderFacts {
        let mut facts = FolderFacts {
            path: self.folder.display().to_string(),
            problem: self.problem.clone(),
            // If rank 0 cannot write, there is no file to see.
            shared: true,
            free: free_space(&self.folder),
        };
        if let Some(name) = self.name.as_deref().filter(|_| self.rank > 0) {
            facts.shared = self.finds(name);
            if facts.shared && local_rank == 0 {
                let own = self.folder.join(format!("{name}-{}", self.rank));
                let tried = fs::write(&own, "isobar\n").and_then(|()| fs::remove_file(&own));
                facts.problem = tried.err().map(|error| error.to_string());
            }
        }
        facts
    }

    fn finds(&self, name: &str) -> bool {
        let file = self.folder.join(name);
        (0..LOOKS).any(|look| {
            if look > 0 {
                // Up to 2.5 s in all. Opening a folder makes NFS ask its server again.
                std::thread::sleep(PAUSE * 2_u32.pow(look - 1));
                let _ = fs::read_dir(&self.folder);
            }
            file.exists()
        })
    }
}

impl Drop for Token {
    fn drop(&mut self) {
        if let Some(name) = self.name.as_deref().filter(|_| self.rank == 0) {
            // A file that stays is in nobody's way.
            let _ = fs::remove_file(self.folder.join(name));
        }
    }
}
