from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple, final

__all__ = [
    "ArgumentError",
    "BootstrapError",
    "CapacityError",
    "ClosedError",
    "CombineSent",
    "ConfigError",
    "Context",
    "DeviceError",
    "Error",
    "Format",
    "GenerationError",
    "Half",
    "Handle",
    "IncompleteError",
    "InterruptedError",
    "OneCall",
    "OrderError",
    "Output",
    "PeerLostError",
    "Plan",
    "Proxy",
    "RankMask",
    "RoutingError",
    "Sent",
    "TimeoutError",
    "TransportError",
    "World",
    "barrier",
    "define_operators",
    "direct_calls",
    "direct_combine",
    "direct_combine_into",
    "direct_dispatch",
    "direct_dispatch_into",
    "direct_low_latency_combine",
    "direct_low_latency_dispatch",
    "direct_low_latency_send",
    "direct_low_latency_send_back",
    "half_is_kept",
    "half_of",
    "host", "is_usual", "must_be_main",
    "newest_half",
    "operator_handle",
    "operator_handles",
    "run_program",
    "take_pending",
    "taken_handle",
    "version",
]

version: str

def barrier(context: Context, stream: int) -> None: ...
def is_usual(*objects: Any) -> bool: ...
def define_operators() -> bool: ...
def direct_calls(operators: Sequence[Any]) -> bool: ...
def direct_dispatch(x: Any, topk_idx: Any, topk_weights: Any, scales: Any, plan: int) -> Tuple[List[Any], int]: ...
def direct_dispatch_into(
    x: Any, topk_idx: Any, topk_weights: Any, scales: Any, rows: Any, counts: Any, row_scales: Any, first: Any,
    second: Any, plan: int,
) -> Tuple[List[Any], int]: ...
def direct_combine(rows: Any, handle: Any, topk_weights: Any, tokens: int) -> Tuple[List[Any], int]: ...
def direct_combine_into(
    rows: Any, handle: Any, topk_weights: Any, out: Any, flags: int
) -> Tuple[List[Any], int]: ...
def direct_low_latency_dispatch(x: Any, topk_idx: Any, plan: int) -> Tuple[List[Any], int]: ...
def direct_low_latency_send(x: Any, topk_idx: Any, plan: int) -> Tuple[List[Any], int]: ...
def direct_low_latency_send_back(
    rows: Any, topk_idx: Any, topk_weights: Any, handle: int
) -> Tuple[List[Any], int]: ...
def direct_low_latency_combine(
    rows: Any, topk_idx: Any, topk_weights: Any, handle: int
) -> Tuple[List[Any], int]: ...
def host() -> str: ...
def must_be_main() -> None: ...
def operator_handle(key: int) -> Optional[Tuple[int, Handle, str]]: ...
def operator_handles() -> int: ...
def take_pending(number: int) -> Optional[BaseException]: ...
def taken_handle(number: int) -> Optional[Handle]: ...
def newest_half() -> Optional[Half]: ...
def half_is_kept(number: int) -> None: ...
def half_of(number: int) -> Optional[Half]: ...
def run_program(arguments: Sequence[str], program: Optional[str] = None) -> int: ...

class Error(RuntimeError):
    fatal: bool
    handle: Handle
    sent: Any
    dispatched: Any

class ArgumentError(Error, ValueError):
    name: str

class ConfigError(Error, ValueError):
    name: str

class TransportError(Error): ...
class DeviceError(Error): ...
class BootstrapError(Error): ...
class InterruptedError(Error): ...
class ClosedError(Error): ...

class RoutingError(Error):
    rank: int
    epoch: int

class CapacityError(Error):
    rank: int
    epoch: int
    needed: int
    given: int

class IncompleteError(Error):
    rank: int
    epoch: int
    peer: int

class OrderError(Error):
    rank: int

class GenerationError(Error):
    rank: int
    generation: int
    newest: int

class TimeoutError(Error):
    rank: int
    peer: int
    epoch: int
    wait: str
    seconds: float

class PeerLostError(Error):
    rank: int
    peer: int
    epoch: int
    wait: str

@final
class World:
    @staticmethod
    def threads(n: int) -> List[World]: ...
    @staticmethod
    def from_env() -> World: ...
    @staticmethod
    def over(
        rank: int,
        size: int,
        all_gather: Callable[[str, bytes, float], Iterable[bytes]],
        *,
        local_rank: Optional[int] = None,
    ) -> World: ...
    @staticmethod
    def from_group(group: Any = None) -> World: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def most_tokens(self) -> int: ...
    @property
    def nodes(self) -> List[int]: ...
    def with_nodes(self, sizes: Sequence[int]) -> World: ...
    @property
    def timeout(self) -> float: ...
    def with_timeout(self, seconds: float) -> World: ...
    def barrier(self) -> None: ...
    def all_gather(self, own: bytes) -> List[bytes]: ...
    def regroup(
        self,
        generation: int,
        members: Sequence[int],
        *,
        all_gather: Optional[Callable[[str, bytes, float], Iterable[bytes]]] = None,
        group: Any = None,
    ) -> World: ...
    def close(self) -> None: ...
    def __enter__(self) -> World: ...
    def __exit__(self, *raised: Any) -> None: ...

@final
class Proxy:
    def __new__(
        cls,
        world: World,
        network: str,
        *,
        nics: int = 1,
        names: Optional[Sequence[str]] = None,
        source: Optional[str] = None,
        gpu: Optional[int] = None,
        silence: float = 1.0,
        core: Optional[int] = None,
        spinners: int = 0,
        seed: int = 0,
    ) -> Proxy: ...
    def close(self) -> None: ...
    def __enter__(self) -> Proxy: ...
    def __exit__(self, *raised: Any) -> None: ...

