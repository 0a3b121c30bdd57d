"""`MegatronModel`: Megatron's `GPTModel` that takes a `MicroBatch` and ends in hidden states of the scored tokens.

The head is applied outside (`model.heads`), on scored tokens only and in chunks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from nemo_rl_like.model.attention import AttentionCall, AttentionLayout, rotary_of
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.layouts import MicroBatch
from nemo_rl_like.model.mcore import (
    GPTModel,
    ModuleSpec,
    TransformerBlockSubmodules,
    TransformerConfig,
    gather_from_sequence_parallel_region,
)
from nemo_rl_like.model.rope import rotary_amplitude, rotary_frequencies

FP8_ALIGNMENT = 16
"""FP8 matrix products take sizes that are multiples of this."""


class MegatronModel(GPTModel):
    """This rank's pipeline stage and tensor shard of the model."""

    def __init__(
        self,
        shape: ModelConfig,
        config: TransformerConfig,
        spec: ModuleSpec | TransformerBlockSubmodules,
        *,
        pre_process: bool,
        post_process: bool,
    ) -> None:
        super().__init__(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=shape.padded_vocab(config.tensor_model_parallel_size),
            max_sequence_length=shape.max_positions,
            pre_process=pre_process,
            post_process=post_process,
            parallel_output=True,
            share_embeddings_and_output_weights=shape.tie_embeddings and not shape.score_head,
            position_embedding_type="none",
        )
        if shape.score_head and post_process:
            del self.output_layer
            self.score = torch.nn.Linear(shape.hidden_size, 1, bias=False, dtype=config.params_dtype)
        if config.sequence_parallel:
            # Both would draw their dropout, of which there is none, from generators of CUDA's that nobody has seeded.
            undrawn = copy.copy(config)
            undrawn.sequence_parallel = False
            self.decoder.config = undrawn
            if pre_process:
                self.embedding.config = undrawn
        self.shape = shape
        self.dtype: torch.dtype = config.params_dtype
        self._frequencies = rotary_frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling)
        self._amplitude = rotary_amplitude(shape.rope_scaling)

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """Hidden states [M, H] that predict the micro-batch's targets; before the last stage, [s, b, H] for the next one."""
        hidden = self.run_stage(micro_batch.input_ids, micro_batch.position_ids, micro_batch.attention)
        if not self.post_process:
            return hidden
        return select_places(hidden, micro_batch.predict_index)

    def run_stage(self, input_ids: Tensor, position_ids: Tensor, layout: AttentionLayout) -> Tensor:
        """This stage's layers over tokens [b, s] -> hidden states [s, b, H], normed on the last stage; with sequence parallelism an earlier
        stage gives this rank's part of the sequence.

        A stage that is not the first reads its input from `set_input_tensor`, as Megatron's schedules do.
        """
        padding = self._padding(input_ids)
        if padding:
            input_ids, position_ids = (functional.pad(x, (0, padding)) for x in (input_ids, position_ids))
        embedded = self.embedding(input_ids=input_ids, position_ids=position_ids) if self.pre_process else None
        if self._frequencies.device != position_ids.device:
            self._frequencies = self._frequencies.to(position_ids.device)
        rotary = rotary_of(position_ids, self._frequencies, self.dtype, self._amplitude)
        hidden: Tensor = self.decoder(
            hidden_states=embedded,
            attention_mask=None,
            packed_seq_params=AttentionCall(layout, rotary, padding),
        )
        if not self.post_process:
            return hidden
        if self.config.sequence_parallel:
            # The heads' gradients are whole on every rank, so the backward only cuts them.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return hidden[:-padding] if padding else hidden

    def _padding(self, input_ids: Tensor) -> int:
        """Places to add to each row of [b, s], so that FP8 products have b * s tokens of a multiple they can take, and ranks equal parts."""
        rows, length = input_ids.shape
        step = FP8_ALIGNMENT // math.gcd(rows, FP8_ALIGNMENT) if self.config.fp8 else 1
        if self.config.sequence_parallel:
            step = math.lcm(step, self.config.tensor_model_parallel_size)
        return -length % step


@contextmanager
def whole_sequences(model: MegatronModel) -> Iterator[None]:
    """Inside the block no rank keeps a part of the sequence only: decoding moves too few tokens to share them."""
    if not model.config.sequence_parallel:
        yield
        return
    _share_sequences(model, False)
    try:
        yield
    finally:
        _share_sequences(model, True)


def _share_sequences(model: MegatronModel, on: bool) -> None:
    model.config.sequence_parallel = on
    for module in model.modules():
        for name in ("sequence_parallel", "reduce_scatter_embeddings"):
            if hasattr(module, name):
                setattr(module, name, on)


def select_places(hidden: Tensor, index: Tensor) -> Tensor:
    """[s, b, H] and flat places [M] of b * s (row-major) -> [M, H]."""
    length, rows = hidden.shape[:2]
    place = index if rows == 1 else (index % length) * rows + index // length
    return hidden.flatten(0, 1).index_select(0, place)


def hidden_states(model: MegatronModel, micro_batch: MicroBatch) -> Tensor:
    """`model(micro_batch)` with the micro-batch moved to the model's device: [M, H] on the last stage."""
    out: Tensor = model(micro_batch.to(next(model.parameters()).device, model.dtype))
    return out
