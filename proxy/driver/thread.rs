//! The other threads' side of a proxy: its thread, requests to it, and its reports.
//!
//! A request is a closure that the driver runs between two passes of its loop. The driver loads one flag per pass, and
//! locks only where a request waits or a fault is reported.

use super::mailbox::{Mailbox, Slip};
use super::{Driver, REQUEST_TIMEOUT};
use crate::base::{Error, Rank, Result, wait};
use crate::proxy::machine::Report;
use crate::proxy::wire::ContextIdx;
use crate::transport::network::Transport;
use crate::transport::network::imm::MAX_RANKS;
use core_affinity::CoreId;
use crossbeam_utils::CachePadded;
use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Reports kept; each peer is lost once in a generation.
const REPORTS: usize = 2 * MAX_RANKS;

/// Proxy threads of this process.
static LIVE: AtomicUsize = AtomicUsize::new(0);
/// Whether the log says that threads are more than cores: once is enough.
static WARNED: AtomicBool = AtomicBool::new(false);

pub(super) type Request<T> = Box<dyn FnOnce(&mut Driver<T>) + Send>;

/// State that driver and remotes share.
pub(super) struct Shared<T: Transport> {
    /// Requests, and the reason for the proxy's end.
    mailbox: Mailbox<Request<T>, Error>,
    /// On a line of its own: the driver loads it in each pass.
    stop: CachePadded<AtomicBool>,
    reports: Mutex<Reports>,
    /// The network's own words for the failures by which peers were lost.
    explanations: Mutex<BTreeMap<Rank, String>>,
    /// The first error of the transport itself.
    failure: OnceLock<Error>,
}

/// The newest reports; a proxy of many generations drops the oldest.
struct Reports {
    /// How many were dropped.
    forgotten: usize,
    list: VecDeque<Report>,
}

impl<T: Transport> Shared<T> {
    pub fn new() -> Shared<T> {
        Shared {
            mailbox: Mailbox::new(),
            stop: CachePadded::new(AtomicBool::new(false)),
            reports: Mutex::new(Reports { forgotten: 0, list: VecDeque::with_capacity(REPORTS) }),
            explanations: Mutex::default(),
            failure: OnceLock::new(),
        }
    }

    pub fn next_request(&self) -> Option<Request<T>> {
        self.mailbox.take()
    }

    pub fn report(&self, report: Report) {
        let mut reports = self.reports.lock().unwrap_or_else(PoisonError::into_inner);
        if reports.list.len() == REPORTS {
            reports.list.pop_front();
            reports.forgotten += 1;
        }
        reports.list.push_back(report);
    }

    /// Keeps the network's words for a peer's loss, unless there are none.
    pub fn explain(&self, peer: Rank, words: String) {
        let mut explanations = self.explanations.lock().unwrap_or_else(PoisonError::into_inner);
        if words.is_empty() {
            explanations.remove(&peer);
        } else {
            explanations.insert(peer, words);
        }
    }

    pub fn fail(&self, error: Error) {
        let _ = self.failure.set(error);
    }

    /// Ends the proxy; callers get a fatal error, whatever the transport returned.
    pub fn give_up(&self, error: Error) {
        let error = ended(error);
        self.mailbox.give_up(error.clone());
        self.fail(error);
    }

    /// The error that ended the proxy, if it has ended.
    pub fn reason(&self) -> Option<Error> {
        self.mailbox.reason().cloned()
    }

    pub fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    pub fn end(&self) {
        self.mailbox.end();
    }
}

