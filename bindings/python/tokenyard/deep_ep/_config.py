"""DeepEP's settings of kernels, and how many bytes it asks for with them."""

from __future__ import annotations

from typing import Dict, Tuple

# DeepEP's csrc/legacy/config.hpp (2.1.0): bytes of a token's choices (128 int64), weights (128 fp32), scales (128 fp32)
# and source, which its buffers have room for.
_OF_TOKEN = 128 * 8 + 128 * 4 + 128 * 4 + 8
_NODE_RANKS = 8


class Config:
    """DeepEP's settings. Calls take their own; the numbers are for its size hints, which callers give to `Buffer`."""

    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        send, nvl_recv = num_max_nvl_chunked_send_tokens, num_max_nvl_chunked_recv_tokens
        if num_sms < 0 or not 0 < send < nvl_recv:
            raise ValueError(
                f"num_sms is {num_sms}, num_max_nvl_chunked_send_tokens {send} and num_max_nvl_chunked_recv_tokens "
                f"{nvl_recv}: give 0 or more, and between 0 and the last"
            )
        rdma_send = num_max_rdma_chunked_send_tokens
        if rdma_send <= 0 or num_max_rdma_chunked_recv_tokens <= 0:
            raise ValueError(
                f"num_max_rdma_chunked_send_tokens is {rdma_send} and num_max_rdma_chunked_recv_tokens "
                f"{num_max_rdma_chunked_recv_tokens}: give 1 or more"
            )
        rdma_recv = -(-num_max_rdma_chunked_recv_tokens // rdma_send) * rdma_send
        if rdma_send > rdma_recv // 2:
            raise ValueError(
                f"num_max_rdma_chunked_send_tokens is {rdma_send}: give at most half of "
                f"num_max_rdma_chunked_recv_tokens, {num_max_rdma_chunked_recv_tokens}"
            )
        self.num_sms = num_sms
        self.num_max_nvl_chunked_send_tokens, self.num_max_nvl_chunked_recv_tokens = send, nvl_recv
        self.num_max_rdma_chunked_send_tokens, self.num_max_rdma_chunked_recv_tokens = rdma_send, rdma_recv

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes that DeepEP asks for within a node."""
        nodes, ranks = max(num_ranks // _NODE_RANKS, 1), min(num_ranks, _NODE_RANKS)
        chunks = self.num_sms // 2 * ranks
        bytes_ = chunks * (2 * nodes + 3) * 4
        bytes_ += chunks * self.num_max_nvl_chunked_recv_tokens * (hidden_bytes + _OF_TOKEN)
        return -(-bytes_ // 128) * 128

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes that DeepEP asks for between nodes; none within one."""
        if num_ranks <= _NODE_RANKS:
            return 0
        chunks = self.num_sms // 2 * (num_ranks // _NODE_RANKS)
        bytes_ = chunks * (_NODE_RANKS * 2 + 2) * 2 * 4
        bytes_ += chunks * self.num_max_rdma_chunked_recv_tokens * (hidden_bytes + _OF_TOKEN + 16) * 2
        return -(-bytes_ // 128) * 128


def low_latency_size_hint(tokens: int, hidden: int, ranks: int, experts: int) -> int:
    """Bytes that DeepEP asks for in its low-latency mode (`LowLatencyLayout` in the same file)."""
    scales = hidden // 128
    row = 16 + max(2 * hidden, hidden + 4 * scales)
    partial = 4 * scales + 2 * hidden
    sent = max(tokens * row, experts * tokens * partial)
    received = max(experts * tokens * row, experts * tokens * partial)
    bytes_ = 2 * (sent + received + -(-4 * experts // 128) * 128)
    return (bytes_ + 128) // 128 * 128


# What DeepEP's get_dispatch_config and get_combine_config have for each number of ranks, after the number of SMs.
_DISPATCH: Dict[int, Tuple[int, int, int, int]] = {
    2: (24, 256, 6, 128), 4: (6, 256, 6, 128), 8: (6, 256, 6, 128), 16: (36, 288, 20, 128), 24: (32, 288, 8, 128),
    32: (32, 288, 8, 128), 48: (32, 288, 8, 128), 64: (32, 288, 8, 128), 96: (20, 480, 12, 128),
    128: (20, 560, 12, 128), 144: (32, 720, 12, 128), 160: (28, 720, 12, 128),
}
_COMBINE: Dict[int, Tuple[int, int, int, int]] = {
    2: (10, 256, 6, 128), 4: (9, 256, 6, 128), 8: (4, 256, 6, 128), 16: (4, 288, 12, 128), 24: (1, 288, 8, 128),
    32: (1, 288, 8, 128), 48: (1, 288, 8, 128), 64: (1, 288, 8, 128), 96: (1, 480, 8, 128), 128: (1, 560, 8, 128),
    144: (2, 720, 8, 128), 160: (2, 720, 8, 128),
}


def _of(table: Dict[int, Tuple[int, int, int, int]], sms: int, ranks: int) -> Config:
    """That of as many ranks, or of the next larger number that DeepEP has."""
    return Config(sms, *table[min((known for known in table if known >= ranks), default=max(table))])


def dispatch_config(sms: int, ranks: int) -> Config:
    """DeepEP's settings of dispatch."""
    return _of(_DISPATCH, sms, ranks)


def combine_config(sms: int, ranks: int) -> Config:
    """DeepEP's settings of combine."""
    return _of(_COMBINE, sms, ranks)


def elastic_size_hint(
    ranks: int, tokens: int, hidden: int, choices: int, fp8: bool, allow_multiple_reduction: bool
) -> int:
    """Bytes that DeepEP asks for in its version 2, of ranks that all reach each other by NVLink
    (`calculate_buffer_size` in csrc/elastic/buffer.hpp)."""
    if tokens <= 0 or hidden <= 0:
        raise ValueError(f"num_max_tokens_per_rank is {tokens} and hidden {hidden}: give more than 0 of both")
    choices = choices or 32

    def token(row: int, scales: int, words: int) -> int:
        return sum(-(-part // 32) * 32 for part in (row, scales, 4 * words))

    # Choices and weights, and in dispatch the token's number and a place for each choice.
    row, scales = (hidden, 4 * -(-hidden // 32)) if fp8 else (2 * hidden, 0)
    dispatch = ranks * tokens * token(row, scales, 3 * choices + 1)
    partials = min(ranks, choices) if allow_multiple_reduction else choices
    combine = partials * tokens * token(2 * hidden, 0, 2 * choices)
    return -(-max(dispatch, combine) // (1 << 21)) * (1 << 21)
