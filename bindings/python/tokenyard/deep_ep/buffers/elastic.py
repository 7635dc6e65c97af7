"""`deep_ep.buffers.elastic`: the `ElasticBuffer` of version 2."""

from .._elastic import ElasticBuffer, EPHandle

__all__ = ["EPHandle", "ElasticBuffer"]
