"""The program: `tokenyard doctor`, `bench`, `verify` and so on, or `python -m tokenyard` with the same."""

import os
import signal
import sys

from ._native import run_program


def main() -> int:
    """Runs the program with the arguments of this process."""
    # The program ends at once by Ctrl-C, as others do: Python would only look once it has returned. Where Ctrl-C is
    # ignored, as in a shell's background, it stays so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Kernels of ranks that share a GPU wait for one another, so their streams must not share one of its queues.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # The command that the package installs beside the interpreter; a rank that is a process is started by it.
    command = os.path.join(os.path.dirname(sys.executable), "tokenyard")
    return run_program(sys.argv[1:], command if os.access(command, os.X_OK) else None)


if __name__ == "__main__":
    sys.exit(main())