@final
class Format:
    def __new__(
        cls,
        hidden: int,
        max_tokens: int,
        *,
        dtype: str = "bf16",
        scales: Optional[str] = None,
        quantize: bool = False,
        combine_dtype: str = "bf16",
        weights: str = "dispatch",
    ) -> Format: ...
    @property
    def hidden(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def scales(self) -> Optional[str]: ...
    @property
    def quantize(self) -> bool: ...
    @property
    def combine_dtype(self) -> str: ...
    @property
    def weights(self) -> str: ...
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs_ex__(self) -> Tuple[Tuple[int, int], Dict[str, Any]]: ...

@final
class OneCall:
    def __enter__(self) -> None: ...
    def __exit__(self, *_error: Any) -> None: ...

@final
class RankMask:
    @property
    def __array_interface__(self) -> Dict[str, Any]: ...
    @property
    def __cuda_array_interface__(self) -> Dict[str, Any]: ...

@final
class Plan:
    def __new__(
        cls,
        context: Context,
        number: int,
        format: Format,
        layout: str,
        align: int,
        outputs: Sequence[Tuple[str, Sequence[int], str]],
        *,
        column_major: bool = False,
        views: Optional[Sequence[Tuple[str, Sequence[int], Sequence[int], int]]] = None,
        together: Optional[Sequence[Sequence[str]]] = None,
        shared: Optional[int] = None,
        drop_overflow: bool = False,
    ) -> Plan: ...
    @property
    def number(self) -> int: ...

@final
class Handle:
    @property
    def tokens(self) -> int: ...
    @property
    def format(self) -> Format: ...
    @property
    def number(self) -> Optional[int]: ...

@final
class Half:
    def receive(self) -> Optional[Handle]: ...

@final
class Sent: ...

@final
class CombineSent:
    @property
    def tokens(self) -> int: ...

@final
class Output:
    def __new__(
        cls,
        layout: str,
        rows: Any,
        counts: Any,
        *,
        align: int = 1,
        scales: Any = None,
        column_major: bool = False,
        zero_padding: bool = False,
        offsets: Any = None,
        row_expert: Any = None,
        source: Any = None,
        token_experts: Any = None,
        token_weights: Any = None,
        row_count: Any = None,
        payload: Any = None,
        source_ranges: Any = None,
        total_counts: Any = None,
        wait_times: Any = None,
        drop_overflow: bool = False,
    ) -> Output: ...

@final
class Context:
    def __new__(
        cls,
        world: World,
        format: Format,
        *,
        experts: int,
        top_k: int,
        payload_words: int,
        dispatch_payload_words: int,
        device: str = "cuda",
        room_for: Optional[Sequence[Format]] = None,
        timeout: float = 30.0,
        sms: Optional[int] = None,
        placement: Optional[Sequence[int]] = None,
        duplicates: bool = False,
        missing_ranks: str = "fatal",
        partial: str = "same",
        round_tokens: Optional[int] = None,
        handles: Optional[int] = None,
        handle_rows: Optional[int] = None,
        proxy: Optional[Proxy] = None,
    ) -> Context: ...
    def one_call(self) -> OneCall: ...
    @property
    def format(self) -> Format: ...
    @property
    def rounds(self) -> int: ...
    @property
    def local_experts(self) -> List[int]: ...
    @property
    def on_cpu(self) -> bool: ...
    @property
    def ordinal(self) -> Optional[int]: ...
    def dispatch(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        output: Output,
        *,
        scales: Any = None,
        count: Any = None,
        payload: Any = None,
        format: Optional[Format] = None,
        stream: int = 0,
    ) -> Handle: ...
    def dispatch_send(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any = None,
        *,
        scales: Any = None,
        count: Any = None,
        payload: Any = None,
        format: Optional[Format] = None,
        counts: bool = False,
        stream: int = 0,
    ) -> Sent: ...
    def counts(self, sent: Sent, seconds: float) -> Tuple[List[int], List[int]]: ...
    def dispatch_again(
        self,
        handle: Handle,
        x: Any,
        rows: Any,
        *,
        scales: Any = None,
        row_scales: Any = None,
        column_major: bool = False,
        count: Any = None,
        payload: Any = None,
        row_payload: Any = None,
        format: Optional[Format] = None,
        stream: int = 0,
    ) -> None: ...
    def dispatch_recv(self, sent: Sent, output: Output, *, stream: int = 0) -> Handle: ...
    def combine(
        self,
        rows: Any,
        handle: Handle,
        out: Any,
        *,
        topk_weights: Any = None,
        accumulate: bool = False,
        payload: Any = None,
        payload_out: Any = None,
        dtype: Optional[str] = None,
        wait_times: Any = None,
        stream: int = 0,
    ) -> None: ...
    def combine_send(
        self, rows: Any, handle: Handle, *, topk_weights: Any = None, dtype: Optional[str] = None, stream: int = 0
    ) -> CombineSent: ...
    def combine_recv(
        self, sent: CombineSent, out: Any, *, accumulate: bool = False, wait_times: Any = None, stream: int = 0
    ) -> None: ...
    def mask_rank(self, rank: int) -> None: ...
    def rank_mask(self) -> RankMask: ...
    def silent_ranks(self) -> List[Tuple[int, str, int]]: ...
    def check(self) -> None: ...
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...
