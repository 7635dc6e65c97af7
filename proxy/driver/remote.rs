//! The other threads' side of a proxy: its thread, requests to it, and what it reported.
//!
//! A request is a closure that the driver runs between two turns; the driver looks at one flag a turn, and locks only
//! where a request waits. Reports go into slots that are written once, so that reporting never locks.

use super::{Driver, REQUEST_TIMEOUT};
use crate::base::{Error, Rank, Result, wait};
use crate::proxy::machine::Report;
use crate::proxy::wire::ContextIdx;
use crate::transport::link::Transport;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Reports kept; a world has few peers a rank, and each is lost once a generation.
const REPORTS: usize = 256;

/// Proxy threads of this process.
static LIVE: AtomicUsize = AtomicUsize::new(0);

pub(super) type Request<T> = Box<dyn FnOnce(&mut Driver<T>) + Send>;

/// What driver and remotes share.
pub(super) struct Shared<T: Transport> {
    waiting: AtomicBool,
    requests: Mutex<VecDeque<Request<T>>>,
    stop: AtomicBool,
    ended: AtomicBool,
    reports: Box<[OnceLock<Report>]>,
    reported: AtomicUsize,
    /// The first error of the transport itself.
    failure: OnceLock<Error>,
}

impl<T: Transport> Shared<T> {
    pub fn new() -> Shared<T> {
        Shared {
            waiting: AtomicBool::new(false),
            requests: Mutex::new(VecDeque::new()),
            stop: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            reports: (0..REPORTS).map(|_| OnceLock::new()).collect(),
            reported: AtomicUsize::new(0),
            failure: OnceLock::new(),
        }
    }

    pub fn next_request(&self) -> Option<Request<T>> {
        if !self.waiting.load(Ordering::Acquire) {
            return None;
        }
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        let request = requests.pop_front();
        if request.is_none() {
            self.waiting.store(false, Ordering::Release);
        }
        request
    }

    fn enqueue(&self, request: Request<T>) {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        requests.push_back(request);
        self.waiting.store(true, Ordering::Release);
    }

    pub fn report(&self, report: Report) {
        let at = self.reported.load(Ordering::Relaxed);
        if let Some(slot) = self.reports.get(at) {
            // The driver alone reports, so the slot is empty.
            let _ = slot.set(report);
            self.reported.store(at + 1, Ordering::Release);
        }
    }

    pub fn fail(&self, error: Error) {
        let _ = self.failure.set(error);
    }

    pub fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    pub fn end(&self) {
        self.ended.store(true, Ordering::Release);
    }
}

/// Talks to a driver from another thread or fiber. Clones are handles of the same.
pub struct Remote<T: Transport> {
    shared: Arc<Shared<T>>,
}

impl<T: Transport> Clone for Remote<T> {
    fn clone(&self) -> Remote<T> {
        Remote { shared: Arc::clone(&self.shared) }
    }
}

