"""FSDP2 over transformers' models does what Megatron does, with the same spec; and trains what Megatron's weight map lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PreTrainedModel,
)

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.families import FAMILIES
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.outline import outline_of
from nemo_rl_like.model.transformers_model import empty_model
from nemo_rl_like.spec.policy import LayoutSpec, PolicySpec, RecomputeSpec
from tests.model.tiny import make_model
from tests.policy.fsdp_ranks import ADAMW, SGD, STEPS, crossed, told, trained
from tests.policy.ranks import of_any_layout, run_ranks
from tests.policy.test_laws import OBJECTIVE, TEMPERATURE, VOCAB, make_batch, make_folder
from tests.tiny_folders import save_biased_qwen2

MEGATRON = PolicySpec()
KINDS = ("padded", "packed", "shared_prefix")
MODELS = ("tied llama", "biased qwen2")
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
_GROUPED = {**_SHAPE, "num_key_value_heads": 2, "pad_token_id": None}


def sharded(**more: Any) -> PolicySpec:
    """FSDP with these fields of the policy."""
    return PolicySpec.model_validate({"backend": "fsdp", **more})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {"tied llama": make_folder(root / "llama"), "biased qwen2": save_biased_qwen2(root / "qwen2", VOCAB)}


@pytest.fixture(scope="module")
def one_rank(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Of each model: Megatron's run, then one of each kind of rows, one of many passes, and one that recomputes."""
    policies = [
        MEGATRON,
        *(sharded(rows=kind) for kind in KINDS),
        sharded(rows="packed", micro_batch_tokens=20),
        sharded(rows="packed", recompute=RecomputeSpec(layers=1)),
    ]
    cases = [(folder, policy, ADAMW) for folder in folders.values() for policy in policies]
    cases += [(folders["tied llama"], policy, SGD) for policy in (MEGATRON, sharded())]
    made = run_ranks(trained, 1, tmp_path_factory.mktemp("one"), cases)
    count = len(policies)
    return {"tied llama": made[:count], "biased qwen2": made[count : 2 * count], "sgd": made[2 * count :]}


def same(got: dict[str, Any], want: dict[str, Any], within: float = 1e-5) -> None:
    """All that a run found is what another found."""
    for name in ("log-probs", "entropy"):
        assert (got[name] - want[name]).abs().max() <= within, name
        assert (got["after"][name] - want["after"][name]).abs().max() <= within, f"{name} after the steps"
    assert want["entropy"].max() > 1 and (want["after"]["log-probs"] - want["log-probs"]).abs().max() > 1e-3
    assert got["validation"] == pytest.approx(want["validation"], abs=within)
    assert len(got["metrics"]) == len(want["metrics"]) == STEPS
    for mine, theirs in zip(got["metrics"], want["metrics"], strict=True):
        assert of_any_layout(mine) == pytest.approx(of_any_layout(theirs), abs=within, rel=within)
    assert got["weights"].keys() == want["weights"].keys()
    for name, tensor in want["weights"].items():
        assert (got["weights"][name] - tensor).abs().max() <= within, name


@pytest.mark.parametrize("name", [*MODELS, "sgd"])
def test_losses_logprobs_norms_and_weights_are_megatrons_for_any_rows(
    name: str, one_rank: dict[str, list[Any]]
) -> None:
    want, *others = one_rank[name]
    assert want["metrics"][1]["grad_norm"] > ADAMW.clip_grad, "clipping that never clips proves nothing"
    for got in others:
        same(got, want)


def test_two_ranks_are_one(folders: dict[str, Path], one_rank: dict[str, list[Any]], tmp_path: Path) -> None:
    two = LayoutSpec(dp=2)
    cases = [(folders[name], sharded(layout=two, rows=kind), ADAMW) for name, kind in zip(MODELS, KINDS, strict=False)]
    cases.append((folders["tied llama"], sharded(layout=two, micro_batch_tokens=20), SGD))
    made = run_ranks(trained, 2, tmp_path, cases)
    for name, got in zip((*MODELS, "sgd"), made, strict=True):
        same(got, one_rank[name][0])


def test_a_teacher_tells_the_same_tokens(folders: dict[str, Path], tmp_path: Path) -> None:
    want, *others = run_ranks(told, 1, tmp_path, folders["tied llama"], [MEGATRON, *(sharded(rows=k) for k in KINDS)])
    for got in others:
        assert torch.equal(got[0], want[0]) and (got[1] - want[1]).abs().max() <= 1e-5


