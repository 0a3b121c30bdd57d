"""One rank of `model.check`, a process of its own: `python -m nemo_rl_like.model.check_rank '{...}'`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_like.model import runtime
from nemo_rl_like.model.attention_layouts import PackedLayout
from nemo_rl_like.model.check import EQUAL_FILE, LOGITS_FILE, TOKENS_FILE
from nemo_rl_like.model.factory import build_model
from nemo_rl_like.model.forward import MegatronModel, hidden_states, whole_sequences
from nemo_rl_like.model.heads import full_logits, output_head
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.hf_io import TensorReader
from nemo_rl_like.model.layouts import MicroBatch
from nemo_rl_like.model.mcore import parallel_state
from nemo_rl_like.model.merged_reader import open_weights
from nemo_rl_like.model.pipeline_stage import PipelineStage
from nemo_rl_like.model.schedule import run_stages
from nemo_rl_like.model.weight_map import WeightMap
from nemo_rl_like.spec.policy import LayoutSpec


def main(task: str) -> None:
    """Load the folder, run the tokens, export again; rank 0 saves the result."""
    given = json.loads(task)
    layout = LayoutSpec.model_validate(given["layout"])
    runtime.init_distributed(
        given["rank"], layout.ranks, "127.0.0.1", given["port"], layout, given["timeout_s"], given["threads"]
    )
    scratch, folder = Path(given["scratch"]), given["folder"]
    tokens = torch.load(scratch / TOKENS_FILE, weights_only=True)
    config = ModelConfig.from_hf_folder(folder)
    with open_weights(folder) as reader:
        model = build_model(config, layout, torch.float32, weights=reader).eval()
        logits = row_logits(model, tokens)
        equal = round_trip_equal(WeightMap(config), model, reader)
    if logits is not None and parallel_state.get_data_parallel_rank() == 0:
        torch.save(logits, scratch / LOGITS_FILE)
    if given["rank"] == 0:
        (scratch / EQUAL_FILE).write_text(json.dumps(equal))
    dist.barrier()
    runtime.shutdown_distributed()


def row_logits(model: MegatronModel, tokens: list[list[int]]) -> list[Tensor] | None:
    """float32 [row length, vocab] of each row on the last stage's first rank, through Megatron's own schedule; else None."""
    batch = _all_places(tokens)
    collected: list[Tensor] = []

    def forward_step(
        batches: Iterator[MicroBatch], stage: PipelineStage
    ) -> tuple[Tensor, Callable[[Tensor, bool], Tensor]]:
        return hidden_states(stage, next(batches)), keep

    def keep(hidden: Tensor, non_loss_data: bool) -> Tensor:
        collected.append(full_logits(hidden, output_head(model)))
        return hidden

    with whole_sequences(model):
        run_stages(model, [batch], forward_step, training=False, collect_non_loss_data=True)
    if not collected or parallel_state.get_tensor_model_parallel_rank() != 0:
        return None
    return [part.clone() for part in collected[0].cpu().split([len(row) for row in tokens])]


def _all_places(tokens: list[list[int]]) -> MicroBatch:
    """Every row packed, with every place asked for."""
    lengths = [len(row) for row in tokens]
    ids = torch.tensor([token for row in tokens for token in row])
    positions = torch.cat([torch.arange(n) for n in lengths])
    places = torch.arange(len(ids))
    return MicroBatch("packed", ids[None], positions[None], PackedLayout.of(lengths), places, ids, places)


def round_trip_equal(weight_map: WeightMap, model: MegatronModel, reader: TensorReader) -> bool:
    """Whether every exported tensor equals the folder's bit for bit; meaningful on rank 0, collective."""
    equal = True
    for name, tensor in weight_map.iter_hf(model):
        if tensor is not None:
            original = reader.get(name)
            equal &= torch.equal(tensor.cpu().to(original.dtype), original)
    return equal


if __name__ == "__main__":
    main(sys.argv[1])