impl<T: Transport + 'static> Remote<T> {
    pub(super) fn new(shared: Arc<Shared<T>>) -> Remote<T> {
        Remote { shared }
    }

    /// Has the driver do something between two turns, and waits for the answer through `base::wait`.
    ///
    /// # Errors
    /// `Transport` if the driver has ended or does not answer.
    pub fn ask<R: Send + 'static>(&self, request: impl FnOnce(&mut Driver<T>) -> R + Send + 'static) -> Result<R> {
        let answer = Arc::new(Mutex::new(None));
        let slot = Arc::clone(&answer);
        self.shared.enqueue(Box::new(move |driver| {
            let done = request(driver);
            *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(done);
        }));
        let taken = wait::poll("the proxy's answer", REQUEST_TIMEOUT, || {
            let ended = self.shared.ended.load(Ordering::Acquire);
            let answer = answer.lock().unwrap_or_else(PoisonError::into_inner).take();
            if answer.is_none() && ended { Some(None) } else { answer.map(Some) }
        });
        taken.flatten().ok_or_else(|| Error::Transport {
            what: "the proxy thread does not answer".into(),
            advice: "it has ended, or its core is taken by something else; see the first error, and pin it".into(),
        })
    }

    /// Closes a context and waits until no write of it is under way, so that its memory may go.
    ///
    /// # Errors
    /// `Transport` if writes stay under way for `timeout`: reset the transport first, or drop it.
    pub fn close(&self, context: ContextIdx, timeout: Duration) -> Result<()> {
        self.ask(move |driver| driver.close(context))?;
        let drained = wait::poll("writes of a closed context", timeout, || {
            match self.ask(move |driver| driver.machine().under_way(context)) {
                Ok(0) => Some(Ok(())),
                Ok(_) => None,
                Err(error) => Some(Err(error)),
            }
        });
        drained.unwrap_or_else(|| {
            Err(Error::Transport {
                what: format!("writes of context {} are under way after {} ms", context.0, timeout.as_millis()),
                advice: "a peer is gone; reset or drop the transport before the memory".into(),
            })
        })
    }

    /// Everything reported so far, oldest first.
    pub fn reports(&self) -> Vec<Report> {
        let count = self.shared.reported.load(Ordering::Acquire);
        self.shared.reports.iter().take(count).filter_map(|slot| slot.get().copied()).collect()
    }

    /// Peers reported as lost so far. A context opened later may have brought some of them back.
    pub fn lost_peers(&self) -> Vec<Rank> {
        self.lost_peers_since(0)
    }

    /// Peers reported as lost, but for the first `earlier` reports.
    pub fn lost_peers_since(&self, earlier: usize) -> Vec<Rank> {
        let lost = self.reports().into_iter().skip(earlier).filter_map(|report| match report {
            Report::PeerLost { peer, .. } => Some(peer),
            Report::BadDoorbell { .. } => None,
        });
        lost.collect()
    }

    /// The first error of the transport itself.
    pub fn failure(&self) -> Option<Error> {
        self.shared.failure.get().cloned()
    }

    /// Asks the driver to tell its peers and to end.
    pub fn stop(&self) {
        self.shared.stop.store(true, Ordering::Release);
    }
}

/// Where a proxy thread runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ThreadConfig {
    /// The core it is pinned to.
    pub core: Option<usize>,
    /// Threads of this host that spin, as far as the caller knows: proxies, and the CPU device's executors. With more of
    /// them than cores, an idle proxy yields.
    pub spinners: usize,
}

/// A driver on a thread of its own; stopped and joined on drop.
pub struct ProxyThread<T: Transport + 'static> {
    remote: Remote<T>,
    thread: Option<JoinHandle<()>>,
}

impl<T: Transport + 'static> ProxyThread<T> {
    /// Starts the thread.
    ///
    /// # Errors
    /// `Config` if it cannot be pinned to the core; `Device` if the system has no thread to give.
    pub fn spawn(mut driver: Driver<T>, config: ThreadConfig) -> Result<ProxyThread<T>> {
        let remote = driver.remote();
        let pinned = Arc::new(OnceLock::new());
        let outcome = Arc::clone(&pinned);
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        let body = move || {
            let pinning = pin(config.core);
            let failed = pinning.is_err();
            let _ = outcome.set(pinning);
            if failed {
                return driver.shared.end();
            }
            LIVE.fetch_add(1, Ordering::Relaxed);
            driver.run(|| config.spinners.max(LIVE.load(Ordering::Relaxed)) > cores);
            LIVE.fetch_sub(1, Ordering::Relaxed);
        };
        let thread =
            std::thread::Builder::new().name("tokenyard proxy".into()).spawn(body).map_err(|error| Error::Device {
                what: format!("no thread for a proxy: {error}"),
                advice: "raise the limit on threads".into(),
            })?;
        let thread = ProxyThread { remote, thread: Some(thread) };
        let started = wait::poll("the proxy thread's start", REQUEST_TIMEOUT, || pinned.get().cloned());
        started.unwrap_or_else(|| {
            Err(Error::Device {
                what: "the proxy thread does not start".into(),
                advice: "see what holds its core".into(),
            })
        })?;
        Ok(thread)
    }

    /// For requests, and what was reported.
    pub fn remote(&self) -> &Remote<T> {
        &self.remote
    }
}

impl<T: Transport + 'static> Drop for ProxyThread<T> {
    fn drop(&mut self) {
        self.remote.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Pins the calling thread.
fn pin(core: Option<usize>) -> Result<()> {
    let Some(core) = core else { return Ok(()) };
    let mut cores = CpuSet::new();
    cores.set(core).and_then(|()| sched_setaffinity(Pid::from_raw(0), &cores)).map_err(|error| Error::Config {
        name: "proxy core",
        value: core.to_string(),
        advice: format!("cannot pin a thread there ({error}); name a core that this process may use"),
    })
}
