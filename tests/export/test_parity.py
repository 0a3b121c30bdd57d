"""An export that does not compute, render or stop as the trainer's model does is found, and never gets its name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Olmo2Config, Olmo2ForCausalLM

from nemo_rl_like.artifacts.errors import InputError, NrlError
from nemo_rl_like.export import parity
from nemo_rl_like.export.bundle import ExportSource, How, write_bundles
from nemo_rl_like.export.parity import Found, needed_bytes, prove
from nemo_rl_like.export.parity_process import compare, tokenizer_differences
from nemo_rl_like.export.problems import BundleError
from nemo_rl_like.spec.export import HfTarget
from tests.export.copied import copy_whole
from tests.export.made import VOCABULARY, hugging_face_folder

GOOD = Found("megatron", 100, 1e-6, 1e-5, 48, 0, ())


@pytest.fixture(scope="module")
def pair(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint's weights, and their export."""
    weights = run_folder / "sft" / "checkpoints" / "step_3" / "weights"
    out = tmp_path_factory.mktemp("parity") / "out"
    copy_whole(weights, out)
    return weights, out


def changed(source: Path, folder: Path, change: Callable[[Path], None]) -> Path:
    shutil.copytree(source, folder)
    change(folder)
    return folder


def interleaved_heads(folder: Path) -> None:
    """The halves of each query head the other way round: right shapes, right names, another model."""
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    heads = weights[name].view(4, 2, 16, 64)
    weights[name] = heads.transpose(1, 2).reshape(128, 64).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_an_export_means_what_the_checkpoint_means_and_a_permuted_head_does_not(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    checkpoint, export = pair
    found = compare(checkpoint, export, 0)
    assert found.problems == () and found.reference == "megatron" and found.greedy_tokens == 48
    assert found.max_logit_difference <= found.tolerance <= 5e-4
    broken = compare(checkpoint, changed(export, tmp_path / "broken", interleaved_heads), 0)
    assert "logits differ by" in broken.problems[0] and any("greedy tokens" in text for text in broken.problems)


def test_a_family_that_megatron_lacks_is_compared_with_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    model = Olmo2ForCausalLM(Olmo2Config(vocab_size=VOCABULARY, max_position_embeddings=64, eos_token_id=0, **shape))
    folder = hugging_face_folder(tmp_path / "olmo2", model)
    copy_whole(folder, tmp_path / "out")
    found = compare(folder, tmp_path / "out", 0)
    assert found.problems == () and found.reference == "transformers" and found.max_logit_difference == 0.0


def other_template(folder: Path) -> None:
    file = folder / "chat_template.jinja"
    file.write_text(file.read_text() + " ")


def no_stop(folder: Path) -> None:
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": 7}))


def other_token(folder: Path) -> None:
    file = folder / "tokenizer.json"
    raw = json.loads(file.read_text())
    vocabulary = raw["model"]["vocab"]
    last, before = (next(token for token, i in vocabulary.items() if i == VOCABULARY - k) for k in (1, 2))
    vocabulary[last], vocabulary[before] = vocabulary[before], vocabulary[last]
    file.write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("change", "words"),
    [(other_template, "chat templates"), (no_stop, "does not stop at token 0"), (other_token, "other vocabularies")],
)
def test_other_templates_stops_and_vocabularies_are_found(
    pair: tuple[Path, Path], tmp_path: Path, change: Callable[[Path], None], words: str
) -> None:
    checkpoint, export = pair
    assert tokenizer_differences(checkpoint, export, VOCABULARY) == []
    problems = tokenizer_differences(checkpoint, changed(export, tmp_path / "other", change), VOCABULARY)
    assert len(problems) == 1 and words in problems[0]


def test_the_template_s_own_end_token_becomes_a_stop_token(tmp_path: Path) -> None:
    """An answer ends with what the chat template writes, whether or not that is the tokenizer's end token."""
    folder = hugging_face_folder(tmp_path / "model")
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("{{ eos_token }}", "<|pad|>"))
    tokens = json.loads((folder / "tokenizer_config.json").read_text())
    template.write_text(template.read_text().replace("<|pad|>", tokens["pad_token"]))
    generation = {"eos_token_id": 0, "temperature": 0.6}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    copy_whole(folder, tmp_path / "out")
    found = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert found == {**generation, "eos_token_id": [0, 1], "pad_token_id": 1}


def test_ids_that_the_vocabulary_lacks_end_no_answer(tmp_path: Path) -> None:
    """A configuration of another size keeps its class's defaults, 50279 for OLMo 2."""
    folder = hugging_face_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 50279}))
    beyond = {"eos_token_id": [50279, 0], "bos_token_id": VOCABULARY, "temperature": 0.6}
    (folder / "generation_config.json").write_text(json.dumps(beyond))
    copy_whole(folder, tmp_path / "out")
    found = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert found == {"eos_token_id": 0, "pad_token_id": 1, "temperature": 0.6}


def test_what_fails_the_proof_never_gets_its_name(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ExportSource(run_folder / "sft" / "checkpoints" / "step_3")
    bad = Found("megatron", 100, 0.3, 1e-5, 48, 0, ("logits differ by 0.3, at most 1e-05 may be rounding",))
    monkeypatch.setattr(parity, "compare", lambda *_: bad)
    with pytest.raises(BundleError, match=r"logits differ by 0\.3"):
        write_bundles(source, [(HfTarget(), tmp_path / "out")], How(parity="full"))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(parity, "compare", lambda *_: GOOD)
    write_bundles(source, [(HfTarget(), tmp_path / "out")], How(parity="full"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    told = json.loads((tmp_path / "out" / "manifest.json").read_text())["parity"]
    assert (told["level"], told["reference"], told["tolerance"]) == ("full", "megatron", 1e-5)


def test_a_host_without_the_memory_proves_weights_alone_and_says_so(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, export = pair
    needed = needed_bytes(export)
    monkeypatch.setattr(parity, "compare", lambda *_: GOOD)
    monkeypatch.setattr(parity, "_free_bytes", lambda: needed)
    assert prove(checkpoint, export, "auto", 1.0).level == "full"
    monkeypatch.setattr(parity, "_free_bytes", lambda: needed - 1)
    told = prove(checkpoint, export, "auto", 1.0)
    assert told.level == "weights" and "GiB free" in told.reason
    with pytest.raises(InputError, match="`parity` is full, and it takes about"):
        prove(checkpoint, export, "full", 1.0)
    assert prove(checkpoint, export, "weights", 1.0).reason == "asked for"


def test_a_proof_has_a_deadline(pair: tuple[Path, Path]) -> None:
    with pytest.raises(NrlError, match="did not end in 0 s; raise `parity_timeout_s`"):
        prove(*pair, "full", 0.05)


@pytest.mark.slow
def test_the_proof_runs_in_a_process_of_its_own(pair: tuple[Path, Path], tmp_path: Path) -> None:
    checkpoint, export = pair
    told = prove(checkpoint, export, "full", 500.0)
    assert told.level == "full" and told.max_logit_difference is not None
    broken = changed(export, tmp_path / "broken", interleaved_heads)
    with pytest.raises(BundleError, match="logits differ by"):
        prove(checkpoint, broken, "full", 500.0)
