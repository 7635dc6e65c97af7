"""Stand-ins for packages that engines import for other things than what is tested."""

import functools
import importlib.abc
import importlib.machinery
import sys
import types

# Parts of SGLang, and packages, that it imports for other things than dispatchers, runners and layers: servers,
# clients, images, tokenizers, kernels. A package that is installed is itself.
PARTS = ("sglang.lang", "sglang.srt.entrypoints")
PACKAGES = ("IPython", "aiohttp", "compressed_tensors", "einops", "gguf", "loguru", "openai", "partial_json_parser",
            "pybase64", "requests", "sentencepiece", "starlette", "torchvision", "tvm_ffi", "zmq")


class Anything(type):
    """A class that is whatever is asked of it while modules are imported: a namespace, a base, a type, a decorator."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})

    def __call__(cls, *given, **named):
        return given[0] if len(given) == 1 and callable(given[0]) and not named else super().__call__()

    def __or__(cls, other):
        return cls

    __ror__ = __getitem__ = __or__


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules whose attributes are `Anything`, in place of those named."""

    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path, target=None):
        if any(name == one or name.startswith(f"{one}.") for one in self.names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = functools.partial(Anything.__getattr__, None)
        return module

    def exec_module(self, module):
        pass


def stand_in_for_sglangs_packages():
    """From now on, in this process."""
    # transformers looks at what there is before the stand-ins are.
    import transformers.modeling_utils  # noqa: F401

    sys.meta_path.insert(0, StandIns(PARTS))
    sys.meta_path.append(StandIns(PACKAGES))
