"""Post-training for language models on the NVIDIA stack: one typed spec from data to a served checkpoint."""

import os

__version__ = "0.1.0"

# Both are read once, when ray is imported, by whatever module. A Ray without a token runs whatever anybody sends to its ports.
os.environ.setdefault("RAY_AUTH_MODE", "token")
# Ray says this on the driver's stdout beside the error that we raise.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed while executing")
