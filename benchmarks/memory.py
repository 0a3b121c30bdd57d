"""Estimated against measured bytes of training on one rank, by part.

`python benchmarks/memory.py --out benchmarks/results/memory.json`

Each case makes a model from scratch, takes one optimizer step so that the moments exist, and one more under PyTorch's memory profiler, on the
CPU and on one rank. Parameters, gradients and optimizer state are the bytes of their tensors; activations are what is alive after
the forward pass of a micro-batch; the peak is the most that is alive at any moment of the whole step. Bytes are those of tensors, not the process's.
"""

from __future__ import annotations

import argparse
import gc
import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peer import one_rank, provenance, write_json
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nemo_rl_like.algorithms.objectives import CrossEntropy
from nemo_rl_like.cluster.context import RankContext
from nemo_rl_like.model import runtime
from nemo_rl_like.model.activations import HeadShape
from nemo_rl_like.model.attention_layouts import CausalLayout, PackedLayout, RowBlock, SharedPrefixLayout
from nemo_rl_like.model.hf_attention import AttentionConfig
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.hf_experts import ClampedSwiGlu, ExpertsConfig
from nemo_rl_like.model.hf_latent import LatentConfig
from nemo_rl_like.model.layouts import Kind, MicroBatch, attention_pair_cost, plan_microbatches
from nemo_rl_like.model.memory import Dtype, Memory, Training
from nemo_rl_like.model.pass_sizes import AttentionBlock, MicroBatchShape
from nemo_rl_like.policy.rank import PolicyRank
from nemo_rl_like.spec.optimizer import AdamWOptimizer
from nemo_rl_like.spec.policy import LayoutSpec, Module, OffloadSpec, PolicySpec, RecomputeSpec
from nemo_rl_like.tokens.batch import Row, TokenBatch, batch_rows

Watched = Callable[[], AbstractContextManager[list[int]]]
"""Yields a list that has, after the block, the bytes of tensors made in it and alive at each of its moments."""

LLAMA = ModelConfig("llama", 512, 128, 352, 4, 4, 2, 32, 2048, 10_000.0, 1e-5, False)
EXPERTS = ExpertsConfig(count=8, per_token=2, width=96, normalize=True)
_SHARED = replace(EXPERTS, shared_width=96, first_dense=1, scale=1.7, groups=2, groups_per_token=1)
_LATENT = LatentConfig(48, 40, plain_width=24, rotary_width=16, value_width=32, interleaved=True)
_WINDOWS = AttentionConfig(24, windowed=(True, False, True, False))
_CAPPED = replace(_WINDOWS, score_scalar=32, score_cap=50.0)
_DEEPSEEK = replace(LLAMA, family="deepseek_v3", kv_heads=4, head_dim=40, experts=_SHARED, latent=_LATENT)
SHAPES = {
    "mistral": replace(LLAMA, family="mistral", attention=AttentionConfig(24, (True,) * 4)),
    "nemotron": replace(LLAMA, family="nemotron", rotary_share=0.5),
    "gemma2": replace(LLAMA, family="gemma2", tie_embeddings=True, logit_cap=30.0, attention=_CAPPED),
    "gemma3_text": replace(LLAMA, family="gemma3_text", tie_embeddings=True, window_rope_theta=1e4, attention=_WINDOWS),
    "qwen2_moe": replace(
        LLAMA, family="qwen2_moe", experts=replace(EXPERTS, shared_width=160, normalize=False), own_qkv_bias=True
    ),
    "glm4_moe": replace(
        LLAMA, family="glm4_moe", experts=_SHARED, rotary_share=0.5, own_qkv_bias=True, own_qk_norm=True
    ),
    "gpt_oss": replace(
        LLAMA, family="gpt_oss", experts=replace(EXPERTS, swiglu=ClampedSwiGlu(1.702, 7.0)), attention=_WINDOWS
    ),
    "deepseek_v2": replace(
        _DEEPSEEK,
        family="deepseek_v2",
        latent=replace(_LATENT, query_rank=None),
        experts=replace(_SHARED, normalize=False),
    ),
    "deepseek_v3": _DEEPSEEK,
}
"""What no Llama has: windows, caps, sinks, biases, norms of other kinds and places, latent attention, shared experts, dense first layers."""


