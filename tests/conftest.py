"""One thread a process: two-thread OpenMP stalls on a loaded machine. Ctrl-C is heard even where the tests run in the background."""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has its children ignore it, and theirs
