//! Ranks that are threads of one process. The receiver copies straight from the sender's tensor, whatever the strides of both:
//! one copy a message.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tch::{Device, Tensor};

use crate::local::memory::nbytes;
use crate::wire::{Backend, BackendKind, Carries, Failure, Notice, Request, Tag, Transfer};

/// State shared by the ranks of one world.
struct Hub {
    posts: Mutex<HashMap<(usize, usize, Tag), VecDeque<Post>>>,
    /// One for each rank.
    bells: Vec<Bell>,
    notices: Mutex<Vec<(usize, Notice)>>,
    notice_count: AtomicUsize,
}

/// Notices kept.
const MAX_NOTICES: usize = 4096;

/// Wakes a rank when a message, a notice or the receipt of one of its messages arrives.
#[derive(Default)]
struct Bell {
    /// Number of times that it rang.
    rings: Mutex<u64>,
    rang: Condvar,
}

impl Bell {
    fn ring(&self) {
        *self.rings.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.rang.notify_all();
    }

    /// Waits until it has rung more often than `heard`, for a moment at most; returns how often it rang.
    fn wait(&self, heard: u64) -> u64 {
        let rings = self.rings.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.rang.wait_timeout_while(rings, MOMENT, |rings| *rings == heard);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// Longest wait for a bell, which bounds how late a deadline is noticed.
const MOMENT: Duration = Duration::from_micros(200);

/// A send that waits for its receiver.
struct Post {
    tensor: Tensor,
    label: u64,
    taken: Arc<AtomicBool>,
}

impl Hub {
    fn new(ranks: usize) -> Self {
        Self {
            posts: Mutex::default(),
            bells: std::iter::repeat_with(Bell::default).take(ranks).collect(),
            notices: Mutex::default(),
            notice_count: AtomicUsize::new(0),
        }
    }

    fn ring(&self, rank: usize) {
        if let Some(bell) = self.bells.get(rank) {
            bell.ring();
        }
    }

    fn posts(&self) -> MutexGuard<'_, HashMap<(usize, usize, Tag), VecDeque<Post>>> {
        self.posts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn notice(&self, rank: usize, context: u32, sequence: u64) -> Option<Notice> {
        if self.notice_count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let notices = self.notices();
        let mine = |(to, notice): &&(usize, Notice)| *to == rank && notice.concerns(context, sequence);
        notices.iter().find(mine).map(|(_, notice)| notice.clone())
    }

    fn notices(&self) -> MutexGuard<'_, Vec<(usize, Notice)>> {
        self.notices.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(crate) struct Threads {
    rank: usize,
    hub: Arc<Hub>,
    /// Number of rings at this rank's last wait; everything before it has been polled.
    heard: AtomicU64,
}

impl Threads {
    /// Connects `ranks` ranks.
    pub(crate) fn connect(ranks: usize) -> Vec<Self> {
        let hub = Arc::new(Hub::new(ranks));
        (0..ranks).map(|rank| Self { rank, hub: hub.clone(), heard: AtomicU64::new(0) }).collect()
    }
}

impl Backend for Threads {
    fn kind(&self) -> BackendKind {
        BackendKind::Threads
    }

    fn carries(&self) -> Carries {
        Carries::Strided
    }

    fn start(
        &self,
        tag: Tag,
        sends: Vec<Transfer>,
        receives: Vec<Transfer>,
    ) -> Result<Box<dyn Request>, Failure> {
        if sends.iter().chain(&receives).any(|t| t.tensor.device() != Device::Cpu) {
            return Err(Failure("ranks that are threads exchange CPU tensors only".into()));
        }
        let mut taken = Vec::with_capacity(sends.len());
        if !sends.is_empty() {
            let peers: Vec<usize> = sends.iter().map(|send| send.peer).collect();
            let mut posts = self.hub.posts();
            for send in sends {
                let flag = Arc::new(AtomicBool::new(false));
                taken.push(flag.clone());
                posts.entry((self.rank, send.peer, tag)).or_default().push_back(Post {
                    tensor: send.tensor,
                    label: send.label,
                    taken: flag,
                });
            }
            drop(posts);
            peers.into_iter().for_each(|peer| self.hub.ring(peer));
        }
        Ok(Box::new(Pending {
            rank: self.rank,
            tag,
            hub: self.hub.clone(),
            taken,
            receives: receives.into_iter().map(Some).collect(),
        }))
    }

    fn notify(&self, peers: &[usize], notice: &Notice) {
        let mut notices = self.hub.notices();
        notices.extend(peers.iter().map(|&peer| (peer, notice.clone())));
        if notices.len() > MAX_NOTICES {
            // The older ones concern operations that are long over.
            let mut older = MAX_NOTICES / 2;
            notices.retain(|(_, notice)| {
                older = older.saturating_sub(1);
                older == 0 || notice.ends_group()
            });
        }
        self.hub.notice_count.store(notices.len(), Ordering::Release);
        drop(notices);
        peers.iter().for_each(|&peer| self.hub.ring(peer));
    }

    fn notice(&self, context: u32, sequence: u64) -> Option<Notice> {
        self.hub.notice(self.rank, context, sequence)
    }

    fn idle(&self, _round: u32) {
        // The bell has rung for what came since the poll.
        let Some(bell) = self.hub.bells.get(self.rank) else { return };
        self.heard.store(bell.wait(self.heard.load(Ordering::Acquire)), Ordering::Release);
    }
}

struct Pending {
    rank: usize,
    tag: Tag,
    hub: Arc<Hub>,
    taken: Vec<Arc<AtomicBool>>,
    receives: Vec<Option<Transfer>>,
}

impl Request for Pending {
    fn poll(&mut self) -> Result<bool, Failure> {
        let mut blocked = Vec::new();
        for slot in &mut self.receives {
            let Some(receive) = slot else { continue };
            if blocked.contains(&receive.peer) {
                continue;
            }
            let key = (receive.peer, self.rank, self.tag);
            let post = {
                let mut posts = self.hub.posts();
                let post = posts.get_mut(&key).and_then(VecDeque::pop_front);
                if posts.get(&key).is_some_and(VecDeque::is_empty) {
                    posts.remove(&key);
                }
                post
            };
            match post {
                Some(post) => {
                    take(&post, receive)?;
                    post.taken.store(true, Ordering::Release);
                    self.hub.ring(receive.peer);
                    *slot = None;
                }
                // Messages of a peer with the same tag are received in order.
                None => blocked.push(receive.peer),
            }
        }
        Ok(blocked.is_empty() && self.taken.iter().all(|taken| taken.load(Ordering::Acquire)))
    }

    fn awaited(&mut self) -> Vec<usize> {
        self.receives.iter().flatten().map(|receive| receive.peer).collect()
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        // A message that was not received stays for a later receive, unless its receiver has given up.
        let Tag { context, sequence, .. } = self.tag;
        let untaken = self.taken.iter().any(|taken| !taken.load(Ordering::Acquire));
        if untaken && self.hub.notice(self.rank, context, sequence).is_some() {
            let (rank, tag) = (self.rank, self.tag);
            self.hub.posts().retain(|(from, _, posted), _| !(*from == rank && *posted == tag));
        }
    }
}

fn take(post: &Post, receive: &mut Transfer) -> Result<(), Failure> {
    if post.label != receive.label {
        return Err(receive.foreign(nbytes(&post.tensor) as u64));
    }
    receive.tensor.f_copy_(&post.tensor).map_err(|error| Failure(error.to_string()))
}
