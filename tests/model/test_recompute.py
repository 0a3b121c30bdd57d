"""Computing activations again changes no gradient, and keeps less."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from nemo_rl_like.model.factory import build_model
from nemo_rl_like.model.forward import MegatronModel, hidden_states
from nemo_rl_like.model.heads import output_head, token_logprobs
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.hf_io import SafetensorsReader
from nemo_rl_like.model.layouts import plan_microbatches
from nemo_rl_like.model.lora import add_adapters
from nemo_rl_like.spec.policy import LayoutSpec, LoraSpec, RecomputeSpec
from tests.model import tiny

pytestmark = pytest.mark.usefixtures("one_rank")
FULL = RecomputeSpec()
CHOICES = {
    "full": FULL,
    "first": RecomputeSpec(layers=1),
    "core_attn": RecomputeSpec(kind="selective"),
    "mlp": RecomputeSpec(kind="selective", modules=("mlp",)),
    "both": RecomputeSpec(kind="selective", modules=("core_attn", "mlp")),
    "moe": RecomputeSpec(kind="selective", modules=("moe",)),
}


def load(folder: Path, recompute: RecomputeSpec | None) -> MegatronModel:
    with SafetensorsReader(folder) as weights:
        config = ModelConfig.from_hf_folder(folder)
        return build_model(config, LayoutSpec(), torch.float32, weights=weights, recompute=recompute)


def step(model: MegatronModel) -> tuple[dict[str, Tensor], int]:
    """Gradients of one pass, and the bytes that its forward kept for the backward beside the weights."""
    batch, kept = tiny.make_batch(), dict[int, int]()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    (micro_batch,) = plan_microbatches(
        batch, range(batch.rows), dp_size=1, dp_rank=0, kind="shared_prefix", token_budget=4096
    )
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = hidden_states(model, micro_batch)
    bytes_kept = sum(kept.values())
    out = token_logprobs(hidden, output_head(model), micro_batch.targets, temperature=1.0, chunk_tokens=7)
    (out.logprobs * tiny.token_weights(batch)[micro_batch.source_index]).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, bytes_kept


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("family", ["gemma2", "qwen3", "qwen3_moe"])
def test_gradients_are_the_same_and_less_is_kept(folders: dict[str, Path], family: str, choice: str) -> None:
    expected, all_kept = step(load(folders[family], None))
    found, kept = step(load(folders[family], CHOICES[choice]))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= 1e-6 * max(1.0, float(gradient.abs().max())), name
    has_module = choice not in (("mlp",) if family in tiny.MIXTURES else ("moe",))
    assert kept < all_kept if has_module else kept == all_kept


def test_recomputing_every_layer_keeps_little_but_their_inputs(folders: dict[str, Path]) -> None:
    assert step(load(folders["qwen3"], FULL))[1] < step(load(folders["qwen3"], None))[1] / 4


def test_adapters_get_gradients_though_nothing_before_them_is_trained(folders: dict[str, Path]) -> None:
    found = {}
    for recompute in (None, FULL):
        model = load(folders["qwen3"], recompute)
        add_adapters(model, model.shape, LoraSpec(rank=2), seed=3)
        found[recompute] = step(model)[0]
    assert found[FULL].keys() == found[None].keys() and any("lora" in name for name in found[FULL])
    for name, gradient in found[None].items():
        assert torch.allclose(found[FULL][name], gradient, atol=1e-6), name
