"""A run's folder with one checkpoint, as training leaves it: a tiny random model, its tokenizer, and adapters where asked for."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from nemo_rl_like.artifacts.files import sha256_file
from nemo_rl_like.checkpoint.layout import MANIFEST, STATE, FileEntry, Manifest, ModelIdentity
from nemo_rl_like.data.tokenizer_training import train_tokenizer

TEXT = "one two three four five six seven eight nine ten eleven twelve two and three are five, four and five are nine. "
VOCABULARY = 288
SPEC = """
name: sums
output: OUTPUT
model: {path: BASE}
environment: {name: arithmetic}
stages:
  - {kind: sft, steps: 3, data: {environment_demonstrations: true}}
  - {kind: evaluate}
  - {kind: export}
"""


def tokenizer_folder(folder: Path) -> Path:
    """A byte-level tokenizer with a chat template."""
    text = folder.parent / f"{folder.name}.txt"
    text.parent.mkdir(parents=True, exist_ok=True)
    text.write_text("\n".join(TEXT[i:] for i in range(0, len(TEXT), 5)))
    train_tokenizer([text], VOCABULARY, folder)
    text.unlink()
    return folder


def llama(*, seed: int = 0, vocabulary: int = VOCABULARY) -> PreTrainedModel:
    """A random Llama with logits peaked enough that greedy tokens have no ties, and heads of a width that vLLM has on CPUs."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.15,
        eos_token_id=0,
        pad_token_id=1,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def hugging_face_folder(folder: Path, model: PreTrainedModel | None = None) -> Path:
    """The model (by default a new one) and the tokenizer."""
    tokenizer_folder(folder)
    (llama() if model is None else model).save_pretrained(folder)
    return folder


def make_run(run: Path, model: PreTrainedModel | None = None) -> Path:
    """A run's output folder with a spec and `sft/checkpoints/step_3`; returns that checkpoint."""
    base = hugging_face_folder(run.parent / "base", model)
    checkpoint = run / "sft" / "checkpoints" / "step_3"
    checkpoint.mkdir(parents=True)
    (run / "spec.yaml").write_text(SPEC.replace("OUTPUT", str(run)).replace("BASE", str(base)))
    (checkpoint / "weights").mkdir()
    for file in base.iterdir():
        (checkpoint / "weights" / file.name).write_bytes(file.read_bytes())
    return seal(checkpoint)


def seal(checkpoint: Path) -> Path:
    """Write the checkpoint's state and manifest, again after a change."""
    (checkpoint / STATE).write_text(json.dumps({"step": 3}))
    files = sorted(p for p in checkpoint.rglob("*") if p.is_file() and p.name != MANIFEST)
    entries = tuple(FileEntry(p.relative_to(checkpoint).as_posix(), p.stat().st_size, sha256_file(p)) for p in files)
    identity = ModelIdentity("f", "llama, 2 layers x 64")
    (checkpoint / MANIFEST).write_bytes(Manifest(3, identity, None, entries).to_json())
    return checkpoint


def add_adapters(checkpoint: Path, *, rank: int = 4, seed: int = 1) -> Path:
    """Give the checkpoint random LoRA adapters in PEFT's names, and merge them into its weights; returns the base's folder."""
    from safetensors.torch import load_file, save_file

    base = checkpoint.parents[3] / "base"
    weights = load_file(checkpoint / "weights" / "model.safetensors")
    draws = torch.Generator().manual_seed(seed)
    adapters: dict[str, torch.Tensor] = {}
    for name in list(weights):
        if name.split(".")[-2] in ("q_proj", "v_proj", "down_proj"):
            rows, columns = weights[name].shape
            down, up = torch.randn(rank, columns, generator=draws) * 0.2, torch.randn(rows, rank, generator=draws) * 0.2
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            adapters |= {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}
            weights[name] = weights[name] + 2.0 * up @ down
    (checkpoint / "adapter").mkdir(exist_ok=True)
    save_file(adapters, checkpoint / "adapter" / "model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": 2.0 * rank,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (checkpoint / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, checkpoint / "weights" / "model.safetensors", metadata={"format": "pt"})
    seal(checkpoint)
    return base
