"""A folder that TRL's trainer saved is a start like any other: checked, trained on, proved and exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from nemo_rl_like.data.tokenizer import load_tokenizer
from nemo_rl_like.export.check import check_bundle
from tests.export.made import hugging_face_folder
from tests.stages.killing import finish, write_rows

SPEC = """
output: FOLDER/run
model: {path: FOLDER/trl}
policy: {threads_per_rank: 1}
stages:
  - {kind: sft, data: {path: FOLDER/rows.jsonl}, steps: 2, examples_per_step: 4, optimizer: {lr: 1.0e-3}}
  - {kind: export, parity: full, targets: [{kind: hf}, {kind: triton-python}]}
"""
ROWS = [("one and one", "two"), ("two and three", "five"), ("four and five", "nine"), ("one and two", "three")] * 2


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(900)
def test_a_folder_that_trl_saved_is_trained_on_proved_and_exported(tmp_path: Path) -> None:
    base, trl = hugging_face_folder(tmp_path / "base"), tmp_path / "trl"
    said = [[{"role": "user", "content": x}, {"role": "assistant", "content": y}] for x, y in ROWS]
    config = SFTConfig(str(trl), max_steps=2, per_device_train_batch_size=4, report_to="none", use_cpu=True, save_strategy="no",
                       learning_rate=1e-3, bf16=False)  # fmt: skip
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_dict({"messages": said}),
        processing_class=load_tokenizer(base),
    )
    trainer.train()
    trainer.save_model(str(trl))
    told = {problem.path: problem.message for problem in check_bundle(trl).problems}
    assert "a pickle" in told["training_args.bin"]
    write_rows(tmp_path / "rows.jsonl", [{"messages": turns} for turns in said])
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC.replace("FOLDER", str(tmp_path)))
    assert finish(["run", str(spec)], tmp_path / "log", 600) == 0, (tmp_path / "log").read_text()
    for kind in ("hf", "triton-python"):
        report = check_bundle(tmp_path / "run" / "export" / "bundles" / kind)
        assert report.problems == () and report.manifest is not None
        assert (report.manifest.parity.level, report.manifest.parity.reference) == ("full", "megatron")
        assert "training_args.bin" not in [file.path for file in report.manifest.files]
    status = json.loads((tmp_path / "run" / "status.json").read_text())["stages"]["export"]["output"]
    assert (status["kind"], status["path"]) == ("ServingBundle", "export/bundles")
