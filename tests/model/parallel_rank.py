"""Four gloo ranks, started once, run every family in every layout: `python -m tests.model.parallel_rank '{...}'`."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_like.model import runtime
from nemo_rl_like.model.check_rank import round_trip_equal, row_logits
from nemo_rl_like.model.factory import build_model
from nemo_rl_like.model.forward import MegatronModel
from nemo_rl_like.model.heads import output_head, token_logprobs
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.hf_io import SafetensorsReader, TensorReader, write_weights
from nemo_rl_like.model.layouts import Kind, MicroBatch, plan_microbatches
from nemo_rl_like.model.mcore import parallel_state
from nemo_rl_like.model.pipeline_stage import PipelineStage
from nemo_rl_like.model.router import RouterWatch
from nemo_rl_like.model.schedule import run_stages
from nemo_rl_like.model.weight_map import WeightMap
from nemo_rl_like.spec.policy import LayoutSpec, RecomputeSpec, RouterSpec
from nemo_rl_like.tokens.batch import TokenBatch
from tests.model import tiny
from tests.ports import free_port

with runtime.quiet():
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

WORLD = 4
TEMPERATURE = 0.8
LAYOUTS = (
    LayoutSpec(dp=2, tp=2),
    LayoutSpec(tp=2, pp=2),
    LayoutSpec(tp=2, pp=2, sp=True),
    LayoutSpec(cp=2, pp=2),
    LayoutSpec(dp=2, pp=2, vpp=2),
)
MORE_LAYOUTS = (
    LayoutSpec(dp=4),
    LayoutSpec(dp=2, pp=2),
    LayoutSpec(dp=2, tp=2, sp=True),
    LayoutSpec(dp=2, cp=2),
    LayoutSpec(cp=2, tp=2),
    LayoutSpec(cp=2, tp=2, sp=True),
    LayoutSpec(cp=4),
    LayoutSpec(tp=2, pp=2, vpp=2, sp=True),
    LayoutSpec(cp=2, pp=2, vpp=2),
    LayoutSpec(pp=4),
)
"""Run in the slow suite only."""
EXPERT_LAYOUTS = (
    LayoutSpec(dp=2, pp=2, vpp=2, ep=2),
    LayoutSpec(dp=2, tp=2, sp=True, ep=2, etp=1),
    LayoutSpec(cp=2, tp=2, sp=True, ep=4, etp=1),
)
"""For models with experts only."""
MORE_EXPERT_LAYOUTS = (
    LayoutSpec(dp=4, ep=2),
    LayoutSpec(dp=2, pp=2, ep=2),
    LayoutSpec(dp=4, ep=4),
    LayoutSpec(dp=2, tp=2, sp=True, ep=2),
    LayoutSpec(dp=2, tp=2, sp=True, etp=1),
    LayoutSpec(tp=2, pp=2, sp=True, ep=2, etp=1),
    LayoutSpec(dp=2, cp=2, ep=2),
    LayoutSpec(cp=2, pp=2, ep=2),
)
FEW, EVERY = (*LAYOUTS, *EXPERT_LAYOUTS), (*LAYOUTS, *MORE_LAYOUTS, *EXPERT_LAYOUTS, *MORE_EXPERT_LAYOUTS)
QUICK = ("llama", "qwen3", "phi3", "gemma2", "glm4_moe", "deepseek_v3")
"""Families that run in few layouts when not all do: one of each kind of layer and of packing."""
BALANCED, ROUTER = "glm4_moe", RouterSpec(balance_loss=0.3, z_loss=0.05)
"""A family that is run with its routers' losses too."""
KINDS: tuple[Kind, ...] = ("padded", "packed", "shared_prefix")
ALL_KINDS = "qwen3"
"""A family that is run with every kind of rows; the others share prefixes."""


def runs(family: str) -> list[tuple[Kind, int]]:
    """Kinds of rows and token budgets that a family is run with."""
    last = KINDS[-1]
    if family == ALL_KINDS:
        return [*((kind, 12) for kind in KINDS), (last, 4096)]
    return [(last, 12)]


@dataclass(frozen=True, slots=True)
class Results:
    """Everything the ranks wrote, by case name."""

    tensors: dict[str, Tensor]
    facts: dict[str, bool | int]


