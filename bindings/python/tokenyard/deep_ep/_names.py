"""DeepEP's names of modules for those that are here."""

from __future__ import annotations

import importlib
import sys

_PACKAGE = "tokenyard.deep_ep"
_SUBMODULES = ("buffer", "buffers", "buffers.elastic", "buffers.legacy", "hybrid_ep_buffer", "utils")


def take(name: str) -> None:
    """Makes `import name`, and imports of its submodules, get `tokenyard.deep_ep` in this process."""
    for submodule in _SUBMODULES:
        # Not once more from the same file: classes are compared.
        sys.modules[f"{name}.{submodule}"] = importlib.import_module(f"{_PACKAGE}.{submodule}")
    sys.modules[name] = importlib.import_module(_PACKAGE)
