"""Laws of one rank's forward and backward pass against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nemo_rl_like.model.factory import build_model
from nemo_rl_like.model.forward import MegatronModel, hidden_states
from nemo_rl_like.model.heads import full_logits, output_head, token_logprobs
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.hf_io import SafetensorsReader
from nemo_rl_like.model.layouts import Kind, plan_microbatches
from nemo_rl_like.model.pipeline_stage import fp8_alignment, select_places
from nemo_rl_like.model.weight_map import WeightMap
from nemo_rl_like.spec.policy import LayoutSpec
from tests.model import tiny

pytestmark = pytest.mark.usefixtures("one_rank")
KINDS: tuple[Kind, ...] = ("padded", "packed", "shared_prefix")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> MegatronModel:
    return build_model(ModelConfig.from_hf_folder(folder), LayoutSpec(), dtype, weights=SafetensorsReader(folder))


def logits_of(model: MegatronModel, row: torch.Tensor) -> torch.Tensor:
    from nemo_rl_like.model.attention_layouts import CausalLayout

    with torch.no_grad():
        hidden = model.first.run_stage(row[None], torch.arange(len(row))[None], CausalLayout())
        return full_logits(hidden[:, 0], output_head(model))


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
@pytest.mark.parametrize("kind", KINDS)
def test_places_added_for_fp8_products_change_nothing(folders: dict[str, Path], kind: Kind, recipe: str) -> None:
    """The linear layers stay as they are here: Megatron's FP8 needs Transformer Engine."""
    model, widths = load(folders["llama"]), []
    batch = tiny.make_batch()
    (micro_batch,) = plan_microbatches(
        batch, list(range(batch.rows)), dp_size=1, dp_rank=0, kind=kind, token_budget=4096
    )
    gradients = []
    for fp8 in (None, "hybrid"):
        model.config.fp8, model.config.fp8_recipe = fp8, recipe
        widths.clear()
        hook = model.first.decoder.layers[0].register_forward_pre_hook(
            lambda _, args, kwargs: widths.append(kwargs["hidden_states"].shape), with_kwargs=True
        )
        hidden = hidden_states(model, micro_batch)
        hook.remove()
        model.zero_grad()
        hidden.square().sum().backward()
        gradients.append((hidden.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    (length, rows, _), step = widths[0], fp8_alignment(recipe)
    shortest = micro_batch.input_ids.shape[1]
    assert (length * rows) % step == 0 and shortest <= length < shortest + step
    assert (shortest * rows) % step != 0, "the case must need padding"
    for plain, padded in zip(gradients[0][1], gradients[1][1], strict=True):
        assert (plain - padded).abs().max() <= 1e-5 * max(1.0, float(plain.abs().max()))
    assert torch.allclose(gradients[0][0], gradients[1][0], atol=1e-6)


@pytest.mark.parametrize("budget", [1, 12, 30, 4096])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_logprobs_and_gradients_equal_hugging_face_for_any_layout_and_split(
    folders: dict[str, Path], family: str, kind: Kind, budget: int
) -> None:
    batch = tiny.make_batch()
    expected = tiny.reference(folders[family], batch, temperature=1.3)
    model, weights = load(folders[family]), tiny.token_weights(batch)
    flat = torch.zeros(batch.tokens.numel())
    rows = torch.randperm(batch.rows).tolist()
    for micro_batch in plan_microbatches(batch, rows, dp_size=1, dp_rank=0, kind=kind, token_budget=budget):
        hidden = hidden_states(model, micro_batch)
        out = token_logprobs(
            hidden,
            output_head(model),
            micro_batch.targets,
            temperature=1.3,
            chunk_tokens=7,
            want_entropy=True,
            want_log_norm=True,
        )
        flat[micro_batch.source_index] = out.logprobs.detach()
        tiny.loss_of(out.logprobs, out.entropy, out.log_norm, weights[micro_batch.source_index]).backward()
    assert (flat - expected.logprobs).abs().max() <= 1e-5
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name, gradient in WeightMap(model.shape).trained.iter_hf(model, gradients):
        assert gradient is not None
        difference = (gradient - expected.gradients[name]).abs().max()
        assert difference <= 1e-5 * max(1.0, float(expected.gradients[name].abs().max())), name


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_query_key_value_rows_rolled_by_one_are_seen(folders: dict[str, Path], family: str) -> None:
    row = torch.arange(40)
    model = load(folders[family])
    with torch.no_grad():
        expected = tiny.hugging_face(folders[family])(input_ids=row[None]).logits[0]
    assert (logits_of(model, row) - expected).abs().max() <= 1e-5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("linear_qkv.weight", "linear_kv_up_proj.weight")):
                parameter.copy_(parameter.roll(1, dims=0))
    assert (logits_of(model, row) - expected).abs().max() > 0.1


def test_bfloat16_stays_near_float32(folders: dict[str, Path]) -> None:
    row = torch.arange(20)
    exact, rounded = logits_of(load(folders["qwen3"]), row), logits_of(load(folders["qwen3"], torch.bfloat16), row)
    assert rounded.dtype == torch.float32
    assert 1e-4 < (exact - rounded).abs().mean() < 0.1


def test_an_empty_pass_has_zero_gradients(folders: dict[str, Path]) -> None:
    model, batch = load(folders["llama"]), tiny.make_batch(prompts=1, samples=1)
    passes = plan_microbatches(batch, [0], dp_size=2, dp_rank=1, kind="shared_prefix", token_budget=100)
    assert [len(p.targets) for p in passes] == [0]
    hidden = hidden_states(model, passes[0])
    token_logprobs(
        hidden, output_head(model), passes[0].targets, temperature=1.0, chunk_tokens=4
    ).logprobs.sum().backward()
    gradients = [p.grad for p in model.parameters()]
    assert all(g is not None and not g.any() for g in gradients)


def test_a_flat_place_counts_tokens_row_by_row() -> None:
    hidden = torch.arange(6.0).reshape(3, 2, 1)  # [s, b, H]: row 0 is 0, 2, 4 and row 1 is 1, 3, 5
    assert select_places(hidden, torch.tensor([0, 2, 3, 5]), length=3).flatten().tolist() == [0, 4, 1, 5]
    second_half = select_places(hidden[1:], torch.tensor([1, 2, 5]), length=3, first=1)
    assert second_half.flatten().tolist() == [2, 4, 5]
