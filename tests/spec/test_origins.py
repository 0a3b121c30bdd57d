"""Every value of a resolved spec has an origin, and what is shown reads back to the same values."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_rl_like.spec.loader import load_spec
from nemo_rl_like.spec.origins import DEFAULT, as_yaml, values_with_origins

CONFIGS = sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_what_is_shown_reads_back_to_the_resolved_spec(path: Path, tmp_path: Path) -> None:
    spec, values = values_with_origins(path)
    (tmp_path / "shown.yaml").write_text(as_yaml(values))
    assert load_spec(tmp_path / "shown.yaml") == load_spec(path) == spec


def test_origins_are_files_parents_overrides_presets_and_defaults(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "output: x\nmodel: {init: {}, tokenizer: {characters: '01'}}\nenvironment: {name: arithmetic}\n"
        "stages:\n  - kind: rl\n    algorithm: {preset: dapo}\n"
    )
    (tmp_path / "spec.yaml").write_text("extends: base.yaml\n\nseed: 5\n")
    _, values = values_with_origins(tmp_path / "spec.yaml", ["stages.rl.steps=3"])
    origins = {".".join(map(str, v.path)): v.origin for v in values}
    assert origins["seed"].endswith("spec.yaml:3")
    assert origins["output"].endswith("base.yaml:1")
    assert "stages.rl.steps=3" in origins["stages.0.steps"]
    assert "dapo.yaml" in origins["stages.0.algorithm.policy_loss.high"]
    assert origins["policy.layout.tp"] == DEFAULT
