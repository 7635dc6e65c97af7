//! Networks between nodes, and the proxies that use them.

use super::calls::unknown;
use super::detached::Closable;
use super::numbers::maybe;
use super::worlds::World;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use tokenyard::{Liveness, Network, NetworkConfig, ProxyConfig, ThreadConfig};

const NETWORKS: [(&str, Network); 5] = [
    ("verbs", Network::Verbs),
    ("efa", Network::Efa),
    ("tcp", Network::Tcp),
    ("shm", Network::Shm),
    ("simulated", Network::Simulated),
];

/// The thread that posts a rank's writes to the network between nodes. Every rank of a world of several nodes has one,
/// which all its contexts take (`AllToAll(..., proxy=proxy)`); it ends once it and they are gone.
///
/// `network`: "verbs" (RDMA NICs of InfiniBand or RoCE), "efa", "tcp" or "shm" (by libfabric), or "simulated" (between
/// processes of one host, for tests: it delays and reorders as much as a real one may, as drawn from `seed`). `nics`:
/// NICs of this rank, the same on all ranks. `names`: devices of verbs or domains of EFA, of which NIC i uses number i
/// modulo their number; by default all that there are. `source`: for tcp the local address; by default the first that
/// the provider lists. `gpu`: number of the GPU whose memory the NICs may register; by default host memory alone.
/// `silence`: seconds after which a silent peer is lost. `core`: a CPU to pin the thread to. `spinners`: threads of
/// this host that spin; with more of them than cores an idle proxy yields.
#[pyclass(frozen, module = "tokenyard._native")]
pub(super) struct Proxy {
    pub inner: Closable<tokenyard::Proxy>,
    network: &'static str,
}

#[pymethods]
impl Proxy {
    #[new]
    #[pyo3(signature = (
        world, network, *, nics=None, names=None, source=None, gpu=None, silence=1.0, core=None, spinners=None, seed=None,
    ), text_signature = "(world, network, *, nics=1, names=None, source=None, gpu=None, silence=1.0, core=None, \
        spinners=0, seed=0)")]
    // The parameters are Python's keywords.
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        world: &World,
        network: &str,
        nics: Option<Bound<'_, PyAny>>,
        names: Option<Vec<String>>,
        source: Option<String>,
        gpu: Option<Bound<'_, PyAny>>,
        silence: f64,
        core: Option<Bound<'_, PyAny>>,
        spinners: Option<Bound<'_, PyAny>>,
        seed: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Proxy> {
        let known = NETWORKS.iter().find(|(name, _)| *name == network);
        let (name, kind) = known.ok_or_else(|| unknown("network", network, &NETWORKS.map(|(name, _)| name)))?;
        let silence = super::context::duration("silence", silence)?;
        let mut config = ProxyConfig {
            liveness: Liveness::default(),
            thread: ThreadConfig { core: maybe("core", core)?, spinners: maybe("spinners", spinners)?.unwrap_or(0) },
        };
        config.liveness.silence_ns = u64::try_from(silence.as_nanos()).unwrap_or(u64::MAX);
        let mut opened = NetworkConfig::new(*kind);
        (opened.nics, opened.names) = (maybe("nics", nics)?.unwrap_or(1), names.unwrap_or_default());
        (opened.source, opened.gpu) = (source, maybe("gpu", gpu)?);
        opened.seed = maybe("seed", seed)?.unwrap_or(0);
        let of = world.inner.get(py)?;
        let spawned = world.wait(py, || {
            let transport = opened.open(&of)?;
            tokenyard::Proxy::spawn(&of, transport, config)
        })?;
        Ok(Proxy { inner: Closable::new("proxy", spawned), network: name })
    }

    /// Gives the proxy up: the thread ends once no context uses it. Later contexts are refused with `ClosedError`.
    /// Local; may be called again.
    fn close(&self, py: Python<'_>) {
        let left = self.inner.close();
        py.detach(|| drop(left));
    }

    fn __enter__(this: Py<Proxy>) -> Py<Proxy> {
        this
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, PyTuple>) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        format!("<tokenyard.Proxy over {}>", self.network)
    }
}
