"""`PipelineStage`: neighbouring layers, as Megatron's `GPTModel` that takes a `MicroBatch`; the last ends in hidden states of the scored tokens.

The head is applied outside (`model.heads`), on scored tokens only and in chunks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from nemo_rl_like.model.attention import AttentionCall, AttentionLayout, PrefixedKeys, Rotary, rotary_of
from nemo_rl_like.model.context import ContextRanks
from nemo_rl_like.model.dropout import TokenKeys
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.layouts import MicroBatch
from nemo_rl_like.model.mcore import (
    GPTModel,
    ModuleSpec,
    MoETokenDispatcher,
    TransformerBlockSubmodules,
    TransformerConfig,
    gather_from_sequence_parallel_region,
    parallel_state,
)
from nemo_rl_like.model.rope import rotary_amplitude, rotary_frequencies
from nemo_rl_like.model.router import RouterWatch
from nemo_rl_like.model.row_places import RowPlaces

LayerSpecs: TypeAlias = ModuleSpec | TransformerBlockSubmodules


def fp8_alignment(recipe: str) -> int:
    """What sizes of FP8 matrix products are multiples of: of 16, or of the 32 values of an MXFP8 block."""
    return 32 if recipe == "mxfp8" else 16


class BeforeRows(Protocol):
    """Virtual tokens before each row; see `virtual_tokens.VirtualIds`."""

    @property
    def ids(self) -> tuple[int, ...]:
        """What stands before each row."""
        ...

    def in_vocabulary(self, ids: Tensor) -> Tensor:
        """The ids with some real token in the place of these."""
        ...

    def call(self, ids: Tensor) -> PrefixedKeys | None:
        """What a pass over this rank's ids [b, s] shows every layer."""
        ...

    def __call__(self, embedded: Tensor, ids: Tensor) -> Tensor:
        """Embeddings of ids [b, s], right at these tokens too."""
        ...