/// Sends requests to a driver from another thread or fiber. Clones are handles of the same driver.
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

    /// Has the driver run `request` between two passes, and waits for the answer through `base::wait`.
    ///
    /// # Errors
    /// `Transport` if the driver has ended or does not answer.
    pub fn ask<R: Send + 'static>(&self, request: impl FnOnce(&mut Driver<T>) -> R + Send + 'static) -> Result<R> {
        self.ask_within(REQUEST_TIMEOUT, request, |_, _| ())
    }

    /// As [`ask`](Self::ask); `undo` gets an answer that comes after this call has failed.
    ///
    /// # Errors
    /// As `ask`.
    pub fn ask_or_undo<R: Send + 'static>(
        &self,
        request: impl FnOnce(&mut Driver<T>) -> R + Send + 'static,
        undo: impl FnOnce(&mut Driver<T>, R) + Send + 'static,
    ) -> Result<R> {
        self.ask_within(REQUEST_TIMEOUT, request, undo)
    }

    /// Has the driver run `request` between two passes, and does not wait for it.
    pub fn tell(&self, request: impl FnOnce(&mut Driver<T>) + Send + 'static) {
        self.shared.mailbox.put(Box::new(request));
    }

    pub(super) fn ask_within<R: Send + 'static>(
        &self,
        timeout: Duration,
        request: impl FnOnce(&mut Driver<T>) -> R + Send + 'static,
        undo: impl FnOnce(&mut Driver<T>, R) + Send + 'static,
    ) -> Result<R> {
        let mailbox = &self.shared.mailbox;
        let slip = Arc::new(Slip::new(request));
        let taken = Arc::clone(&slip);
        mailbox.put(Box::new(move |driver| {
            if let Some(late) = taken.run(|request| request(driver)) {
                undo(driver, late);
            }
        }));
        let left = "the request was not begun; ask again";
        let answer = match wait::poll_unless("the proxy's answer", timeout, left, || slip.look(mailbox)) {
            Ok(answer) => answer,
            Err(interrupted) if slip.withdraw() => return Err(interrupted),
            // It has begun: this caller must keep or undo its result.
            Err(_) => wait::poll("the proxy's answer", timeout, || slip.look(mailbox)),
        };
        // A request without a waiting caller is not run.
        answer.flatten().or_else(|| if slip.withdraw() { None } else { slip.leave() }).ok_or_else(|| {
            self.end().unwrap_or_else(|| {
                Error::transport(
                    "the proxy thread does not answer",
                    "it has ended, or its core is taken by something else; see the first error, and pin it",
                )
            })
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
            Err(Error::transport(
                format!("writes of context {} are under way after {} ms", context.0, timeout.as_millis()),
                "a peer is gone; reset or drop the transport before the memory",
            ))
        })
    }

    /// All kept reports, oldest first.
    pub fn reports(&self) -> Vec<Report> {
        self.reports_since(0)
    }

    /// How many reports there have been so far.
    pub fn reported(&self) -> usize {
        let reports = self.shared.reports.lock().unwrap_or_else(PoisonError::into_inner);
        reports.forgotten + reports.list.len()
    }

    /// All kept reports after the first `earlier`, oldest first.
    pub fn reports_since(&self, earlier: usize) -> Vec<Report> {
        let reports = self.shared.reports.lock().unwrap_or_else(PoisonError::into_inner);
        reports.list.iter().skip(earlier.saturating_sub(reports.forgotten)).copied().collect()
    }

    /// The network's own words for the failed write by which a peer was last lost.
    pub fn explanation(&self, peer: Rank) -> Option<String> {
        self.shared.explanations.lock().unwrap_or_else(PoisonError::into_inner).get(&peer).cloned()
    }

    /// Peers reported as lost so far. A context opened later may have brought some of them back.
    pub fn lost_peers(&self) -> Vec<Rank> {
        let lost = self.reports().into_iter().filter_map(|report| match report {
            Report::PeerLost { peer, .. } => Some(peer),
            Report::BadDoorbell { .. } => None,
        });
        lost.collect()
    }

    /// The first error of the transport itself; the transport may have gone on after it.
    pub fn failure(&self) -> Option<Error> {
        self.shared.failure.get().cloned()
    }

    /// The error that ended the proxy, if it has ended.
    pub fn end(&self) -> Option<Error> {
        self.shared.reason()
    }

    /// Asks the driver to notify its peers and to end.
    pub fn stop(&self) {
        self.shared.stop.store(true, Ordering::Release);
    }
}

