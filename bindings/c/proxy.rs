//! Networks between nodes, and the proxies that use them.
//!
//! Place in the data path: beside it. Opening a network and its proxy is done on the caller's thread; the proxy has a
//! thread of its own.

use super::arguments::{Out, Versioned, list, read, text};
use super::device::tokenyard_device_t;
use super::status::{destroy, guarded, tokenyard_status_t};
use super::values::milliseconds;
use super::world::{tokenyard_world_t, waiting};
use crate::base::{Error, Result};
use crate::proxy::driver::ThreadConfig;
use crate::proxy::machine::Liveness;
use crate::proxy::{Network, NetworkConfig, Proxy, ProxyConfig};
use std::ffi::c_char;

/// A network between nodes; it is never left out.
pub type tokenyard_network_t = u32;
/// RDMA NICs of InfiniBand or RoCE, by libibverbs.
pub const TOKENYARD_NETWORK_VERBS: tokenyard_network_t = 1;
/// EFA, by libfabric.
pub const TOKENYARD_NETWORK_EFA: tokenyard_network_t = 2;
/// TCP, by libfabric.
pub const TOKENYARD_NETWORK_TCP: tokenyard_network_t = 3;
/// Memory of one host, by libfabric 2.1 or later.
pub const TOKENYARD_NETWORK_SHM: tokenyard_network_t = 4;
/// A simulated network between processes of one host, which delays and reorders as much as a real one may: for tests.
pub const TOKENYARD_NETWORK_SIMULATED: tokenyard_network_t = 5;

/// A rank's proxy: the thread that posts writes to the network.
pub struct tokenyard_proxy_t(pub(super) Proxy);

/// A network and its proxy, the same on all ranks but for `device`, `names` and `core_plus_1`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct tokenyard_proxy_config_t {
    /// Bytes of this struct.
    pub size: u32,
    /// One of `TOKENYARD_NETWORK_*`. Mandatory.
    pub network: tokenyard_network_t,
    /// NICs of this rank, as its peers see them; 0: 1. The simulated network has two.
    pub nics: u32,
    /// How many `names` there are.
    pub names_count: u32,
    /// Devices of verbs or domains of EFA: NIC i uses number i modulo their number. NULL: all that there are.
    pub names: *const *const c_char,
    /// TCP: the local address or host name; NULL: the first that the provider lists.
    pub source: *const c_char,
    /// The GPU whose memory verbs or EFA may register; NULL: host memory alone.
    pub device: *const tokenyard_device_t,
    /// A peer that is silent for so long is lost; 0: 1 s. It is to be below the contexts' deadline.
    pub silence_ms: u64,
    /// A CPU of the core that the thread is pinned to, plus 1; 0: it runs anywhere.
    pub core_plus_1: u32,
    /// Threads of this host that spin, such as proxies. With more of them than cores an idle proxy yields.
    pub spinners: u32,
    /// Of the simulated network: what its delays are drawn from.
    pub seed: u64,
}

// SAFETY: a C struct of numbers and pointers that begins with its size.
unsafe impl Versioned for tokenyard_proxy_config_t {
    const FIRST: usize = 64;
}

/// # Safety
/// Its pointers are NULL, or of objects, lists and strings as their fields state.
unsafe fn network(given: &tokenyard_proxy_config_t) -> Result<NetworkConfig> {
    let mut config = NetworkConfig::new(match given.network {
        TOKENYARD_NETWORK_VERBS => Network::Verbs,
        TOKENYARD_NETWORK_EFA => Network::Efa,
        TOKENYARD_NETWORK_TCP => Network::Tcp,
        TOKENYARD_NETWORK_SHM => Network::Shm,
        TOKENYARD_NETWORK_SIMULATED => Network::Simulated,
        network => {
            let advice = "give one of the constants that tokenyard.h lists for it";
            return Err(Error::argument("network", network, advice));
        }
    });
    config.nics = given.nics.max(1) as usize;
    // SAFETY: as the caller says.
    config.names = unsafe { names(given)? };
    // SAFETY: as the caller says.
    config.source = unsafe { text("source", given.source)? }.map(str::to_owned);
    // SAFETY: as the caller says.
    config.gpu = unsafe { given.device.as_ref() }.and_then(|device| device.0.ordinal());
    config.seed = given.seed;
    Ok(config)
}

/// # Safety
/// As `network`.
unsafe fn names(given: &tokenyard_proxy_config_t) -> Result<Vec<String>> {
    // SAFETY: as the caller says.
    let names = unsafe { list("names", given.names, given.names_count as usize)? };
    let name = |name: &*const c_char| {
        // SAFETY: as the caller says.
        let name = unsafe { text("names", *name)? };
        name.map(str::to_owned).ok_or_else(|| Error::argument("names", "with NULL", "give as many as names_count says"))
    };
    names.iter().map(name).collect()
}

/// Opens a network and starts the rank's proxy over it. Every rank of a world of several nodes has one, which all its
/// contexts take by `tokenyard_config_t.proxy`. Collective with the simulated network.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_proxy_create(
    world: Option<&tokenyard_world_t>,
    config: *const tokenyard_proxy_config_t,
    proxy: *mut *mut tokenyard_proxy_t,
) -> tokenyard_status_t {
    guarded(|| {
        // SAFETY: the caller's pointer.
        let out = unsafe { Out::new("proxy", proxy)? };
        let world = &waiting(world)?;
        // SAFETY: the caller's pointer.
        let given = unsafe { read("config", config)? };
        let mut config = ProxyConfig {
            liveness: Liveness::default(),
            thread: ThreadConfig {
                core: given.core_plus_1.checked_sub(1).map(|core| core as usize),
                spinners: given.spinners as usize,
            },
        };
        if let Some(silence) = milliseconds(given.silence_ms) {
            config.liveness.silence_ns = u64::try_from(silence.as_nanos()).unwrap_or(u64::MAX);
        }
        // SAFETY: the caller's pointers.
        let transport = unsafe { network(&given)? }.open(world)?;
        out.give(tokenyard_proxy_t(Proxy::spawn(world, transport, config)?));
        Ok(())
    })
}

/// Destroys the object. The thread ends once the contexts of the proxy are gone, too. NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_proxy_destroy(proxy: *mut tokenyard_proxy_t) {
    // SAFETY: the caller's pointer, of `tokenyard_proxy_create`.
    unsafe { destroy(proxy) }
}
