"""Contexts of ranks that may be on several hosts: the network between nodes, and this rank's proxies.

`deep_ep` and the integrations make their contexts by `Hosts`. Where the world has one node it opens nothing. Where it
has several, all ranks agree on a network first (`TOKENYARD_NETWORK` or `set_network`), and each rank opens it and
starts a proxy. A proxy serves four contexts at a time, of any `Hosts` of the same ranks; further contexts get another
one.

    Hosts(world) ── terms of all ranks ─▶ a proxy that all ranks have, or a new one
    context()    ── proxies that all ranks have ─▶ AllToAll over the first with room, or over a new one

A proxy lives as long as a `Hosts` that has used it, and as the contexts over it. Contexts that are still open when the
interpreter ends are closed first, so that what they have sent leaves before the process does. Imports torch nowhere.
"""

from __future__ import annotations

import atexit
import functools
import glob
import ipaddress
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import uuid
import weakref
from typing import Any, Callable, Dict, List, MutableSet, NamedTuple, Optional

from ._calls import AllToAll
from ._native import ConfigError, Error, Proxy, TransportError, World
from ._worlds import by_ranks, host, refuse

__all__ = ["Hosts", "set_network"]

_log = logging.getLogger("tokenyard")

NETWORKS = ("auto", "verbs", "efa", "tcp", "shm", "simulated")
# What `TOKENYARD_NETWORK` may state of a network, and how each is read.
_READ: Dict[str, Callable[[str], Any]] = {
    "nics": int, "names": lambda text: text.split("+"), "source": str, "silence": float, "core": int, "seed": int,
}
# What numbers may be. A rank is silent for longer than the heartbeats of proxies, 0.1 s, are apart; for a day at most.
_LIMITS = {"nics": (1, 4), "core": (0, (1 << 31) - 1), "seed": (0, (1 << 64) - 1), "silence": (0.2, 86400)}
# Those that are the same on all ranks.
_SHARED = ("nics", "silence", "seed")
# Those that may reach a GPU's memory.
_RDMA = ("efa", "verbs")
# As many as a rank may have.
_MOST_NICS = _LIMITS["nics"][1]
# What contexts take of a proxy and its network, by the names that errors have of it.
_FULL = ("contexts", "receives")
# A rank that computes on all cores may leave its proxy without one for longer than the proxy's own default, 1 s.
_SILENCE = 10.0


class _Network(NamedTuple):
    """A network and its options, as this rank states them."""

    name: str
    options: Dict[str, Any]

    def terms(self) -> str:
        """What all ranks must have in common."""
        return ", ".join([self.name] + [f"{name}={self.options[name]}" for name in _SHARED if name in self.options])


_CHOSEN: List[Optional[_Network]] = [None]


def set_network(
    network: Optional[str],
    *,
    nics: Optional[int] = None,
    names: Optional[List[str]] = None,
    source: Optional[str] = None,
    silence: Optional[float] = None,
    core: Optional[int] = None,
    seed: Optional[int] = None,
) -> None:
    """Chooses the network between hosts for buffers and layers that this process makes from now on, in place of
    `TOKENYARD_NETWORK`; `None`: again as the variable says. Local; all ranks choose the same.

    `network`: "auto" (EFA, else verbs, where all ranks have it, else TCP), "verbs", "efa", "tcp", "shm" or "simulated".
    `names`: devices of verbs or domains of EFA; by default those near the GPU, or all that there are. `nics`: NICs of
    each rank; by default as many as the names of the rank that has most, or 1. NIC i uses name i modulo their number.
    `source`: for TCP the local address. `silence`: seconds after which a silent rank is lost (10).
    `core`: a CPU to pin this rank's proxy to. `seed`: of the simulated network. `nics`, `silence` and `seed` are the
    same on all ranks. Raises `ValueError` or `TypeError` for what none of them can be."""
    if network is None:
        _CHOSEN[0] = None
        return
    given = dict(nics=nics, names=names, source=source, silence=silence, core=core, seed=seed)
    options = {name: value for name, value in given.items() if value is not None}
    _CHOSEN[0] = _checked(_Network(network, options), "network")


