"""A double of `ray start --block`, for starts that fail on demand: `ray_double.py FOLDER FAILURES start ... --temp-dir=DIR ...`.

It leaves a daemon behind, as the real one does when its 30 s are over, and writes DIR/ray_current_cluster once it is up.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path


def main(folder: Path, failures: int, arguments: list[str]) -> int:
    """Fail in the first `failures` starts; FOLDER/starts has a line a start: its daemon's process id, and whether the folder around DIR was empty."""
    temp = next(Path(word.partition("=")[2]) for word in arguments if word.startswith("--temp-dir="))
    daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    clean = not list(temp.parent.iterdir())
    temp.mkdir()
    with (folder / "starts").open("a") as starts:
        starts.write(f"{daemon.pid} {clean}\n")
    number = len((folder / "starts").read_text().splitlines())
    (temp / "session").write_text("of a start")
    if number <= failures:
        print(f"The current node timed out during startup ({number})", flush=True)
        return 1
    (temp / "ray_current_cluster").write_text("here")
    time.sleep(600)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