@dataclass(frozen=True, slots=True)
class Case:
    """One model and one batch."""

    config: ModelConfig
    kind: Kind = "packed"
    dtype: Dtype = "float32"
    prompts: int = 4
    samples: int = 4
    prompt: int = 24
    response: int = 40
    spread: int = 0
    """Tokens by which prompts and responses differ from the first to the last."""
    chunk_tokens: int = 1024
    micro_batch_tokens: int = 16384
    layout: LayoutSpec = field(default_factory=LayoutSpec)
    recompute: RecomputeSpec | None = None
    offload_optimizer: bool = False

    @property
    def policy(self) -> PolicySpec:
        """The policy block of the case."""
        return PolicySpec(
            layout=self.layout,
            rows=self.kind,
            logprob_chunk_tokens=self.chunk_tokens,
            micro_batch_tokens=self.micro_batch_tokens,
            recompute=self.recompute,
            offload=OffloadSpec(optimizer=self.offload_optimizer),
        )


FULL = RecomputeSpec()


def _selective(*modules: Module) -> RecomputeSpec:
    return RecomputeSpec(kind="selective", modules=modules)


CASES = {
    "llama, packed": Case(LLAMA),
    "llama, packed, uneven rows": Case(LLAMA, spread=16),
    "llama, padded, uneven rows": Case(LLAMA, "padded", spread=16),
    "llama, shared prompts": Case(LLAMA, "shared_prefix"),
    "llama, shared prompts, uneven rows": Case(LLAMA, "shared_prefix", spread=16),
    "llama, 4096 tokens of vocabulary": Case(replace(LLAMA, vocab_size=4096)),
    "llama, 4096 tokens of vocabulary, chunks of 128": Case(replace(LLAMA, vocab_size=4096), chunk_tokens=128),
    "llama, tied, hidden 64, 2 layers": Case(
        replace(LLAMA, hidden_size=64, head_dim=16, layers=2, tie_embeddings=True)
    ),
    "llama, hidden 256, 6 layers": Case(replace(LLAMA, hidden_size=256, head_dim=64, layers=6, intermediate_size=688)),
    "llama, one key/value head": Case(replace(LLAMA, kv_heads=1)),
    "llama, score head": Case(replace(LLAMA, score_head=True)),
    "llama, micro-batches of two rows": Case(LLAMA, micro_batch_tokens=128),
    "llama, rows of 1024": Case(LLAMA, prompts=2, samples=1, prompt=24, response=1000),
    "llama, few tokens and a large vocabulary": Case(replace(LLAMA, vocab_size=8192), prompts=1, samples=2),
    "llama, bfloat16": Case(LLAMA, dtype="bfloat16"),
    "qwen2": Case(replace(LLAMA, family="qwen2")),
    "qwen3": Case(replace(LLAMA, family="qwen3")),
    "qwen3, shared prompts, uneven rows": Case(replace(LLAMA, family="qwen3"), "shared_prefix", spread=16),
    "mixtral": Case(replace(LLAMA, family="mixtral", experts=EXPERTS)),
    "qwen3_moe": Case(replace(LLAMA, family="qwen3_moe", experts=replace(EXPERTS, normalize=False))),
    "qwen3_moe, micro-batches of two rows": Case(
        replace(LLAMA, family="qwen3_moe", experts=EXPERTS), micro_batch_tokens=128
    ),
    "qwen3_moe, bfloat16": Case(
        replace(LLAMA, family="qwen3_moe", experts=replace(EXPERTS, normalize=False)), dtype="bfloat16"
    ),
    "llama, optimizer on the host": Case(LLAMA, offload_optimizer=True),
    "llama, bfloat16, optimizer on the host": Case(LLAMA, dtype="bfloat16", offload_optimizer=True),
    "llama, recompute": Case(LLAMA, recompute=FULL),
    "llama, recompute, bfloat16": Case(LLAMA, dtype="bfloat16", recompute=FULL),
    "llama, recompute 2 of 4 layers": Case(LLAMA, spread=16, recompute=RecomputeSpec(layers=2)),
    "llama, recompute core_attn": Case(LLAMA, spread=16, recompute=_selective("core_attn")),
    "llama, recompute mlp": Case(LLAMA, recompute=_selective("mlp")),
    "qwen3, shared prompts, recompute core_attn, mlp": Case(
        replace(LLAMA, family="qwen3"), "shared_prefix", spread=16, recompute=_selective("core_attn", "mlp")
    ),
    "qwen3_moe, recompute": Case(replace(LLAMA, family="qwen3_moe", experts=EXPERTS), recompute=FULL),
    "qwen3_moe, recompute moe, bfloat16": Case(
        replace(LLAMA, family="qwen3_moe", experts=EXPERTS), dtype="bfloat16", recompute=_selective("moe")
    ),
}


