"""Log lines of a command: to standard error, one format."""

from __future__ import annotations

import logging

from nemo_rl_like.artifacts.redaction import redacting_handlers


def log_to_stderr(level: int = logging.INFO) -> None:
    """Send this package's log records of `level` and above to standard error; other packages' warnings too."""
    logging.basicConfig(level=logging.WARNING)
    redacting_handlers("%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("nemo_rl_like").setLevel(level)
