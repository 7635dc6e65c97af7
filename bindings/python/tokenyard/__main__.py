"""The program: `python -m tokenyard doctor`, `bench`, `verify` and so on."""

import sys

from ._native import run_program

if __name__ == "__main__":
    sys.exit(run_program(sys.argv[1:]))
