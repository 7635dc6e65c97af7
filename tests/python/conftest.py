"""What all tests have in common."""

import os
import signal

# A shell that starts tests in the background lets them ignore SIGINT, and so the processes that they start. Several tests
# are of Ctrl-C. A handler of this process is no handler of those, which begin with the system's own.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Ranks that share a GPU need a hardware queue for each of their streams: a kernel that waits for another rank holds up
# what is behind it in its queue, and to load a kernel waits for what runs. CUDA reads this as it starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

if os.environ.get("TOKENYARD_TEST_NODES") == "2":
    # An exception in nodes/sitecustomize.py would go unseen.
    from tokenyard import _worlds

    assert _worlds.world_over.__name__ == "of_two_nodes"
