"""DeepEP's interfaces over tokenyard: `deep_ep.Buffer` (version 1), `deep_ep.ElasticBuffer` (version 2), and HybridEP's
`deep_ep.HybridEPBuffer`. Engines that import `deep_ep` run unchanged, on GPUs and on CPU tensors.

    import tokenyard
    tokenyard.install_as("deep_ep")      # before the engine imports deep_ep

docs/deep_ep.md has every argument, and what differs.
"""

import torch

from .._hosts import set_network
from ._buffer import Buffer
from ._config import Config
from ._elastic import ElasticBuffer, EPHandle
from ._hybrid import HybridEPBuffer
from .utils import EventHandle, EventOverlap

topk_idx_t = torch.int64
"""The type of experts' numbers that DeepEP asks for; int32 is taken as well."""

__all__ = [
    "Buffer", "Config", "EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap", "HybridEPBuffer", "set_network",
    "topk_idx_t",
]