def _checked(network: _Network, what: str) -> _Network:
    name, options = network
    if name not in NETWORKS:
        raise ValueError(f"{what} is {name!r}: give one of {', '.join(NETWORKS)}")
    for option, (least, most) in _LIMITS.items():
        value = options.get(option, least)
        kind = (int, float) if option == "silence" else int
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{what} has {option}={value!r}: give a {'number' if option == 'silence' else 'whole number'}")
        if not least <= value <= most:
            raise ValueError(f"{what} has {option}={value}: give {least} to {most}")
    names = options.get("names", ["any"])
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(each, str) and each for each in names):
        raise ValueError(f"{what} has names={names!r}: give a list of names that are not empty")
    source = options.get("source", "any")
    if not isinstance(source, str) or not source:
        raise ValueError(f"{what} has source={source!r}: give the text of a local address")
    return network


def _stated() -> _Network:
    """The network that this rank's program or environment states."""
    if _CHOSEN[0] is not None:
        return _CHOSEN[0]
    text = os.environ.get("TOKENYARD_NETWORK") or "auto"
    name, _, rest = text.partition(":")
    options: Dict[str, Any] = {}
    for part in rest.split(",") if rest else ():
        option, _, value = part.partition("=")
        if option not in _READ or not value:
            raise ValueError(f"TOKENYARD_NETWORK is {text!r}: give OPTION=VALUE for {part!r}, of {', '.join(_READ)}")
        try:
            options[option] = _READ[option](value)
        except ValueError:
            raise ValueError(f"TOKENYARD_NETWORK is {text!r}: {option} is a number, and {value!r} is none") from None
    return _checked(_Network(name, options), "TOKENYARD_NETWORK")


class _Opened:
    """A network that was opened, and this rank's proxy of it."""

    def __init__(
        self, world: World, number: str, stated: _Network, network: str, gpu: Optional[int], proxy: Proxy
    ) -> None:
        self.place, self.process = (world.rank, world.size), os.getpid()
        # The same on all ranks, and on no others.
        self.number = number
        self.stated, self.network, self.gpu, self.proxy = stated, network, gpu, proxy

    def serves(self, world: World, stated: _Network, gpu: Optional[int]) -> bool:
        """Whether contexts of this world may have it, as far as this rank knows."""
        same = self.place == (world.rank, world.size) and self.process == os.getpid() and self.stated == stated
        return same and (gpu is None or gpu == self.gpu or self.network not in _RDMA)


_OPENED: "weakref.WeakSet[_Opened]" = weakref.WeakSet()
_CONTEXTS: "weakref.WeakSet[AllToAll]" = weakref.WeakSet()
# Ranks may be threads.
_LOCK = threading.Lock()
_WARNED: MutableSet[str] = set()