class PipelineStage(GPTModel):
    """This rank's tensor shard of neighbouring layers."""

    watch: RouterWatch | None = None
    """Of a model with experts; `MegatronModel` sets it."""
    message: int | None = None
    """Places of the messages between stages; None: as many as the pass has."""

    def __init__(
        self,
        shape: ModelConfig,
        config: TransformerConfig,
        spec: LayerSpecs,
        *,
        pre_process: bool,
        post_process: bool,
        virtual: int | None,
    ) -> None:
        """`pre_process`: it has the embedding; `post_process`: the head; `virtual`: which of this rank's stages it is, None where that is one."""
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
            vp_stage=virtual,
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
        self.virtual_tokens: BeforeRows | None = None
        self.context = ContextRanks.of_layout()
        self.shape = shape
        self.dtype: torch.dtype = config.params_dtype
        for layer in self.decoder.layers:
            layer.self_attention.scores = shape.scores(layer.layer_number - 1)
        self._frequencies = rotary_frequencies(
            shape.rotary_dim, shape.rope_theta, shape.rope_scaling, shape.max_positions
        )
        self._amplitude = rotary_amplitude(shape.rope_scaling, shape.max_positions)
        self._window_frequencies: Tensor | None = None
        if shape.window_rope_theta is not None:
            self._window_frequencies = rotary_frequencies(shape.rotary_dim, shape.window_rope_theta)

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """Hidden states [M, H] that predict the micro-batch's targets, with context parallelism those of `scored_here`; before the last
        stage, [message, 1, H] for the next one, of which the first are the pass's."""
        hidden = self._run(
            micro_batch.input_ids,
            micro_batch.position_ids,
            micro_batch.attention,
            micro_batch.row_places,
            micro_batch.token_keys,
        )
        if not self.post_process:
            return self._as_message(hidden)
        places, (_, length) = micro_batch.predict_index, micro_batch.input_ids.shape
        mine = self.scored_here(micro_batch)
        if mine is not None and self.context is not None:
            return select_places(hidden, places[mine], length, hidden.shape[0] * self.context.group.rank())
        return select_places(hidden, places, length)

    def scored_here(self, micro_batch: MicroBatch) -> Tensor | None:
        """int64 [m] the scored tokens whose hidden states this rank has; None: all of them."""
        if self.context is None:
            return None
        length = micro_batch.input_ids.shape[1]
        padded = length + self._padding(micro_batch.input_ids.shape)
        return self.context.scored_here(micro_batch.predict_index, length, padded)

    def run_stage(self, input_ids: Tensor, position_ids: Tensor, layout: AttentionLayout) -> Tensor:
        """This stage's layers over whole tokens [b, s] -> hidden states [s, b, H], normed on the last stage; with sequence parallelism an
        earlier stage gives this rank's part of the sequence.

        A stage that is not the first reads its input from `set_input_tensor`, as Megatron's schedules do.
        """
        if self.context is not None:
            raise ValueError("with context parallelism a rank has parts of sequences; use `whole_sequences`")
        hidden = self._run(input_ids, position_ids, layout)
        return hidden[: input_ids.shape[1]] if self.post_process else hidden

    def _run(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        layout: AttentionLayout,
        row_places: RowPlaces | None = None,
        token_keys: Tensor | None = None,
    ) -> Tensor:
        padding = self._padding(input_ids.shape)
        rows = None
        if self.watch is not None:
            rows = self.watch.pairs(row_places, input_ids.shape, input_ids.shape[1] + padding, self.context)
        keys = None if token_keys is None else self._keys(functional.pad(token_keys, (0, padding)))
        if padding:
            input_ids, position_ids = (functional.pad(x, (0, padding)) for x in (input_ids, position_ids))
        if self.context is not None:
            input_ids, position_ids = self.context.part(input_ids), self.context.part(position_ids)
        embedded = self._embedded(input_ids, position_ids) if self.pre_process else None
        prefixed = None if self.virtual_tokens is None else self.virtual_tokens.call(input_ids)
        if not self.pre_process and self.message is not None:
            received, places = self.decoder.input_tensor, input_ids.numel() // self._shared_by
            self.decoder.set_input_tensor(received[:places].view(-1, input_ids.shape[0], received.shape[2]))
        self.decoder.training = torch.is_grad_enabled()  # recomputes layers in training only
        rotary, window_rotary = self._rotary(position_ids)
        hidden: Tensor = self.decoder(
            hidden_states=embedded,
            attention_mask=None,
            packed_seq_params=AttentionCall(layout, rotary, window_rotary, padding, rows, self.context, keys, prefixed),
        )
        if self.post_process and self.config.sequence_parallel:
            # The heads' gradients are whole on every rank, so the backward only cuts them.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return hidden

    def _rotary(self, position_ids: Tensor) -> tuple[Rotary, Rotary | None]:
        """Cosines and sines of positions [b, s], and those of layers with a window where they differ."""
        if self._frequencies.device != position_ids.device:
            self._frequencies = self._frequencies.to(position_ids.device)
        rotary = rotary_of(position_ids, self._frequencies, self.dtype, self._amplitude)
        if self._window_frequencies is None:
            return rotary, None
        self._window_frequencies = self._window_frequencies.to(position_ids.device)
        return rotary, rotary_of(position_ids, self._window_frequencies, self.dtype)

    def _embedded(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        virtual = self.virtual_tokens
        ids = input_ids if virtual is None else virtual.in_vocabulary(input_ids)
        embedded: Tensor = self.embedding(input_ids=ids, position_ids=position_ids)
        if virtual is not None:
            embedded = virtual(embedded, input_ids)
        if self.shape.traits.scaled_embeddings:  # the factor is rounded to the embeddings' type, as in transformers
            embedded = embedded * embedded.new_tensor(math.sqrt(self.shape.hidden_size))
        if self.config.recompute_granularity is not None and torch.is_grad_enabled() and not embedded.requires_grad:
            embedded.requires_grad_()  # Megatron finds no gradients inside what it recomputes unless an input has one
        return embedded

    def _keys(self, token_keys: Tensor) -> TokenKeys:
        """Those of this rank's tokens, of all [b, s]."""
        own = (token_keys if self.context is None else self.context.part(token_keys)).t()
        if not self.config.sequence_parallel:
            return TokenKeys(own, own)
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        return TokenKeys(own, own.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()])

    def be_watched(self, watch: RouterWatch) -> None:
        """Let `watch` see what its routers choose."""
        self.watch = watch
        for layer in self.decoder.layers:
            index = layer.layer_number - 1
            if not self.shape.has_experts(index):
                continue
            watch.see(layer.mlp.router, index)
            layer.register_forward_pre_hook(partial(_show_rows, watch), with_kwargs=True)
            layer.mlp.experts.register_forward_pre_hook(partial(_forget_weights, layer.mlp.token_dispatcher))

    def _as_message(self, hidden: Tensor) -> Tensor:
        """[s, b, H] -> [message, 1, H]."""
        if self.message is None:
            return hidden
        flat = hidden.flatten(0, 1)
        return functional.pad(flat, (0, 0, 0, self.message - flat.shape[0]))[:, None]

    def places(self, shape: torch.Size) -> int:
        """Places of this rank's part of a pass over [b, s] tokens."""
        rows, length = shape
        return rows * (length + self._padding(shape)) // self.parts

    @property
    def parts(self) -> int:
        """Ranks that share a sequence between the layers."""
        return self._shared_by * (1 if self.context is None else self.context.size)

    @property
    def _shared_by(self) -> int:
        """Tensor-parallel ranks that do."""
        return int(self.config.tensor_model_parallel_size) if self.config.sequence_parallel else 1

    def _padding(self, shape: torch.Size) -> int:
        """Places to add to each row of [b, s], so that FP8 products have b * s tokens of a multiple they can take, and ranks equal parts."""
        rows, length = shape
        alignment = fp8_alignment(self.config.fp8_recipe)
        step = alignment // math.gcd(rows, alignment) if self.config.fp8 else 1
        if self.config.sequence_parallel:
            step = math.lcm(step, self.config.tensor_model_parallel_size)
        if self.context is not None:
            step *= self.context.size
        return -length % step


def _show_rows(watch: RouterWatch, layer: object, inputs: object, named: Mapping[str, Any]) -> None:
    """Forward pre-hook of a layer, which may run again in the backward pass, after other passes."""
    watch.rows = named["packed_seq_params"].rows


def _forget_weights(dispatcher: MoETokenDispatcher, experts: object, inputs: object) -> None:
    """Forward pre-hook of a layer's experts: the dispatcher would hold the router's weights to its next pass, and through their graph the
    input of a layer computed again, and its gradient. It only reads their type."""
    dispatcher.probs = dispatcher.probs.new_empty(0)


def select_places(hidden: Tensor, index: Tensor, length: int, first: int = 0) -> Tensor:
    """[s, b, H], which begins at place `first` of each row, and flat places [M] of b rows of `length` (row-major) -> [M, H]."""
    rows = hidden.shape[1]
    place = (index % length - first) * rows + index // length
    return hidden.flatten(0, 1).index_select(0, place)
