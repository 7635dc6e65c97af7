"""The name `deep_ep`: the distribution of that name, and `tokenyard.install_as`, in processes of their own."""

import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

if os.environ.get("TOKENYARD_STRICT") != "1":
    pytest.importorskip("torch")

SOURCE = pathlib.Path(__file__).resolve().parents[2] / "bindings" / "python" / "deep_ep_distribution"
CHECKS = """
import importlib.util, sys
assert importlib.util.find_spec("deep_ep") is not None
import deep_ep
import tokenyard.deep_ep
from deep_ep import Buffer, Config, EPHandle, ElasticBuffer, EventHandle, EventOverlap, HybridEPBuffer, topk_idx_t
assert deep_ep is tokenyard.deep_ep and sys.modules["deep_ep"] is deep_ep
assert importlib.util.find_spec("deep_ep") is not None and importlib.util.find_spec("deep_ep.utils") is not None
import deep_ep.buffer, deep_ep.buffers.elastic, deep_ep.buffers.legacy, deep_ep.hybrid_ep_buffer, deep_ep.utils
from deep_ep.utils import EventOverlap as event
assert event is EventOverlap and deep_ep.utils.EventHandle is EventHandle
assert deep_ep.buffer.Buffer is deep_ep.buffers.legacy.Buffer is Buffer and deep_ep.buffer.Config is Config
assert deep_ep.buffers.elastic.ElasticBuffer is ElasticBuffer and deep_ep.buffers.elastic.EPHandle is EPHandle
assert deep_ep.hybrid_ep_buffer.HybridEPBuffer is HybridEPBuffer
assert not [name for name in sys.modules if name.startswith("deep_ep._")]
import tokenyard
tokenyard.install_as("deep_ep")
import deep_ep as again
assert again is deep_ep
print("right")
"""


def run(program, *folders):
    """Runs a program with these folders before those of this process."""
    path = [*map(str, folders), *filter(None, sys.path)]
    ended = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": os.pathsep.join(path)}, capture_output=True, text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout.strip()) == (0, "right"), ended


def test_the_name_in_one_process():
    run('import tokenyard\ntokenyard.install_as("deep_ep")\n' + CHECKS)


def test_another_package_of_that_name_is_left_alone(tmp_path):
    (tmp_path / "deep_ep").mkdir()
    (tmp_path / "deep_ep" / "__init__.py").write_text("mine = True\n")
    run("""
import deep_ep, tokenyard
try:
    tokenyard.install_as("deep_ep")
except RuntimeError as error:
    assert "deep_ep is imported already, from" in str(error)
    assert deep_ep.mine
    print("right")
""", tmp_path)


@pytest.mark.parametrize("kind", ["folder", "made"])
def test_a_module_without_a_file_is_left_alone(tmp_path, kind):
    (tmp_path / "deep_ep").mkdir()
    made = "import deep_ep" if kind == "folder" else 'import sys, types\nsys.modules["deep_ep"] = types.ModuleType("deep_ep")'
    place = "['" if kind == "folder" else "no file"
    run(f"""
{made}
import tokenyard
try:
    tokenyard.install_as("deep_ep")
except RuntimeError as error:
    assert "deep_ep is imported already, from {place}" in str(error).replace("_NamespacePath(", ""), error
    print("right")
""", tmp_path)


def test_the_distribution(tmp_path):
    """Its wheel, built without network and installed where no other package is; or without a setuptools that builds wheels
    its package as it lies."""
    try:
        major, minor = map(int, importlib.metadata.version("setuptools").split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        major, minor = 0, 0
    if (major, minor) < (70, 1):
        assert os.environ.get("TOKENYARD_STRICT") != "1", "setuptools 70.1 or later is needed to build a wheel: install it"
        run(CHECKS, SOURCE)
        return
    shutil.copytree(SOURCE, tmp_path / "source")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir"]
    offline = ["-q", "--no-index", "--no-deps"]
    subprocess.run(
        [*pip, "wheel", *offline, "--no-build-isolation", "-w", str(tmp_path), str(tmp_path / "source")], check=True, timeout=300
    )
    wheel, = tmp_path.glob("*.whl")
    assert wheel.name.startswith("deep_ep-2.1.0+tokenyard-py3-none-any")
    with zipfile.ZipFile(wheel) as files:
        assert {name for name in files.namelist() if name.endswith(".py")} == {"deep_ep/__init__.py"}
        metadata, = (files.read(name).decode() for name in files.namelist() if name.endswith("/METADATA"))
        assert "Requires-Dist: tokenyard>=0.1.0" in metadata
    subprocess.run([*pip, "install", *offline, "--target", str(tmp_path / "site"), str(wheel)], check=True, timeout=300)
    run("""
import importlib.metadata
assert importlib.metadata.version("deep_ep") == "2.1.0+tokenyard"
""" + CHECKS, tmp_path / "site")