class Hosts:
    """The ranks of a world, and where it has several nodes the network between them. Making one is collective, and so
    is `context`. What one rank cannot do is an error on all of them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._used: List[_Opened] = []
        self._several = len(world.nodes) > 1
        if self._several:
            self._agree()
            # Now, so that a network that cannot be opened is an error here. Which GPU there will be is not known yet.
            cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
            gpu = cuda.current_device() if cuda is not None and cuda.is_initialized() else None
            common = self._common(gpu)
            self._used.append(common[0] if common else self._open(gpu))

    def context(self, **limits: Any) -> AllToAll:
        """`AllToAll(world, **limits)`, over a proxy where there are several nodes."""
        if not self._several:
            return AllToAll(self.world, **limits)
        kind, _, number = str(limits.get("device", "cuda")).partition(":")
        gpu = None if kind == "cpu" else int(number) if number else self.world.local_rank
        for opened in self._common(gpu):
            ep = self._over(opened, limits)
            if ep is not None:
                return ep
        ep = self._over(self._open(gpu), limits, last=True)
        assert ep is not None
        return ep

    def close(self) -> None:
        """Gives the proxies up, which end with the last context and the last `Hosts` that use them. Local."""
        self._used.clear()

    def must_agree(self, name: str, value: object) -> None:
        """Refuses on all ranks what they do not give alike. Collective."""
        given = [each[name] for each in self._exchange({name: str(value)})]
        if len(set(given)) > 1:
            refuse(ConfigError, f"{name} is {by_ranks(given)}: give the same on all ranks")

    def _agree(self) -> None:
        """Exchanges what ranks state, and what they have."""
        own: Dict[str, Any] = {"host": host(), "address": _address()}
        try:
            self._network = _stated()
            own.update(terms=self._network.terms(), nics=_nics())
        except (TypeError, ValueError) as error:
            own["refused"] = str(error)
        ranks = self._exchange(own)
        for rank, each in enumerate(ranks):
            if "refused" in each:
                refuse(ConfigError, f"rank {rank}: {each['refused']}")
        terms = [each["terms"] for each in ranks]
        if len(set(terms)) > 1:
            refuse(
                ConfigError, f"the network between hosts is {by_ranks(terms)}: set TOKENYARD_NETWORK alike on all ranks"
            )
        self._here = [each["host"] for each in ranks].count(own["host"])
        self._source = _source(own, ranks)
        self._networks = [self._network.name]
        if self._network.name == "auto":
            self._networks = [*(name for name in _RDMA if all(name in each["nics"] for each in ranks)), "tcp"]

    def _common(self, gpu: Optional[int]) -> List[_Opened]:
        """The proxies that all ranks have, for contexts on this GPU or on the CPU, in the same order on all of them."""
        with _LOCK:
            fit = {each.number: each for each in _OPENED if each.serves(self.world, self._network, gpu)}
        ranks = self._exchange({"have": list(fit)})
        return [fit[number] for number in ranks[0]["have"] if all(number in each["have"] for each in ranks)]

    def _open(self, gpu: Optional[int]) -> _Opened:
        """Opens the network on all ranks: the first of several that can be opened on all of them."""
        *others, last = self._networks
        for network in others:
            try:
                return self._open_one(network, gpu)
            except (Error, ValueError) as error:
                self._warn(f"the network {network} is left out: {error}")
        if self._network.name == "auto":
            self._warn(
                "ranks are on several hosts, and no network of RDMA NICs could be opened on all of them: TCP links "
                "them, through the kernel. Set TOKENYARD_NETWORK=tcp if that is meant; else see `tokenyard doctor`"
            )
        return self._open_one(last, gpu)

    def _warn(self, text: str) -> None:
        """What all ranks found, as one of them logs it."""
        if self.world.rank == 0:
            _warn_once(text)

    def _open_one(self, network: str, gpu: Optional[int]) -> _Opened:
        options: Dict[str, Any] = {"silence": _SILENCE, "spinners": 2 * self._here, **self._network.options}
        if network in _RDMA:
            if self._network.name == "auto":
                # It is of TCP, which may come after this one.
                options.pop("source", None)
            options["gpu"] = gpu
            names = options.setdefault("names", _near(gpu, network))
            most = max(each["nics"] for each in self._exchange({"nics": len(names)}))
            options.setdefault("nics", min(max(most, 1), _MOST_NICS))
        if network == "tcp":
            options.setdefault("source", self._source)
        proxy, failure = None, None
        try:
            proxy = Proxy(self.world, network, **options)
        except Exception as error:
            # Whatever it is: other ranks are in the exchange.
            failure = error
        try:
            ranks = self._exchange({"number": uuid.uuid4().hex, "failed": failure and str(failure)})
        except Error:
            # The simulated network's own exchange failed, which ended the world's.
            if failure is not None:
                raise failure from None
            raise
        if failure is not None:
            try:
                raise failure
            finally:
                # Its frames have this one, which is not to have it.
                del failure
        for rank, each in enumerate(ranks):
            if each["failed"] and proxy is not None:
                proxy.close()
                refuse(TransportError, f"rank {rank} could not open the network {network}: {each['failed']}")
        assert proxy is not None
        opened = _Opened(self.world, ranks[0]["number"], self._network, network, gpu, proxy)
        with _LOCK:
            _OPENED.add(opened)
        _log.info("rank %d of %d: opened %s", self.world.rank, self.world.size, network)
        return opened

    def _over(self, opened: _Opened, limits: Dict[str, Any], last: bool = False) -> Optional[AllToAll]:
        """A context over a proxy; none if the proxy has no room for it, which other ranks find alike."""
        try:
            ep = AllToAll(self.world, **limits, proxy=opened.proxy)
        except Error as error:
            if last:
                raise
            # It is an error on all ranks: its own where it is, and quoted on the others.
            full = isinstance(error, ConfigError) and getattr(error, "name", None) in _FULL
            try:
                if any(each["full"] for each in self._exchange({"full": full})):
                    return None
            except Error:
                pass
            raise
        if opened not in self._used:
            self._used.append(opened)
        with _LOCK:
            _CONTEXTS.add(ep)
        return ep

    def _exchange(self, own: Dict[str, Any]) -> List[Dict[str, Any]]:
        """What every rank gives, by rank. Collective."""
        return [json.loads(part) for part in self.world.all_gather(json.dumps(own).encode())]


def _warn_once(text: str) -> None:
    if text not in _WARNED:
        _WARNED.add(text)
        _log.warning("%s", text)


def _nics() -> List[str]:
    """Kinds of RDMA NICs of this host: "efa"; "verbs" where a port is active."""
    return sorted(set(_kinds().values()))


def _kinds() -> Dict[str, str]:
    """Names of this host's usable RDMA NICs, and the network of each."""
    found = {}
    for folder in glob.glob("/sys/class/infiniband/*"):
        name = os.path.basename(folder)
        if os.path.basename(os.path.realpath(f"{folder}/device/driver")) == "efa":
            found[name] = "efa"
        elif any("ACTIVE" in _text(state) for state in glob.glob(f"{folder}/ports/*/state")):
            found[name] = "verbs"
    return found


