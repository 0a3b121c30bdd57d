"""A layout that does not divide a job's model is refused where the job is submitted, without torch; a model that is elsewhere is not asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_like.artifacts.errors import InputError, SpecError
from nemo_rl_like.launch.layouts import problems
from nemo_rl_like.launch.submit import Request, dry_run
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.policy import LayoutSpec

INIT = {"hidden_size": 64, "intermediate_size": 96, "layers": 6, "heads": 8, "kv_heads": 4, "head_dim": 8}
STAGE = {"kind": "sft", "data": {"environment_demonstrations": True}}


def spec_of(layout: dict[str, Any], **top: Any) -> ExperimentSpec:
    values = {
        "output": "run",
        "model": {"init": INIT, "tokenizer": {"characters": "01"}},
        "environment": {"name": "arithmetic"},
        "policy": {"layout": layout},
        "stages": [STAGE, {"kind": "evaluate"}],
        "launch": {"accelerator": "cpu", "devices_per_node": 64},
    }
    return ExperimentSpec.model_validate(values | top)


def test_the_field_its_value_what_it_must_divide_and_what_may_be_are_named(tmp_path: Path) -> None:
    spec = spec_of({"tp": 3})
    words = r"- policy\.layout\.tp is 3, which does not divide the model's heads \(8\); use tp in \[1, 2, 4\]"
    with pytest.raises(SpecError, match=words):
        dry_run(Request(spec, "local", tmp_path))
    own = {**STAGE, "settings": {"policy": {"layout": {"pp": 4, "vpp": 2}}}}
    (told,) = problems(spec_of({}, stages=[own]), tmp_path)
    assert told.startswith("stages.sft.settings.policy.layout.vpp is 2: its 4 * 2 stages must have")


@given(sizes=st.fixed_dictionaries({name: st.integers(1, 8) for name in ("tp", "cp", "pp")}))
def test_what_is_refused_is_what_the_run_would_refuse(sizes: dict[str, int]) -> None:
    layout = LayoutSpec.model_validate(sizes)
    config = ModelConfig.from_init(spec_of({}).model.init, vocab_size=7)  # type: ignore[arg-type]
    try:
        config.check_layout(layout)
    except InputError as error:
        assert list(problems(spec_of(sizes), Path("/"))) == [f"policy.{error}"]
    else:
        assert not list(problems(spec_of(sizes), Path("/")))


def test_a_folder_is_read_from_the_working_folder_where_it_is_there(tmp_path: Path) -> None:
    """Whatever a folder is called, its path is told as it is."""
    tmp_path = tmp_path / "layout.v1"
    tmp_path.mkdir()
    shape = ModelConfig.from_init(spec_of({}).model.init, vocab_size=7)  # type: ignore[arg-type]
    there = spec_of({"tp": 8}, model={"path": "model"})
    assert not list(problems(there, tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{")
    (told,) = problems(there, tmp_path)
    assert told.startswith(f"{tmp_path}/model/config.json is not valid JSON")
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape.to_hf_dict()))
    (told,) = problems(there, tmp_path)
    assert "policy.layout.tp is 8, which does not divide the model's kv_heads (4)" in told
    (tmp_path / "model" / "config.json").write_text('{"model_type": "bert"}')
    (told,) = problems(there, tmp_path)
    assert "bert" in told


def test_no_torch_is_needed() -> None:
    code = "import sys; import nemo_rl_like.launch.layouts; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