_LONG_ROWS = {"prompts": 2, "samples": 1, "response": 1000}
_IN_OTHER_WAYS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "recompute": {"recompute": FULL},
    "shared prompts, uneven rows": {"kind": "shared_prefix", "spread": 16},
    "recompute core_attn": {"recompute": _selective("core_attn"), "spread": 16},
}
CASES |= {name: Case(shape) for name, shape in SHAPES.items()}
MORE_CASES = {
    f"{name}, {way}": Case(shape, **changes)
    for way, changes in _IN_OTHER_WAYS.items()
    for name, shape in SHAPES.items()
}
MORE_CASES |= {f"{name}, rows of 1024": Case(SHAPES[name], **_LONG_ROWS) for name in ("mistral", "gemma2", "gpt_oss")}
MORE_CASES["deepseek_v3, recompute moe, mlp"] = Case(_DEEPSEEK, recompute=_selective("moe", "mlp"))


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes of tensors."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int | None
    """After the forward pass of the largest micro-batch; None: not measured."""
    working: int
    """The most that one step holds beyond parameters, gradients and optimizer state."""
    host: int = 0
    """What the optimizer keeps in host memory for the device's sake."""

    @property
    def total(self) -> int:
        """The peak."""
        return self.parameters + self.gradients + self.optimizer + self.working


def main() -> int:
    """Measure every case and write the JSON; exit 1 if a peak is more than 10 % off."""
    options = _options()
    context = one_rank(threads=1)
    found = {}
    for name, case in {**CASES, **MORE_CASES}.items():
        estimate, measured = compare(case, context)
        found[name] = as_json(estimate, measured)
        print(f"{name:<48} peak {found[name]['estimated_over_measured']['total']:.3f} of the measured", flush=True)
    worst = max(abs(entry["estimated_over_measured"]["total"] - 1) for entry in found.values())
    result = {
        "what": "bytes of one rank, estimated and by PyTorch's memory profiler; `working` is activations and what the widest moment adds",
        "cases": found,
        "claims": {"every peak within 10 %": worst <= 0.1, "furthest": round(worst, 4)},
        "measured": provenance(1),
    }
    write_json(options.out, result)
    runtime.shutdown_distributed()
    return 0 if worst <= 0.1 else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/memory.json"))
    return parser.parse_args()


def compare(case: Case, context: RankContext) -> tuple[Memory, Measured]:
    """The estimate for a rank, and what its second step takes. Collective over the ranks of the case's layout."""
    batch, head = make_batch(case), HeadShape(case.chunk_tokens)
    shapes = [shape_of(each) for each in _micro_batches(batch, case, context)]
    trained = partial(
        Training,
        case.config,
        case.dtype,
        micro_batches=len(shapes),
        head=head,
        recompute=case.recompute,
        offload_optimizer=case.offload_optimizer,
    )
    memories = [trained(rows=shape).memory(case.layout, context.axis_ranks["pp"]) for shape in shapes]
    return max(memories, key=lambda memory: memory.total), measure(case, batch, context)


def measure(case: Case, batch: TokenBatch, context: RankContext) -> Measured:
    """Bytes of one rank of a policy, and of its second step."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(case.config.to_hf_dict(case.dtype)))
        policy = PolicyRank(context, folder=folder, policy=case.policy, dtype=case.dtype, initialize=1)
    policy.start_training(AdamWOptimizer(), total_updates=10)
    policy.train_step(batch, None, CrossEntropy())
    watched = _profiled if context.world_size == 1 else _traced
    with watched() as step:
        policy.train_step(batch, None, CrossEntropy())
    optimizer = policy.backend.optimizer
    buffers = [buffer for ddp in policy.backend.ddp for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers)]
    state = 0
    for owned, kinds in () if case.offload_optimizer else optimizer.slices():
        state += sum(tensor.nbytes for name, tensor in kinds.items() if name != "step")
        state += owned.main.nbytes if owned.main.dtype != owned.parameter.dtype else 0
    return Measured(
        parameters=sum(buffer.param_data.nbytes for buffer in buffers) + _beside_buffers(policy),
        gradients=sum(buffer.grad_data.nbytes for buffer in buffers),
        optimizer=state,
        activations=_kept(policy, case, batch, context, watched),
        working=max(step),
        host=optimizer.host_bytes,
    )


def _beside_buffers(policy: PolicyRank) -> int:
    """Bytes of parameters that have no gradient."""
    return sum(parameter.nbytes for parameter in policy.model.parameters() if not parameter.requires_grad)


def _kept(policy: PolicyRank, case: Case, batch: TokenBatch, context: RankContext, watched: Watched) -> int | None:
    """Bytes alive after the forward pass of the largest micro-batch; None for a stage of a pipeline, which cannot run alone."""
    if case.layout.pp > 1:
        return None
    kept = []
    for number in range(len(_micro_batches(batch, case, context))):
        with watched() as forward:
            micro_batch = _micro_batches(batch, case, context)[number]
            hidden = policy.model(micro_batch.to(runtime.device(), policy.model.dtype))
        kept.append(forward[-1])
        del hidden
    return max(kept)


@contextmanager
def _profiled() -> Iterator[list[int]]:
    """Yields a list that has, after the block, the bytes of tensors made in it and alive after each allocation and release."""
    alive: list[int] = []
    gc.collect()  # what earlier cases left must not be given back inside
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        yield alive
    events = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        alive.append(total)


@contextmanager
def _traced() -> Iterator[list[int]]:
    """As `_profiled`, counted by the storages of the tensors that operators return.

    For several ranks: gloo gives back its copies on threads of its own, which the profiler does not watch.
    """
    gc.collect()
    tracer = _Tracer()
    with tracer:
        yield tracer.alive
        tracer.note()


class _Tracer(TorchDispatchMode):
    """Adds up the bytes of new storages, and takes them off when the storage is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[int] = []
        self._total = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator; what it was given is not new."""
        for tensor in tree_leaves((args, kwargs)):
            self._meet(tensor, new=False)
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            self._meet(tensor, new=True)
        self.note()
        return out

    def note(self) -> None:
        """Add the bytes alive now to the list."""
        self.alive.append(self._total)

    def _meet(self, tensor: Any, *, new: bool) -> None:
        if not isinstance(tensor, torch.Tensor):
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes() if new else 0
        if key not in self._known:
            self._known.add(key)
            self._total += size
            weakref.finalize(storage, self._leave, key, size)

    def _leave(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._total -= size


def _micro_batches(batch: TokenBatch, case: Case, context: RankContext) -> list[MicroBatch]:
    """A rank's passes, as its policy plans them."""
    return plan_microbatches(
        batch,
        range(batch.rows),
        dp_size=context.axes["dp"],
        dp_rank=context.axis_ranks["dp"],
        kind=case.kind,
        token_budget=case.micro_batch_tokens,
        pair_cost=attention_pair_cost(case.config),
    )


