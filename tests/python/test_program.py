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
