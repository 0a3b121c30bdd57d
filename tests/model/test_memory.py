"""Laws of the estimate that need no model: who holds what share, and what the types and the pipeline change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.activations import Activations, HeadShape
from nemo_rl_like.model.factory import build_model
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.known_shapes import KNOWN_SHAPES
from nemo_rl_like.model.layer_activations import GENERATORS
from nemo_rl_like.model.memory import Dtype, Memory, Training
from nemo_rl_like.model.parameter_buffers import parameter_buffers, parameters, untrained
from nemo_rl_like.model.pass_sizes import MicroBatchShape
from nemo_rl_like.spec.policy import LayoutSpec, Module, RecomputeSpec
from tests.model import tiny

LLAMA, QWEN = KNOWN_SHAPES["llama-3.1-8b"], KNOWN_SHAPES["qwen3-235b-a22b"]
ROWS = MicroBatchShape.packed(4096, 1024)


def memory(layout: LayoutSpec, dtype: Dtype = "bfloat16", rank: int = 0, micro_batches: int = 8) -> Memory:
    return Training(LLAMA, dtype, ROWS, micro_batches).memory(layout, rank)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3.1-8b", 8.030),
        ("llama-3.1-70b", 70.554),
        ("qwen3-235b-a22b", 235.094),
        ("qwen1.5-moe-a2.7b", 14.316),
        ("qwen2-57b-a14b", 57.409),
        ("gemma-2-9b", 9.242),
        ("gemma-2-27b", 27.227),
        ("gemma-3-1b", 1.000),
        ("gpt-oss-20b", 20.915),
        ("gpt-oss-120b", 116.829),
        ("glm-4.5-air", 106.852),
        ("glm-4.5", 352.798),
        ("deepseek-v3", 671.026),
    ],
)
def test_the_known_models_have_the_parameters_their_cards_say(name: str, billions: float) -> None:
    dense, experts = parameter_buffers(KNOWN_SHAPES[name], LayoutSpec(), 0)
    assert (dense + experts) / 1e9 == pytest.approx(billions, abs=0.001)


def test_gradients_are_float32_at_any_type_and_master_weights_stand_beside_16_bit_ones() -> None:
    wide, narrow = memory(LayoutSpec(), "float32"), memory(LayoutSpec(), "bfloat16")
    assert wide.gradients == narrow.gradients == wide.parameters == 2 * narrow.parameters
    assert wide.optimizer == 2 * wide.parameters
    assert narrow.optimizer == 3 * wide.parameters


def test_an_optimizer_in_host_memory_takes_none_of_the_device_but_while_its_master_weights_are_made() -> None:
    few = MicroBatchShape.packed(1, 1)
    for dtype, each in (("float32", 16), ("bfloat16", 18)):
        here, away = (
            Training(LLAMA, dtype, few, offload_optimizer=away).memory(LayoutSpec(dp=2), 0) for away in (False, True)
        )
        assert here.host == 0 < here.optimizer and away.optimizer == 0
        owned = here.optimizer // (8 if dtype == "float32" else 12)
        assert away.host == each * owned
        assert away.activations + away.temporary == (
            4 * owned if dtype == "bfloat16" else here.activations + here.temporary
        )


def test_data_parallel_ranks_share_the_optimizer_and_nothing_else() -> None:
    alone, eight = memory(LayoutSpec()), memory(LayoutSpec(dp=8))
    assert eight.optimizer == alone.optimizer // 8
    assert replace(eight, optimizer=alone.optimizer) == alone


def test_tensor_parallel_ranks_share_the_matrices() -> None:
    alone, four = memory(LayoutSpec()), memory(LayoutSpec(tp=4, sp=True))
    assert four.parameters == pytest.approx(alone.parameters / 4, rel=0.001)
    assert four.activations == pytest.approx(alone.activations / 4, rel=0.05)


def test_without_sequence_parallelism_norms_and_residuals_stay_whole() -> None:
    whole, shared = memory(LayoutSpec(tp=4)), memory(LayoutSpec(tp=4, sp=True))
    streams = 4 * ROWS.tokens * LLAMA.hidden_size * 2  # two norms' inputs and outputs
    assert whole.activations - shared.activations >= LLAMA.layers * streams * 3 // 4
    assert whole.parameters == shared.parameters


def test_experts_are_shared_by_ep_and_etp_and_their_state_by_the_ranks_that_hold_the_same_ones() -> None:
    training = Training(QWEN, "bfloat16", ROWS)
    _, whole = parameter_buffers(QWEN, LayoutSpec(dp=8), 0)
    for layout in (LayoutSpec(dp=8, ep=8), LayoutSpec(dp=4, tp=2, ep=4, sp=True)):
        dense, experts = parameter_buffers(QWEN, layout, 0)
        assert experts == whole // 8
        assert training.memory(layout, 0).optimizer == 12 * (dense // layout.dp + experts)
    dense, experts = parameter_buffers(QWEN, LayoutSpec(dp=8, ep=4), 0)
    assert training.memory(LayoutSpec(dp=8, ep=4), 0).optimizer == 12 * (dense // 8 + experts // 2)


def test_an_earlier_stage_keeps_more_micro_batches_but_never_more_than_there_are() -> None:
    layout = LayoutSpec(pp=4)
    first, second = (memory(layout, rank=rank) for rank in (0, 1))
    assert first.activations * 3 == second.activations * 4
    assert memory(layout, micro_batches=2).activations * 2 == first.activations


def test_an_interleaved_pipeline_holds_a_round_of_the_ranks_for_each_stage_but_one() -> None:
    plain, interleaved = memory(LayoutSpec(pp=4)), memory(LayoutSpec(pp=4, vpp=2))
    assert interleaved.parameters == plain.parameters
    # 2 * 3 + 4 + 1 passes of half the layers, against 4 of all of them.
    assert interleaved.activations == pytest.approx(plain.activations * 11 / 8, rel=0.1)
    assert memory(LayoutSpec(pp=4, vpp=2), micro_batches=4).activations < interleaved.activations


def test_the_head_is_on_the_last_stage_and_grows_with_its_chunks() -> None:
    layout = LayoutSpec(pp=4)
    assert memory(layout, rank=0).head == 0
    small, large = (
        Training(LLAMA, "bfloat16", ROWS, 8, HeadShape(chunk)).memory(layout, 3).head for chunk in (256, 4096)
    )
    assert 0 < small < large


def test_transformer_engines_layers_keep_more_of_swiglu_than_this_packages() -> None:
    ours, theirs = (Activations(LLAMA, LayoutSpec(), ROWS, 2, layers) for layers in ("local", "transformer_engine"))
    assert theirs.at(0).feed_forward.kept() * 3 == ours.at(0).feed_forward.kept() * 5


def test_a_layer_computed_again_keeps_its_input_and_one_of_them_is_whole_at_a_time() -> None:
    plain, half, full = (
        Activations(LLAMA, LayoutSpec(), ROWS, 2, recompute=recompute)
        for recompute in (None, RecomputeSpec(layers=16), RecomputeSpec())
    )
    stream = ROWS.tokens * LLAMA.hidden_size * 2
    assert plain.kept(0) - half.kept(0) == 16 * (plain.at(0).kept() - stream - GENERATORS)
    assert plain.kept(0) - full.kept(0) == 32 * (plain.at(0).kept() - stream - GENERATORS)
    assert full.widest(0) >= plain.at(0).kept() - stream


@pytest.mark.parametrize(("config", "module", "other"), [(LLAMA, "mlp", "moe"), (QWEN, "moe", "mlp")])
def test_a_module_computed_again_keeps_its_input_alone(config: ModelConfig, module: Module, other: Module) -> None:
    plain, inside, lacking = (
        Activations(config, LayoutSpec(), ROWS, 2, recompute=recompute)
        for recompute in (None, *(RecomputeSpec(kind="selective", modules=(name,)) for name in (module, other)))
    )
    assert plain.at(0).kept() - inside.at(0).kept() == plain.at(0).feed_forward.kept() - GENERATORS
    assert lacking.at(0).kept() == plain.at(0).kept()


def test_fused_attention_computed_again_on_a_gpu_saves_nothing() -> None:
    plain, again = (
        Activations(LLAMA, LayoutSpec(), ROWS, 2, "transformer_engine", recompute=recompute)
        for recompute in (None, RecomputeSpec(kind="selective"))
    )
    assert again.at(0).kept() >= plain.at(0).kept()


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.usefixtures("one_rank")
def test_parameters_are_those_of_the_built_model_one_by_one(folders: dict[str, Path], family: str) -> None:
    config = ModelConfig.from_hf_folder(folders[family])
    model = build_model(config, LayoutSpec(), torch.float32, seed=0)
    sizes: dict[bool, list[int]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            sizes[".experts." in name].append(parameter.numel())
    dense, experts = parameters(config, LayoutSpec(), 0)
    assert sorted(sizes[False]) == sorted(dense)
    assert sorted(sizes[True]) == sorted(experts)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    assert untrained(config, LayoutSpec(), 0) == frozen


@pytest.mark.parametrize("name", KNOWN_SHAPES)
def test_ranks_of_a_pipeline_have_all_parameters_and_each_a_tied_head_once_more(name: str) -> None:
    config = KNOWN_SHAPES[name]
    (whole, experts), parts = parameters(config, LayoutSpec(), 0), LayoutSpec(pp=3)
    dense = [sum(parameters(config, parts, stage)[0]) for stage in range(3)]
    again = config.vocab_size * config.hidden_size if config.tie_embeddings else 0
    assert sum(dense) == sum(whole) + again
    assert sum(sum(parameters(config, parts, stage)[1]) for stage in range(3)) == sum(experts)


def test_layers_with_a_window_keep_masks_and_the_others_do_not() -> None:
    gemma, rows = KNOWN_SHAPES["gemma-3-1b"], MicroBatchShape.packed(4096, 2048)
    within, all_before = (Activations(gemma, LayoutSpec(), rows, 2).at(layer).kept() for layer in (0, 5))
    # 512 queries at a time: those of the first call attend to 512 keys, of the three others to 1023; and their outputs are put together.
    masks, outputs = 512 * (512 + 3 * 1023) * 2, 4096 * 4 * 256 * 2
    assert within - all_before == masks + outputs


def test_the_fullest_rank_may_stand_between_the_first_and_the_last() -> None:
    """DeepSeek-V3's first three layers have no experts: the second of 16 ranks has more parameters than the first, and no head."""
    training = Training(KNOWN_SHAPES["deepseek-v3"], "bfloat16", MicroBatchShape.packed(1024, 1024), micro_batches=64)
    layout = LayoutSpec(tp=8, sp=True, pp=16, dp=8, ep=64, etp=1)
    peaks = [training.memory(layout, rank).total for rank in range(16)]
    assert training.peak(layout).rank == 1 == peaks.index(max(peaks))


def test_a_layout_that_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match=r"layout.tp is 3, which does not divide"):
        memory(LayoutSpec(tp=3))
