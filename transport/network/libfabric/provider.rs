//! The providers that this backend knows, and how they differ.
//!
//! Place in the data path: none; what it answers is read when an endpoint is opened, and when an operation fails.

use super::libfabric_sys::*;
use super::reasons;
use crate::transport::network::Failure;
use std::ffi::c_int;

/// Least entries of EFA's completion queue. A device takes as many without complaint, by the discussion of libfabric's
/// pull request 11337, which chose 12288 as the default.
const EFA_COMPLETIONS: usize = 16 << 10;
/// Least room for arrived immediates in it.
const EFA_ARRIVALS: usize = 4 << 10;
/// Entries of others' completion queues beyond the operations that may be under way: what has arrived and was not
/// polled. They put more into lists of their own.
const ARRIVALS: usize = 16 << 10;

/// Set in a failure's code if that is an error number, where others are a provider's statuses.
const ERROR_NUMBER: u32 = 1 << 16;

/// A provider by its kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Provider {
    /// Sockets.
    Tcp,
    /// Memory that processes of a host share.
    Shm,
    /// Amazon's Elastic Fabric Adapter.
    Efa,
    /// Reliable connections of RDMA devices, below the layer that keeps them for endpoints without connections.
    Verbs,
}

/// Names of all of them, for errors.
pub(super) const NAMES: &str = "tcp, shm, efa or verbs;ofi_rxm";
/// The fabric of EFA that posts straight to the device.
pub(super) const EFA_DIRECT: &str = "efa-direct";
/// The oldest version whose `efa-direct` serves. Versions 2.1 to 2.3 offer it for devices that take a receive for each
/// immediate, too, and roll a whole batch back where its last post finds the queue full.
const OLDEST_DIRECT: Version = Version::new(2, 4);
/// With 0 an immediate takes a posted receive: fi_efa(7). Endpoints post none for them.
pub(super) const UNSOLICITED: &str = "FI_EFA_USE_UNSOLICITED_WRITE_RECV";

impl Provider {
    /// The provider of a name as `fi_info -l` lists it.
    pub fn named(name: &str) -> Option<Provider> {
        match name {
            "tcp" => Some(Provider::Tcp),
            "shm" => Some(Provider::Shm),
            "efa" => Some(Provider::Efa),
            "verbs;ofi_rxm" => Some(Provider::Verbs),
            _ => None,
        }
    }

    /// What it is asked for as. Of tcp the layer that keeps connections for endpoints without them: libfabric 2.x
    /// offers endpoints of tcp's own, too, and 2.1 crashes in them (in `fi_cq_read`) once a connected peer has closed
    /// its own.
    pub fn asked(self, name: &str) -> &str {
        if self == Provider::Tcp { "tcp;ofi_rxm" } else { name }
    }

    /// Flags of every write besides those that make it one with an immediate and a completion. tcp completes a write
    /// when the kernel has it, shm when it is in the peer's queue, EFA and verbs when the peer's device has
    /// acknowledged it.
    pub fn write_flags(self) -> u64 {
        if self == Provider::Tcp { FI_DELIVERY_COMPLETE } else { 0 }
    }

    /// The oldest version of the library that serves, if it is not the oldest of all. EFA emulates writes on some
    /// devices where the version asked for is older: fi_efa(7), `FI_OPT_EFA_USE_DEVICE_RDMA`.
    pub fn oldest(self) -> Option<Version> {
        (self == Provider::Efa).then(|| Version::new(1, 18))
    }