def shape_of(micro_batch: MicroBatch) -> MicroBatchShape:
    """What the estimate needs to know of a real micro-batch."""
    layout, (rows, width) = micro_batch.attention, micro_batch.input_ids.shape
    blocks: list[AttentionBlock] = []
    if isinstance(layout, CausalLayout):
        blocks.append(AttentionBlock(rows, width, width))
    elif isinstance(layout, PackedLayout):
        blocks += [_block(block) for block in layout.blocks]
    elif isinstance(layout, SharedPrefixLayout):
        for block in layout.blocks:
            blocks.append(_block(block.prompts))
            if block.responses is not None:
                own = _block(block.responses)
                keys = own.queries + block.prompts.width
                blocks.append(replace(own, keys=keys, mask_rows=block.mask.shape[0]))
    return MicroBatchShape(rows * width, micro_batch.targets.numel(), tuple(blocks))


def _block(block: RowBlock) -> AttentionBlock:
    return AttentionBlock(block.rows, block.width, block.width, block.pad is not None)


def make_batch(case: Case) -> TokenBatch:
    """Random rows; prompts and responses shorten by up to `spread` tokens."""
    draw = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(case.config.vocab_size, (count,), generator=draw).tolist()

    rows: list[Row] = []
    for prompt in range(case.prompts):
        head = tokens(case.prompt - case.spread * prompt // case.prompts)
        for sample in range(case.samples):
            body = tokens(case.response - case.spread * sample // case.samples)
            rows.append(_row(head, body, prompt, len(rows)))
    return batch_rows(rows)


def _row(head: Sequence[int], body: Sequence[int], prompt: int, episode: int) -> Row:
    count = len(head) + len(body)
    return Row(
        tokens=[*head, *body],
        prompt_len=len(head),
        loss_mask=[i >= len(head) for i in range(count)],
        behavior=[0.0] * count,
        version=[-1] * count,
        prompt_id=prompt,
        group_id=prompt,
        episode_id=episode,
        rewards={"reward": 1.0},
    )


def as_json(estimate: Memory, measured: Measured) -> dict[str, Any]:
    """Both by part, and their ratios."""
    working = estimate.activations + estimate.temporary
    estimated = {
        "parameters": estimate.parameters,
        "gradients": estimate.gradients,
        "optimizer": estimate.optimizer,
        "activations": estimate.activations,
        "working": working,
        "total": estimate.total,
        "host": estimate.host,
    }
    real = {name: getattr(measured, name) for name in estimated}
    ratios = {name: round(estimated[name] / real[name], 4) for name in estimated if real[name]}
    return {"estimated": estimated, "measured": real, "estimated_over_measured": ratios}


if __name__ == "__main__":
    raise SystemExit(main())