/// Where a proxy thread runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ThreadConfig {
    /// The core it is pinned to, by the number of one of its CPUs; `None`: it runs anywhere.
    /// [`Topology::proxy_cores`](crate::topology::Topology::proxy_cores) has one near the rank's GPU for each rank.
    pub core: Option<usize>,
    /// Threads of this host that spin, as known to the caller: proxies, and the CPU device's executors. With more
    /// of them than cores, an idle proxy yields.
    pub spinners: usize,
}

/// A driver on its own thread; stopped and joined on drop.
pub struct ProxyThread<T: Transport + 'static> {
    remote: Remote<T>,
    thread: Option<JoinHandle<()>>,
}

impl<T: Transport + 'static> ProxyThread<T> {
    /// Starts the thread.
    ///
    /// # Errors
    /// `Config` if it cannot be pinned to the core; `Device` if the system cannot start a thread.
    pub fn spawn(mut driver: Driver<T>, config: ThreadConfig) -> Result<ProxyThread<T>> {
        let remote = driver.remote();
        let pinned = Arc::new(OnceLock::new());
        let outcome = Arc::clone(&pinned);
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        if config.spinners > cores && !WARNED.swap(true, Ordering::Relaxed) {
            log::warn!(
                target: crate::base::targets::PROXY,
                "{} threads spin, and this process may use {cores} CPUs: idle proxies yield, which takes longer",
                config.spinners
            );
        }
        let body = move || {
            let pinning = pin(config.core);
            let failed = pinning.is_err();
            let _ = outcome.set(pinning);
            if failed {
                return driver.shared.end();
            }
            LIVE.fetch_add(1, Ordering::Relaxed);
            let yields = || config.spinners.max(LIVE.load(Ordering::Relaxed)) > cores;
            // A defect must not leave devices and callers to their deadlines. The driver is used from here on only to
            // notify them.
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| driver.run(yields))) {
                driver.give_up(panicked(panic.as_ref()));
                driver.shared.end();
            }
            LIVE.fetch_sub(1, Ordering::Relaxed);
        };
        let thread = std::thread::Builder::new().name("tokenyard proxy".into()).spawn(body).map_err(|error| {
            Error::device(format!("no thread for a proxy: {error}"), "raise the limit on threads").caused_by(error)
        })?;
        let thread = ProxyThread { remote, thread: Some(thread) };
        let started = wait::poll("the proxy thread's start", REQUEST_TIMEOUT, || pinned.get().cloned());
        started.unwrap_or_else(|| Err(Error::device("the proxy thread does not start", "see what holds its core")))?;
        Ok(thread)
    }

    /// The handle for requests and reports.
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

/// Wraps an error that ends the proxy.
fn ended(error: Error) -> Error {
    let error = error.ending();
    if error.is_fatal() {
        return error;
    }
    let advice = "this is a defect of the library or of its transport; please report it, and make a new proxy";
    Error::transport(format!("has ended: {error}"), advice).caused_by(error).ending()
}

/// The error for callers after the proxy thread has panicked.
fn panicked(panic: &(dyn Any + Send)) -> Error {
    let reason = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    Error::transport(
        format!("the proxy thread panicked: {}", reason.unwrap_or("without a message")),
        "this is a defect of the library or of its transport; please report it, and restart the process",
    )
}

/// Pins the calling thread.
fn pin(core: Option<usize>) -> Result<()> {
    let Some(core) = core else { return Ok(()) };
    // The crate would index its mask of CPU_SETSIZE cores unchecked.
    if core < libc::CPU_SETSIZE as usize && core_affinity::set_for_current(CoreId { id: core }) {
        return Ok(());
    }
    let usable: Vec<usize> = core_affinity::get_core_ids().unwrap_or_default().iter().map(|core| core.id).collect();
    Err(Error::config(
        "proxy core",
        core,
        format!("the system pins no thread there; the calling thread may use the cores {usable:?}"),
    ))
}