@pytest.mark.parametrize(("dtype", "within"), [("float32", 1e-6), ("bfloat16", 0.02)])
def test_a_checkpoint_of_either_backend_goes_on_in_the_other(
    dtype: str, within: float, folders: dict[str, Path], tmp_path: Path
) -> None:
    found = run_ranks(crossed, 1, tmp_path, folders["biased qwen2"], tmp_path / "saved", (MEGATRON, sharded()), dtype)
    for saver, runs in found.items():
        first, second = runs[0]
        assert abs(first - second) > 1e-3, "a step that changes nothing proves nothing"
        for got in runs[1:]:
            assert got == pytest.approx(runs[0], abs=within), saver


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_goes_on_in_the_other_backend(folders: dict[str, Path], tmp_path: Path) -> None:
    two = LayoutSpec(dp=2)
    policies = (PolicySpec(layout=two), sharded(layout=two))
    found = run_ranks(crossed, 2, tmp_path, folders["tied llama"], tmp_path / "saved", policies, "float32")
    for saver, runs in found.items():
        for got in runs[1:]:
            assert got == pytest.approx(runs[0], abs=1e-6), saver


# -- architectures beside those that run on Megatron too


def gemma2() -> PreTrainedModel:
    """Windows of 6 tokens in every second layer, capped attention and logits, norms around each block."""
    capped = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 2.0, "sliding_window": 6}
    return Gemma2ForCausalLM(Gemma2Config(**_GROUPED, head_dim=8, query_pre_attn_scalar=8, **capped))


RENAMED = {"lm_head.weight": "embed_out.weight"}
"""What transformers calls GPT-NeoX's head in memory, and in files."""


def gpt_neox() -> PreTrainedModel:
    return GPTNeoXForCausalLM(GPTNeoXConfig(**_SHAPE))


def olmo2() -> PreTrainedModel:
    return Olmo2ForCausalLM(Olmo2Config(**_GROUPED))


def gpt2() -> PreTrainedModel:
    """Learned positions, a tied head, biases, matrices stored [in, out]; dropout that must not be drawn."""
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.1)
    )


def cohere() -> PreTrainedModel:
    """Logits times 0.3."""
    return CohereForCausalLM(CohereConfig(**_GROUPED, logit_scale=0.3))


OTHERS = {"gemma2": gemma2, "gpt_neox": gpt_neox, "olmo2": olmo2, "gpt2": gpt2, "cohere": cohere}


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, make in OTHERS.items():
        torch.manual_seed(0)
        found[name] = tmp_path_factory.mktemp(name)
        make().save_pretrained(found[name])
    return found


