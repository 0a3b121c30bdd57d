"""The real kubectl. Debian's package is `kubernetes-client`."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path


def kubectl(*words: str, kubeconfig: Path | None = None, text: str | None = None) -> str:
    """Run kubectl; returns what it printed. Raises AssertionError with its words where it fails or is not installed."""
    program = shutil.which("kubectl")
    assert program is not None, (
        "kubectl is not installed; `make install-system`, or on Debian `apt-get install kubernetes-client`"
    )
    options = [] if kubeconfig is None else ["--kubeconfig", str(kubeconfig), "--request-timeout", "60s"]
    with tempfile.TemporaryDirectory() as home:  # its cache of what a server has
        environment = {"PATH": "/usr/bin:/bin", "HOME": home}
        done = subprocess.run(
            [program, *words, *options], input=text, capture_output=True, text=True, timeout=120, env=environment
        )
    assert done.returncode == 0, done.stderr
    return done.stdout
