"""What all tests have in common."""

import signal

# A shell that starts tests in the background lets them ignore SIGINT, and so the processes that they start. Several tests
# are of Ctrl-C. A handler of this process is no handler of those, which begin with the system's own.
signal.signal(signal.SIGINT, signal.default_int_handler)
