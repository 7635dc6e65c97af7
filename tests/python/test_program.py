"""The programs `python -m tokenyard` and `python -m tokenyard.bench` where stdout, a file or an argument is unusable."""

import os
import subprocess
import sys

import pytest

BENCH = ["tokenyard.bench", "--device", "cpu", "--world", "1", "--tokens", "2", "--hidden", "128", "--experts", "2", "--top-k", "1",
         "--iters", "1"]
COMMANDS = {"doctor": ["tokenyard", "doctor"], "bench": BENCH, "json": [*BENCH, "--json", "-"]}


def command(name):
    if name != "doctor":
        pytest.importorskip("torch")
    return [sys.executable, "-m", *COMMANDS[name]]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_reader_that_has_gone_changes_nothing(name):
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(command(name), stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_stdout_that_cannot_be_written_is_one_sentence(name):
    with open("/dev/full", "w", encoding="ascii") as full:
        ended = subprocess.run(command(name), stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1, ended.stderr
    assert "stdout cannot be written (No space left on device" in ended.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_a_stdout_that_is_closed_from_the_start_is_dev_null(name):
    ended = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command(name)], stderr=subprocess.PIPE, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


LOG = """info tokenyard::world: rank 0 of 1: over the caller's all-gather
info tokenyard::world: rank 0: 0 of 1 in generation 1"""


def test_the_log_goes_to_stderr_where_it_is_asked_for():
    program = "import tokenyard; w = tokenyard.World.over(0, 1, lambda _, own, __: [own]); w.regroup(1, [0], all_gather=lambda _, own, __: [own])"
    for level, wanted in (("world=info", LOG), ("context=debug", "")):
        ended = subprocess.run([sys.executable, "-c", program], env=os.environ | {"TOKENYARD_LOG": level}, capture_output=True,
                               text=True, timeout=60)
        assert (ended.returncode, ended.stdout, ended.stderr.strip()) == (0, "", wanted)
    ended = subprocess.run([sys.executable, "-c", program], env=os.environ | {"TOKENYARD_LOG": "bogus"}, capture_output=True, text=True,
                           timeout=60)
    assert ended.returncode == 0 and "RuntimeWarning: variable TOKENYARD_LOG is `bogus`: give" in ended.stderr


def test_an_argument_that_is_no_text_is_refused():
    ended = subprocess.run([sys.executable, "-m", "tokenyard", "bench", b"--json=\xff"], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("tokenyard: argument '--json=\\udcff' is no UTF-8") and ended.stderr.count("\n") == 1


def test_a_file_of_results_that_cannot_be_written_is_one_sentence(capsys):
    from tokenyard import _program

    assert _program.no_file("results.json") is None
    assert _program.write_file("bench", "/dev/full", "text") == 1
    said = capsys.readouterr().err
    assert said.startswith("bench: /dev/full cannot be written (No space left on device)") and said.count("\n") == 1
