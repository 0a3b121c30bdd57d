#!/usr/bin/env python3
"""A double of `docker` (and `podman`): reads the words that jobs use, refuses any other, and runs no container.

It keeps what it was asked in the folder DOUBLE_STATE. A container writes the lines of DOUBLE_LINES, and ends when it is told to stop, with 75,
or at once with DOUBLE_EXIT.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import secrets
import sys
import time
from pathlib import Path

STATE = Path(os.environ["DOUBLE_STATE"])


def main() -> int:
    command, *words = sys.argv[1:]
    commands = {"version": version, "image": image, "run": run, "inspect": inspect, "logs": logs, "stop": stop}
    return commands[command](words)


def version(words: list[str]) -> int:
    if "DOUBLE_DEAD" in os.environ:
        return fail("Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?")
    if "DOUBLE_SLOW" in os.environ:
        time.sleep(60)
    return 0


def image(words: list[str]) -> int:
    return (
        0
        if words[-1] == os.environ["DOUBLE_IMAGE"]
        else fail(f"Error response from daemon: No such image: {words[-1]}")
    )


def run(words: list[str]) -> int:
    parser = argparse.ArgumentParser(exit_on_error=True, allow_abbrev=False)
    for flag in ("--detach", "--init", "--read-only"):
        parser.add_argument(flag, action="store_true", required=flag != "--read-only")
    for word in ("name", "user", "cap-drop", "security-opt", "shm-size", "stop-timeout", "entrypoint"):
        parser.add_argument(f"--{word}", required=True)
    for word in ("cpus", "memory", "restart", "gpus", "userns"):
        parser.add_argument(f"--{word}")
    for word in ("tmpfs", "env", "mount", "device"):
        parser.add_argument(f"--{word}", action="append", default=[])
    parser.add_argument("image")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = vars(parser.parse_args(words))
    asked["environment"] = dict(e.partition("=")[::2] if "=" in e else (e, os.environ[e]) for e in asked.pop("env"))
    asked["mounts"] = [dict(f.partition("=")[::2] for f in next(csv.reader([m]))) for m in asked.pop("mount")]
    if [m for m in asked["mounts"] if not Path(m["source"]).exists()]:
        return fail("docker: Error response from daemon: invalid mount config: bind source path does not exist")
    if taken := [p for p in STATE.glob("*.json") if json.loads(p.read_text())["name"] == asked["name"]]:
        return fail(
            f'Conflict. The container name "/{asked["name"]}" is already in use by container "{taken[0].stem}".'
        )
    container = secrets.token_hex(32)
    ended = os.environ.get("DOUBLE_EXIT")
    state = {"Status": "running", "ExitCode": 0} if ended is None else {"Status": "exited", "ExitCode": int(ended)}
    keep(container, asked | {"state": state})
    print(container)
    return 0


def inspect(words: list[str]) -> int:
    _, format_, container = words
    if (known := find(container)) is None:
        return fail(f"Error: No such object: {container}")
    print({"{{json .State}}": json.dumps(known["state"]), "{{.Config.StopTimeout}}": known["stop_timeout"]}[format_])
    return 0


def logs(words: list[str]) -> int:
    container = words[-1]
    print(os.environ.get("DOUBLE_LINES", ""), flush=True)
    while "--follow" in words and (find(container) or {})["state"]["Status"] == "running":
        time.sleep(0.02)
    return 0


def stop(words: list[str]) -> int:
    (container,) = words
    if (known := find(container)) is None:
        return fail(f"Error response from daemon: No such container: {container}")
    if known["state"]["Status"] == "running":
        keep(container, known | {"state": {"Status": "exited", "ExitCode": 75}})
    return 0


def find(container: str) -> dict | None:
    path = STATE / f"{container}.json"
    return json.loads(path.read_text()) if path.exists() else None


def keep(container: str, known: dict) -> None:
    part = STATE / f".{container}"
    part.write_text(json.dumps(known))
    part.replace(STATE / f"{container}.json")


def fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
