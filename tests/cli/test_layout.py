"""`nrl layout`: a table, JSON, and mistakes that end it with a message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_rl_like.model.known_shapes import KNOWN_SHAPES
from tests.cli.command import nrl


def test_the_table_says_that_nothing_was_run_and_ends_in_lines_for_a_spec() -> None:
    done = nrl("layout", "llama-3.1-8b", "--gpus", "8")
    assert done.returncode == 0, done.stderr
    assert "planned by arithmetic, not run" in done.stdout
    assert "inside a node" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("policy: {layout: {")


def test_json_has_every_layout_with_its_bytes_and_reasons() -> None:
    done = nrl("layout", "llama-3.1-70b", "--gpus", "64", "--pp", "2", "--micro-batch-tokens", "4096", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] is True and found["note"] == "planned by arithmetic, not run"
    for entry in found["layouts"]:
        parts = dict(entry["bytes"])
        assert parts.pop("total") == sum(parts.values()) <= found["usable_bytes"]
        assert entry["layout"]["pp"] == 2 and entry["reasons"]


def test_a_folder_and_its_config_json_are_models_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KNOWN_SHAPES["llama-3.1-8b"].to_hf_dict()))
    named, *paths = (
        json.loads(nrl("layout", model, "--gpus", "8", "--json").stdout)["layouts"]
        for model in ("llama-3.1-8b", str(tmp_path), str(tmp_path / "config.json"))
    )
    assert paths == [named, named]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("llama-3.1-8b", "--gpus", "0"), "--gpus"),
        (("llama-3.1-8b", "--gpus", "eight"), "--gpus"),
        (("llama-3.1-8b",), "--gpus"),
        (("llama-3.1-8b", "--gpus", "8", "--gpu-memory", "0"), "--gpu-memory"),
        (("llama-3-8b", "--gpus", "8"), "did you mean `llama-3.1-8b`?"),
        (("nothing", "--gpus", "8"), "known names are llama-3.1-8b"),
        (("llama-3.1-8b", "--gpus", "8", "--tp", "3"), "tp 3 does not divide the 8 GPUs"),
        (("llama-3.1-8b", "--gpus", "6", "--tp", "3"), "does not divide the model's heads (32)"),
        (
            ("llama-3.1-8b", "--gpus", "8", "--tp", "1", "--cp", "1", "--pp", "1", "--recompute", "none"),
            "nearest that fit",
        ),
        (("llama-3.1-8b", "--gpus", "8", "--recompute", "full:0"), "full:N with N layers"),
        (("llama-3.1-8b", "--gpus", "8", "--recompute", "norms"), "core_attn,mlp,moe"),
    ],
)
def test_a_mistake_is_a_message_and_exit_code_2(arguments: tuple[str, ...], why: str) -> None:
    done = nrl("layout", *arguments)
    assert done.returncode == 2
    assert why in done.stderr
    assert "Traceback" not in done.stderr


def test_json_of_a_mistake_has_the_problem_and_the_nearest_layouts() -> None:
    done = nrl(
        "layout", "llama-3.1-8b", "--gpus", "8", "--tp", "1", "--pp", "1", "--cp", "1", "--recompute", "none", "--json"
    )
    assert done.returncode == 2
    found = json.loads(done.stdout)
    assert found["ok"] is False and "GiB a GPU" in found["problem"]
    assert all(entry["bytes"]["total"] < 72 * 2**30 for entry in found["nearest"])


def test_a_plan_that_computes_activations_again_says_why_and_writes_it_into_the_policy_block() -> None:
    done = nrl("layout", "llama-3.1-8b", "--gpus", "2")
    assert done.returncode == 0, done.stderr
    assert "None fits unless activations are computed again" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("micro_batch_tokens: 16384, recompute: {kind: full}}")


def test_planning_imports_nothing_heavy() -> None:
    report = "import atexit, sys; atexit.register(lambda: print([m for m in ('torch', 'ray', 'megatron', 'numpy') if m in sys.modules], file=sys.stderr))"
    done = nrl("layout", "llama-3.1-8b", "--gpus", "8", before=report)
    assert done.stderr.strip() == "[]"
