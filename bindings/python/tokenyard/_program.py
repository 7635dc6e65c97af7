"""What the package's programs do alike with Ctrl-C, with stdout, and with files for results."""

from __future__ import annotations

import os
import signal
import sys
from typing import Optional


def end_by_ctrl_c() -> None:
    """Lets Ctrl-C end the process at once, as it ends other programs: Python would look for it only once threads that
    are ranks have ended. Where Ctrl-C is ignored, as in a shell's background, it stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def say(program: str, text: str) -> int:
    """Writes a line to stdout; the exit status, which is 1 if stdout cannot be written. A reader that has gone changes
    nothing, and a stdout that was closed from the start is /dev/null."""
    if sys.stdout is None:
        return 0
    try:
        print(text, flush=True)
    except OSError as error:
        # What the buffer holds would be written again at the end.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        if not isinstance(error, BrokenPipeError):
            complain(program, f"stdout cannot be written ({error.strerror}): free space there, or send it elsewhere")
            return 1
    return 0


def complain(program: str, sentence: str) -> None:
    """Writes a sentence to stderr, if there is one."""
    if sys.stderr is not None:
        try:
            # One write: ranks share stderr.
            sys.stderr.write(f"{program}: {sentence}\n")
            sys.stderr.flush()
        except OSError:
            pass


def no_file(path: str) -> Optional[str]:
    """Why a file cannot be made at `path`; None if it can, as far as its folder shows."""
    if os.path.isdir(path):
        return "that is a folder: give a file"
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        return f"there is no folder {folder}: give a file in a folder that exists"
    there = path if os.path.exists(path) else folder
    return None if os.access(there, os.W_OK) else f"{there} cannot be written: give another file"


def write_file(program: str, path: str, text: str) -> int:
    """Writes a file of results; the exit status, which is 1 if it cannot be written."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        complain(program, f"{path} cannot be written ({error.strerror}): free space there, or give another file")
        return 1
    return 0
