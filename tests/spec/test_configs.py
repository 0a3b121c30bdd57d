"""Every committed config is a valid spec, and editors check it against the current schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_rl_like.pipeline.wiring import wire
from nemo_rl_like.spec.loader import json_schema, load_spec

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted(CONFIGS.rglob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_every_config_is_a_valid_spec_with_a_schema_line(path: Path) -> None:
    wire(load_spec(path))
    first = path.read_text().splitlines()[0]
    assert first.startswith("# yaml-language-server: $schema=")
    assert (path.parent / first.partition("=")[2]).resolve() == CONFIGS / "experiment.schema.json"


def test_the_committed_schema_is_the_current_one() -> None:
    written = json.loads((CONFIGS / "experiment.schema.json").read_text())
    assert written == json_schema(), "run `nrl schema > configs/experiment.schema.json`"