def _near(gpu: Optional[int], network: str) -> List[str]:
    """The NICs of a network near a GPU of this process; none: the network's own choice."""
    kinds = _kinds()
    if gpu is None or network not in kinds.values():
        return []
    try:
        properties: Any = sys.modules["torch"].cuda.get_device_properties(gpu)
        # Older torch lacks them.
        numbers = [properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id]
    except (AssertionError, AttributeError, RuntimeError) as error:
        _warn_once(f"NICs are not chosen by GPUs: {error}")
        return []
    return [name for name in near("{:04x}:{:02x}:{:02x}.0".format(*numbers)) if kinds.get(name) == network]


def near(gpu: str, *record: str) -> List[str]:
    """The NICs near the GPU of a PCI address, as `tokenyard topology` chooses them; none where it knows none. `record`:
    further arguments of the program."""
    command = [sys.executable, "-m", "tokenyard", "topology", "--json", "-", *record]
    try:
        shown = subprocess.run(command, capture_output=True, check=True, timeout=30, text=True)
        gpus = json.loads(shown.stdout)["gpus"]
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        _warn_once(f"NICs are not chosen by GPUs: {error}")
        return []
    return [nic["name"] for each in gpus if each["gpu"] == gpu for nic in each["nics"]]


def _text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _address() -> Optional[str]:
    """The address by which other hosts may reach this one: `TOKENYARD_ADDR`, or the one that leads to `MASTER_ADDR`."""
    return os.environ.get("TOKENYARD_ADDR") or _toward(os.environ.get("MASTER_ADDR"))


@functools.lru_cache(maxsize=None)
def _toward(other: Optional[str]) -> Optional[str]:
    """This host's address on the way to another one; nothing is sent."""
    if not other:
        return None
    try:
        family, kind, _, _, place = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as way:
            way.connect(place)
            return str(way.getsockname()[0])
    except OSError:
        return None


def _source(own: Dict[str, Any], ranks: List[Dict[str, Any]]) -> Optional[str]:
    """The address of this rank's TCP connections; `None`: the provider's choice. On the host of `MASTER_ADDR` the way
    to it may be a loopback, which other hosts cannot reach: there it is the address that leads to another host."""
    address: Optional[str] = own["address"]
    if address is not None and _is_loopback(address):
        for each in ranks:
            if each["host"] != own["host"]:
                other = each["address"]
                return None if other is None or _is_loopback(other) else _toward(other)
    return address


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address == "localhost"


@atexit.register
def _close() -> None:
    """Closes what is still open in this process: what its ranks have sent leaves first."""
    with _LOCK:
        contexts, opened = list(_CONTEXTS), list(_OPENED)
    for ep in contexts:
        ep.close()
    for each in opened:
        each.proxy.close()
