"""`deep_ep.hybrid_ep_buffer`, where HybridEP has its buffer."""

from ._hybrid import HybridEPBuffer

__all__ = ["HybridEPBuffer"]