    /// What its users should know.
    pub fn warning(self) -> Option<&'static str> {
        // ofiwg/libfabric, issue 11828.
        (self == Provider::Verbs).then_some("a peer that closes may crash others in libfabric: use it for tests alone")
    }

    /// What helps when an endpoint cannot be enabled, if that is known. Its layer asks for a completion queue for
    /// as many peers as the variable says, 256 unless it is set.
    pub fn advice_on_enabling(self) -> Option<&'static str> {
        let advice = "set FI_UNIVERSE_SIZE to the number of ranks: the device's completion queues may be too short";
        (self == Provider::Verbs).then_some(advice)
    }

    /// Whether its domains are devices, which an endpoint may choose from.
    pub fn has_devices(self) -> bool {
        matches!(self, Provider::Efa | Provider::Verbs)
    }

    /// Entries of a completion queue for as many operations under way.
    pub fn completions(self, operations: usize) -> usize {
        if self == Provider::Efa { EFA_COMPLETIONS.max(operations + EFA_ARRIVALS) } else { operations + ARRIVALS }
    }

    /// Whether what finds no entry in a completion queue is lost.
    pub fn overruns(self) -> bool {
        self == Provider::Efa
    }

    /// Whether a batch of posts may ring one doorbell. Before libfabric's pull request 12623 the fabric `efa` forgets
    /// batches that wait for a peer's handshake; tcp and shm have no doorbells.
    pub fn batches(self, fabric: &str) -> bool {
        self == Provider::Efa && fabric == EFA_DIRECT
    }

    /// Whether a fabric of a version serves.
    pub fn admits(self, fabric: &str, library: Version) -> bool {
        fabric != EFA_DIRECT || library >= OLDEST_DIRECT
    }

    /// Messages that may be under way, of a queue that writes and messages share; `None` where messages have their own.
    /// A queue that is never full refuses no post of a batch.
    pub fn messages_of(self, queue: usize) -> Option<usize> {
        (self == Provider::Efa).then_some(queue / 4)
    }

    /// Receives of messages that a fabric posts for itself, of those that it offers; `None` if it posts none.
    pub fn own_receives(self, fabric: &str, offered: usize) -> Option<usize> {
        (self == Provider::Efa && fabric != EFA_DIRECT).then_some(offered)
    }

    /// Capabilities besides those that all need. With remote communication alone EFA leaves shm out, whose faults are
    /// its own: fi_getinfo(3), efa_domain.c.
    pub fn capabilities(self) -> u64 {
        if self == Provider::Efa { FI_REMOTE_COMM } else { 0 }
    }

    /// The option of an endpoint that tells whether it emulates writes.
    pub fn emulation(self) -> Option<c_int> {
        (self == Provider::Efa).then_some(FI_OPT_EFA_EMULATED_WRITE)
    }

    /// Why an operation failed. EFA answers EINVAL, and verbs EIO, for faults of either side; their own status tells
    /// them apart. With other error numbers a status of verbs is none of a completion.
    pub fn failure(self, error: c_int, status: c_int) -> Failure {
        match self {
            Provider::Efa if status != 0 => reasons::of_efa(status),
            Provider::Verbs if status != 0 && [FI_EIO, FI_ECANCELED].contains(&error) => reasons::of_verbs(status),
            _ => self.refusal(error),
        }
    }

    /// Why the library refused a post. Codes of devices are statuses, so error numbers are set apart.
    pub fn refusal(self, error: c_int) -> Failure {
        let failure = reasons::failure(error);
        if self.has_devices() { Failure { code: failure.code | ERROR_NUMBER, ..failure } } else { failure }
    }

    /// The provider's own status that a failure's code is, if it is one.
    pub fn status(self, code: u32) -> Option<c_int> {
        (self.has_devices() && code & ERROR_NUMBER == 0).then(|| c_int::try_from(code).ok()).flatten()
    }

    /// The error number that a failure's code is.
    pub fn error_number(self, code: u32) -> c_int {
        c_int::try_from(if self.has_devices() { code & !ERROR_NUMBER } else { code }).unwrap_or(c_int::MAX)
    }

    /// What helps when memory cannot be registered.
    pub fn advice_on_memory(self) -> &'static str {
        match self {
            Provider::Tcp | Provider::Shm | Provider::Verbs => {
                "raise the limit on locked memory (ulimit -l), or register less"
            }
            // ofiwg/libfabric, pull request 10402 and issue 9739.
            Provider::Efa => {
                "raise the limit on locked memory (ulimit -l), and use huge pages: a device takes 1 Mi pages in a \
                 region and some 24 Mi in all"
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::network::Reason;

    #[test]
    fn providers_differ_as_documented() {
        let all = ["tcp", "shm", "efa", "verbs;ofi_rxm"].map(|name| Provider::named(name).unwrap());
        assert_eq!(all, [Provider::Tcp, Provider::Shm, Provider::Efa, Provider::Verbs]);
        assert_eq!(
            ["net", "verbs"].map(Provider::named),
            [None; 2],
            "verbs alone has no endpoints without connections"
        );
        assert_eq!(all.map(|provider| provider.asked("name")), ["tcp;ofi_rxm", "name", "name", "name"]);
        assert_eq!(all.map(Provider::write_flags), [FI_DELIVERY_COMPLETE, 0, 0, 0]);
        assert_eq!(all.map(|provider| provider.completions(4352)), [20736, 20736, 16384, 20736]);
        assert_eq!(Provider::Efa.completions(20000), 24096);
        assert_eq!(all.map(|provider| provider.messages_of(4096)), [None, None, Some(1024), None]);
        let own = |fabric| all.map(|provider| provider.own_receives(fabric, 8192));
        assert_eq!((own("efa"), own("efa-direct")), ([None, None, Some(8192), None], [None; 4]));
        let (old, new) = (Version::new(2, 3), Version::new(2, 4));
        assert!(!Provider::Efa.admits("efa-direct", old) && Provider::Efa.admits("efa-direct", new));
        assert!(Provider::Efa.admits("efa", old) && Provider::Tcp.admits("tcp", old));
        assert_eq!(all.map(|provider| provider.batches("efa-direct")), [false, false, true, false]);
        assert!(!Provider::Efa.batches("efa"));
        assert_eq!(all.map(|provider| provider.warning().is_some()), [false, false, false, true]);
        let advice = all.map(|provider| provider.advice_on_enabling().is_some());
        assert_eq!(advice, [false, false, false, true]);
        assert_eq!(all.map(Provider::has_devices), [false, false, true, true]);
        assert_eq!(all.map(Provider::overruns), [false, false, true, false]);
        assert_eq!(all.map(|provider| provider.emulation().is_some()), [false, false, true, false]);
        let reasons = all.map(|provider| provider.failure(libc::EINVAL, 7).reason);
        assert_eq!(reasons, [Reason::Local, Reason::Local, Reason::RemoteAccess, Reason::Local]);
        let verbs = [(FI_EIO, 10), (FI_ECANCELED, 5), (libc::ECONNREFUSED, 8), (FI_EIO, 0)];
        let verbs = verbs.map(|(error, status)| Provider::Verbs.failure(error, status));
        assert_eq!(
            verbs.map(|failure| (failure.reason, failure.code)),
            [
                (Reason::RemoteAccess, 10),
                (Reason::Flushed, 5),
                (Reason::Unreachable, 0x10000 + libc::ECONNREFUSED as u32),
                (Reason::Local, 0x10005)
            ]
        );
        let refusal = Provider::Efa.failure(libc::EHOSTUNREACH, 0);
        assert_eq!((refusal.reason, refusal.code), (Reason::Unreachable, 0x10000 + libc::EHOSTUNREACH as u32));
        assert_eq!((Provider::Efa.status(refusal.code), Provider::Efa.status(7)), (None, Some(7)));
        assert_eq!(Provider::Efa.error_number(refusal.code), libc::EHOSTUNREACH);
        assert_eq!(
            (Provider::Tcp.refusal(5).code, Provider::Tcp.status(5), Provider::Tcp.error_number(5)),
            (5, None, 5)
        );
    }
}