def run_four_ranks(folders: Mapping[str, Path], scratch: Path, *, every: bool) -> Results:
    """Start the ranks, wait for them, and read what they wrote. A rank that fails fails the test with its output.

    `every`: all families in all layouts, else a few of both.
    """
    port = free_port()
    named = {family: str(path) for family, path in folders.items()}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    ranks = []
    for rank in range(WORLD):
        task = json.dumps({"rank": rank, "port": port, "folders": named, "scratch": str(scratch), "every": every})
        command = [sys.executable, "-m", "tests.model.parallel_rank", task]
        log = (scratch / f"rank{rank}.log").open("wb")
        ranks.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))
        log.close()
    try:
        codes = [process.wait(timeout=900) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    logs = "\n".join((scratch / f"rank{rank}.log").read_text(errors="replace")[-3000:] for rank in range(WORLD))
    assert codes == [0] * WORLD, logs
    tensors: dict[str, Tensor] = {}
    facts: dict[str, bool | int] = {}
    for rank in range(WORLD):
        part = torch.load(scratch / f"rank{rank}.pt", weights_only=True)
        tensors.update(part["tensors"])
        facts.update({f"{name}/rank{rank}": value for name, value in part["facts"].items()})
    return Results(tensors, facts)


def name_of(layout: LayoutSpec) -> str:
    """A layout in a word."""
    axes = {"vpp": layout.vpp, "cp": layout.cp, "ep": layout.ep, "etp": layout.etp or 0}
    further = "".join(f"{name}{size}" for name, size in axes.items() if size > (name != "etp"))
    return f"tp{layout.tp}pp{layout.pp}" + ("sp" if layout.sp else "") + further


def fits(family: str, layout: LayoutSpec) -> bool:
    """Whether a family runs in this layout."""
    heads = 4 if family in tiny.OWN_KEYS else 2
    if heads % (layout.tp * layout.cp) or (layout.pp * layout.vpp > 3 and family not in tiny.DEEP):
        return False
    if family == "gpt_oss" and layout.expert_tp > 1:
        return False
    if family in tiny.MIXTURES:
        return layout.sp or layout.tp == 1
    return not for_experts(layout)


def in_fast_suite(family: str, layout: LayoutSpec) -> bool:
    """Whether the law of a family in this layout is not left to the slow suite."""
    return layout in FEW and (family in QUICK or (layout.vpp > 1 and family in tiny.DEEP))


def for_experts(layout: LayoutSpec) -> bool:
    """Whether only models with experts run in this layout."""
    return layout in (*EXPERT_LAYOUTS, *MORE_EXPERT_LAYOUTS)


class _Rank:
    """Runs the cases of one rank."""

    def __init__(self, rank: int, scratch: Path) -> None:
        self._rank, self._scratch = rank, scratch
        self.tensors: dict[str, Tensor] = {}
        self.facts: dict[str, bool | int] = {}

    def family(self, family: str, folder: Path, layout: LayoutSpec) -> None:
        """Logits, round trip, log-probs, gradients and scattered moments of one family in one layout."""
        config, case = ModelConfig.from_hf_folder(folder), f"{family}/{name_of(layout)}"
        weight_map = WeightMap(config)
        with SafetensorsReader(folder) as reader:
            model = build_model(config, layout, torch.float32, weights=reader)
            logits = row_logits(model, [list(range(40)), [3, 1, 4], [7]])
            if logits is not None and parallel_state.get_data_parallel_rank() == 0:
                self.tensors[f"{case}/logits"] = torch.cat(logits)
            self.facts[f"{case}/round_trip"] = round_trip_equal(weight_map, model, reader)
            self.facts[f"{case}/shares"] = self._shares_are_whole(layout, model, weight_map, reader)
        for kind, budget in runs(family):
            self._train(f"{case}/{kind}{budget}", model, weight_map, kind, budget)
        if family == BALANCED:
            for kind in KINDS:
                self._train(f"{case}/{kind}balanced", model, weight_map, kind, 12, ROUTER)
            with SafetensorsReader(folder) as reader:
                again = build_model(config, layout, torch.float32, weights=reader, recompute=RecomputeSpec())
            self._train(f"{case}/recomputed", again, weight_map, KINDS[-1], 12, ROUTER)
        self.facts[f"{case}/moments"] = self._moments_return(case.replace("/", "-"), model, weight_map)

    def _shares_are_whole(
        self, layout: LayoutSpec, model: MegatronModel, weight_map: WeightMap, reader: TensorReader
    ) -> bool:
        """Whether every tensor is in one rank's share, as it is in the file, and no share of a dense stage is far larger than another."""
        mine = {n: tensor.clone() for share in weight_map.iter_shares(model) for n, tensor in share.tensors()}
        sizes = {name: tensor.numel() for name, tensor in mine.items()}
        shares: list[dict[str, int]] = [{}] * WORLD
        dist.all_gather_object(shares, sizes)
        names = sorted(name for share in shares for name in share)
        whole = names == sorted(weight_map.hf_shapes()) and all(
            torch.equal(reader.get(name), mine[name]) for name in mine
        )
        if layout.pp > 1 or model.watch is not None:
            return whole
        sums = [sum(share.values()) for share in shares]
        largest = max(sum(math.prod(shape) for shape in entry.shapes) for entry in weight_map.entries)
        return whole and max(sums) - min(sums) <= largest

    def scratch_model(self, folder: Path, layout: LayoutSpec) -> None:
        """A model from a seed, exported."""
        config = ModelConfig.from_hf_folder(folder)
        model = build_model(config, layout, torch.float32, seed=11)
        for name, tensor in WeightMap(config).iter_hf(model):
            if tensor is not None:
                self.tensors[f"scratch/{name_of(layout)}/{name}"] = tensor.clone()

    def _train(
        self,
        case: str,
        model: MegatronModel,
        weight_map: WeightMap,
        kind: Kind,
        budget: int,
        router: RouterSpec | None = None,
    ) -> None:
        batch = tiny.make_batch()
        dp_size, dp_rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        passes = plan_microbatches(
            batch,
            range(batch.rows),
            dp_size=dp_size,
            dp_rank=dp_rank,
            kind=kind,
            token_budget=budget,
            with_row_places=router is not None,
        )
        self.facts[f"{case}/passes"] = len(passes)
        widths: list[int] = []
        hook = model.first.decoder.layers[0].register_forward_pre_hook(
            lambda _, args, kwargs: widths.append(kwargs["hidden_states"].shape[0]), with_kwargs=True
        )
        with nullcontext() if router is None else watch_of(model).step(router, 1 / batch.rows, 1.0, runtime.device()):
            flat = run_schedule(model, batch, passes)
        if router is not None:
            self.tensors[f"{case}/metrics"] = watch_of(model).metrics()
        hook.remove()
        self.facts[f"{case}/widest"] = max(widths)
        if parallel_state.get_tensor_model_parallel_rank() != 0 or not model.has_head:
            flat.zero_()
        dist.all_reduce(flat)
        gradients = {name: p.main_grad for name, p in model.named_parameters() if p.requires_grad}
        found = weight_map.trained.iter_hf(model, gradients)
        exported = {name: tensor for name, tensor in found if tensor is not None}
        if self._rank == 0:
            self.tensors[f"{case}/logprobs"] = flat
            self.tensors.update({f"{case}/grad/{name}": tensor.clone() for name, tensor in exported.items()})

    def _moments_return(self, case: str, model: MegatronModel, weight_map: WeightMap) -> bool:
        """Whether exported tensors, written and scattered again, are this rank's tensors bit for bit."""
        # Like moments, finished gradients are equal on all ranks that hold the same tensor.
        weight_map = weight_map.trained
        moments = {name: p.main_grad * 2 for name, p in model.named_parameters() if p.requires_grad}
        folder = self._scratch / case
        write_weights(folder, weight_map.iter_hf(model, moments), 40_000)
        dist.barrier()
        with SafetensorsReader(folder) as reader:
            back = weight_map.scatter_hf(model, reader)
        # Padded vocabulary rows come back as zeros; their gradients are zero too.
        return back.keys() == moments.keys() and all(torch.equal(back[name], moments[name]) for name in back)


def watch_of(model: MegatronModel) -> RouterWatch:
    """The watch of a model with experts."""
    assert model.watch is not None
    return model.watch


def run_schedule(model: MegatronModel, batch: TokenBatch, passes: list[MicroBatch]) -> Tensor:
    """Forward and backward of `tiny.loss_of` by Megatron's schedule and DDP; log-probs [N] on the last stage.

    The whole gradient is each parameter's `main_grad` afterwards.
    """
    weights, flat = tiny.token_weights(batch), torch.zeros(batch.tokens.numel())

    def forward_step(
        batches: Iterator[MicroBatch], stage: PipelineStage
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
        micro_batch = next(batches)
        return stage(micro_batch), lambda hidden: loss(hidden, micro_batch)

    def loss(hidden: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        mine = model.scored_here(micro_batch)
        mine = torch.arange(len(micro_batch.targets)) if mine is None else mine
        index = micro_batch.source_index[mine]
        out = token_logprobs(
            hidden,
            output_head(model),
            micro_batch.targets[mine],
            temperature=TEMPERATURE,
            chunk_tokens=5,
            want_entropy=True,
            want_log_norm=True,
        )
        flat[index] = out.logprobs.detach()
        # A token count of zero makes Megatron divide the gradient by nothing.
        total = tiny.loss_of(out.logprobs, out.entropy, out.log_norm, weights[index])
        return total, torch.zeros((), dtype=torch.int), {}

    model.config.calculate_per_token_loss = True
    model.config.finalize_model_grads_func = finalize_model_grads
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
    stages = [DistributedDataParallel(model.config, settings, stage) for stage in model.stages]
    run_stages(model, passes, forward_step, training=True, wrapped=stages)
    return flat


def main(task: str) -> None:
    """Run every case of this rank and save the results."""
    given = json.loads(task)
    rank, scratch = given["rank"], Path(given["scratch"])
    cases = _Rank(rank, scratch)
    for layout in EVERY if given["every"] else FEW:
        runtime.init_distributed(
            rank,
            WORLD,
            "127.0.0.1",
            given["port"],
            layout,
            120.0,
            1,
        )
        for family, folder in given["folders"].items():
            if fits(family, layout) and (given["every"] or in_fast_suite(family, layout)):
                cases.family(family, Path(folder), layout)
        made = "qwen3_moe" if for_experts(layout) else "mistral"
        if fits(made, layout):
            cases.scratch_model(Path(given["folders"][made]), layout)
    torch.save({"tensors": cases.tensors, "facts": cases.facts}, scratch / f"rank{rank}.pt")
    dist.barrier()
    runtime.shutdown_distributed()


if __name__ == "__main__":
    main(sys.argv[1])
