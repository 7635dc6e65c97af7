"""The program: `tokenyard doctor`, `bench`, `verify` and so on, or `python -m tokenyard` with the same."""

import os
import sys
from typing import Optional

from . import _program
from ._native import run_program, version


def command() -> Optional[str]:
    """The command that the package installs, by which a rank that is a process is started.

    It is beside the interpreter, or, where pip was given a folder by --target, in that folder's bin.
    """
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    places = [os.path.dirname(sys.executable), os.path.join(folder, "bin")]
    found = (os.path.join(place, "tokenyard") for place in places)
    return next((path for path in found if os.access(path, os.X_OK)), None)


def wheel() -> str:
    """The version of the package, and the platform that its wheel is for."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        text = distribution("tokenyard").read_text("WHEEL") or ""
    except PackageNotFoundError:
        text = ""
    tags = [line.partition(": ")[2] for line in text.splitlines() if line.startswith("Tag: ")]
    return f"tokenyard {version}, {', '.join(tags) or 'of no wheel that is installed'}"


def main() -> int:
    """Runs the program with the arguments of this process."""
    for argument in sys.argv[1:]:
        try:
            argument.encode()
        except UnicodeEncodeError:
            _program.complain("tokenyard", f"argument {ascii(argument)} is no UTF-8: give it, or the file, another name")
            return 2
    if sys.argv[1:] == ["doctor"] and _program.say("tokenyard", f"has    wheel         {wheel()}") != 0:
        return 1
    # Python would only look for Ctrl-C once the program has returned.
    _program.end_by_ctrl_c()
    # Kernels of ranks that share a GPU wait for one another, so their streams must not share one of its queues.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    return run_program(sys.argv[1:], command())


if __name__ == "__main__":
    sys.exit(main())