def plain(folder: Path) -> dict[str, Any]:
    """The same steps by transformers, row by row in float64, with PyTorch's AdamW and clipping."""
    more = {"attn_implementation": "eager"} if "gemma2" in str(folder) else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **more).eval()
    batch = make_batch()
    stats = OBJECTIVE.prepare(batch)
    cuts = batch.cu_seqlens.tolist()

    def logprobs() -> tuple[torch.Tensor, torch.Tensor]:
        flat, entropies = [], []
        for start, end in zip(cuts, cuts[1:], strict=False):
            ids = batch.tokens[start:end]
            table = (model(ids[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
            none = table.new_zeros(1)
            flat.append(torch.cat([none, table.gather(1, ids[1:, None])[:, 0]]))
            entropies.append(torch.cat([none, -(table.exp() * table).sum(-1)]))
        return torch.cat(flat), torch.cat(entropies)

    groups = [
        {"params": [p for p in model.parameters() if (p.dim() > 1) is matrix], "weight_decay": decay}
        for matrix, decay in ((True, 0.1), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=ADAMW.lr, betas=ADAMW.betas, eps=ADAMW.eps)
    found: dict[str, Any] = {"metrics": []}
    for _ in range(STEPS):
        current, entropy = logprobs()
        found.setdefault("log-probs", current.detach()), found.setdefault("entropy", entropy.detach())
        ratio = (current - batch.extras["proximal"]).exp()
        advantage = batch.extras["advantages"].double()
        policy = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        x = current - batch.extras["reference"]
        loss = ((policy + 0.1 * ((-x).exp() - 1 + x) - 0.01 * entropy) * stats.weights.double()).sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), ADAMW.clip_grad)
        optimizer.step()
        found["metrics"].append({"loss": float(loss.detach()), "grad_norm": float(norm)})
    return found | {"weights": {name: p.detach().float() for name, p in model.named_parameters()}}


@pytest.fixture(scope="module")
def of_others(others: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Padded and packed rows of each, on one rank."""
    constant = ADAMW.model_copy(update={"schedule": "constant", "warmup_steps": 0, "groups": ()})
    kinds = ("padded", "packed")
    cases = [(folder, sharded(rows=kind), constant) for folder in others.values() for kind in kinds]
    made = run_ranks(trained, 1, tmp_path_factory.mktemp("others"), cases)
    return {name: made[2 * i : 2 * i + 2] for i, name in enumerate(others)}


@pytest.mark.parametrize("name", OTHERS)
def test_another_architecture_trains_as_transformers_computes_it(
    name: str, others: dict[str, Path], of_others: dict[str, list[Any]]
) -> None:
    if name not in FAMILIES:
        with pytest.raises(InputError, match="policy.backend: fsdp"):
            ModelConfig.from_hf_folder(others[name])
    want, mask = plain(others[name]), make_batch().loss_mask
    for got in of_others[name]:
        for what in ("log-probs", "entropy"):
            assert (got[what] - want[what].float())[mask].abs().max() <= 2e-5, what
        for mine, theirs in zip(got["metrics"], want["metrics"], strict=True):
            assert {k: mine[k] for k in theirs} == pytest.approx(theirs, abs=2e-5, rel=2e-5)
        assert set(got["weights"]) == set(load_file(others[name] / "model.safetensors"))
        for key, tensor in want["weights"].items():
            in_file = RENAMED.get(key, key) if name == "gpt_neox" else key
            assert (got["weights"][in_file] - tensor).abs().max() <= 5e-5, key


def test_a_model_is_made_without_memory_for_its_weights(others: dict[str, Path]) -> None:
    for folder in others.values():
        model = empty_model(folder)
        assert all(parameter.is_meta for parameter in model.parameters())
        assert not any(buffer.is_meta for buffer in model.buffers())


def test_the_outline_has_what_stages_ask(others: dict[str, Path], folders: dict[str, Path]) -> None:
    for name, folder in others.items():
        outline = outline_of(folder)
        assert (outline.family, outline.vocab_size, outline.max_positions) == (name, VOCAB, 64)
        assert outline.tie_embeddings is (name in ("gemma2", "gpt2", "cohere"))
    assert outline_of(folders["tied llama"]) == ModelConfig.from_hf_folder(folders["tied llama"])


# -- what is refused


def test_capped_logits_with_a_scale_are_refused_by_name(tmp_path: Path) -> None:
    model = gemma2()
    model.config.logit_scale = 0.5
    model.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="final_logit_softcapping and a scale"):
        empty_model(tmp_path)


def test_experts_are_refused_with_the_backend_that_has_them(tmp_path: Path) -> None:
    from nemo_rl_like.model.hf_io import SafetensorsReader

    make_model("qwen3_moe").save_pretrained(tmp_path)
    with SafetensorsReader(tmp_path) as weights, pytest.raises(InputError, match="need `policy.backend: megatron`"):
        empty_model(tmp_path).check(weights)


def test_rows_that_a_model_cannot_keep_apart_are_refused(others: dict[str, Path], tmp_path: Path) -> None:
    """A window is lost under the mask of shared prompts; the probe finds a model whose positions do not part its rows."""
    with pytest.raises(AssertionError, match="attend within a window"):
        run_ranks(trained, 1, tmp_path, [(others["gemma2"], sharded(rows="shared_prefix"), ADAMW)])


def test_an_output_head_of_more_than_a_product_is_found(others: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ends in more than a product"):
        run_ranks(_with_doubled_head, 1, tmp_path, others["olmo2"])


def _with_doubled_head(rank: int, world: int, port: int, folder: Path) -> None:
    """A model that doubles its logits without saying so in its configuration."""
    forward = Olmo2ForCausalLM.forward

    def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(self, *args, **kwargs)
        out.logits = 2 * out.logits
        return out

    Olmo2ForCausalLM.forward = doubled  # type: ignore[method-assign]
    trained(rank, world, port, [(folder, sharded(), ADAMW)])
