"""vLLM's Python files on a machine without GPUs: stand-ins for what they import and tests do not use, and ranks.

Of vLLM only the Python files are needed, in a folder of their own, `TOKENYARD_VLLM_FOLDER` or target/engines/vllm, into
which tests/all.sh unpacks them. A process imports them once, and ranks are forks of it, in gloo groups.
"""

import importlib.abc
import importlib.machinery
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
import traceback
import types

import torch

from engine_rig import DEVICE, on_its_device

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
# Packages that vLLM's modules import for servers, models, tokenizers and media.
PACKAGES = {
    "PIL", "aiohttp", "anthropic", "blake3", "cachetools", "cbor2", "compressed_tensors", "cpuinfo", "cv2", "depyf",
    "diskcache", "einops", "fastapi", "gguf", "google", "huggingface_hub", "httpx", "ijson", "jsonschema", "lark",
    "llguidance", "mcp", "mistral_common", "msgpack", "numba", "openai", "openai_harmony", "outlines_core",
    "partial_json_parser", "prometheus_client", "prometheus_fastapi_instrumentator", "pybase64", "pynvml", "requests",
    "safetensors", "scipy", "sentencepiece", "setproctitle", "soundfile", "starlette", "tiktoken", "tokenizers",
    "transformers", "uvicorn", "uvloop", "watchfiles", "xgrammar", "xxhash", "zmq",
}
# vllm.env_override changes torch's compiler, which it imports; the other is attention of AMD, which imports servers.
MODULES = {"vllm.env_override", "vllm.v1.attention.ops.rocm_aiter_mla_sparse"}


class _Kind(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Thing

    def __or__(cls, other):
        return object

    __ror__ = __or__

    def __iter__(cls):
        return iter(())


class Thing(metaclass=_Kind):
    """Any class, function or constant of a stand-in."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Thing()

    def __call__(self, *args, **kwargs):
        # As a decorator, what it decorates.
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else Thing()

    def __class_getitem__(cls, item):
        return cls

    @classmethod
    def __get_pydantic_core_schema__(cls, source, handler):
        from pydantic_core import core_schema

        return core_schema.any_schema()


class _Module(types.ModuleType):
    __version__ = "0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Thing


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name in MODULES or name.split(".")[0] in PACKAGES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


def vllm_folder():
    """Where vLLM's Python files are, or None."""
    folder = os.environ.get("TOKENYARD_VLLM_FOLDER") or os.path.join(ROOT, "target", "engines", "vllm")
    return folder if os.path.isfile(os.path.join(folder, "vllm", "__init__.py")) else None


def on_the_cpu():
    """Makes `import vllm` work in this process.

    - pin_memory in vllm.utils.torch_utils: counts are copied from pinned memory, of which a CPU has none. It is left as
      it is with `TOKENYARD_TEST_DEVICE=cuda`.
    - vllm.platforms: there is none, also with GPUs, since vLLM's kernels are not there.
    """
    sys.path.insert(0, vllm_folder())
    sys.meta_path.insert(0, _StandIns())
    import vllm.platforms

    vllm.platforms.builtin_platform_plugins.clear()
    import vllm.utils.torch_utils
    from vllm.model_executor.layers.fused_moe import modular_kernel

    if DEVICE == "cpu":
        vllm.utils.torch_utils.PIN_MEMORY = modular_kernel.PIN_MEMORY = False


def in_forks(ranks, work, seconds=60.0):
    """Runs `work(rank, ranks)` in forks of this process that have a gloo group; raises what one of them raised."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        reports = [fork.Pipe(False) for _ in range(ranks)]

        def run(rank):
            try:
                import torch.distributed as dist

                store = dist.FileStore(os.path.join(folder, "store"), ranks)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
                on_its_device(rank)
                work(rank, ranks)
                dist.barrier()
                reports[rank][1].send(None)
            except BaseException:
                reports[rank][1].send(traceback.format_exc())
            finally:
                sys.stdout.flush()
                os._exit(0)

        processes = [fork.Process(target=run, args=(rank,)) for rank in range(ranks)]
        for process in processes:
            process.start()
        # In the order in which they come: the first failure is the cause of others.
        waiting, failures, deadline = {report: rank for rank, (report, _) in enumerate(reports)}, [], seconds
        deadline += time.monotonic()
        while waiting and not failures:
            ready = multiprocessing.connection.wait(list(waiting), max(deadline - time.monotonic(), 0.0))
            if not ready:
                failures.append(f"ranks {sorted(waiting.values())} have not answered in {seconds} seconds")
            for report in ready:
                rank, got = waiting.pop(report), report.recv()
                failures += [f"rank {rank}: {got}"] if got else []
        for process in processes:
            process.join(0.1 if failures else 5)
            process.kill()
            process.join()
    if failures:
        raise AssertionError("\n".join(failures))


__all__ = ["Thing", "in_forks", "on_the_cpu", "torch", "vllm_folder"]
