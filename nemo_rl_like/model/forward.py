"""`MegatronModel`: the pipeline stages that this rank has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from nemo_rl_like.model.context import ContextRanks
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.layouts import MicroBatch
from nemo_rl_like.model.mcore import (
    MoELayer,
    TransformerConfig,
    TransformerLayer,
    parallel_state,
)
from nemo_rl_like.model.pipeline_stage import BeforeRows, LayerSpecs, PipelineStage
from nemo_rl_like.model.router import RouterWatch


class MegatronModel(nn.Module):
    """This rank's part of the model: a pipeline stage, or with an interleaved pipeline several, `layout.pp` apart from each other."""

    def __init__(self, shape: ModelConfig, config: TransformerConfig, specs: Sequence[LayerSpecs]) -> None:
        """`specs`: the layers of each of this rank's stages."""
        super().__init__()
        last = len(specs) - 1
        self.stages = tuple(
            PipelineStage(
                shape,
                config,
                spec,
                pre_process=i == 0 and parallel_state.is_pipeline_first_stage(),
                post_process=i == last and parallel_state.is_pipeline_last_stage(),
                virtual=i if last else None,
            )
            for i, spec in enumerate(specs)
        )
        self.pipeline = nn.ModuleList(self.stages)
        self.config, self.shape = config, shape
        self.dtype: torch.dtype = config.params_dtype
        self.watch: RouterWatch | None = None
        if shape.experts is not None:
            self.watch = RouterWatch(config, shape)
            for stage in self.stages:
                stage.be_watched(self.watch)

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """See `PipelineStage.forward`. Raises ValueError if the model's stages are on several ranks, or more than one."""
        if not (self.has_embedding and self.has_head) or len(self.stages) > 1:
            raise ValueError("a model of several pipeline stages runs by Megatron's schedules")
        hidden: Tensor = self.stages[0](micro_batch)
        return hidden

    @property
    def has_embedding(self) -> bool:
        """Whether the pipeline begins here."""
        return bool(self.first.pre_process)

    @property
    def has_head(self) -> bool:
        """Whether the pipeline ends here."""
        return bool(self.last.post_process)

    @property
    def first(self) -> PipelineStage:
        """The earliest of its stages."""
        return self.stages[0]

    @property
    def last(self) -> PipelineStage:
        """The latest of its stages."""
        return self.stages[-1]

    @property
    def layers(self) -> Iterator[TransformerLayer]:
        """All layers of this rank."""
        for stage in self.stages:
            yield from stage.decoder.layers

    @property
    def virtual_tokens(self) -> BeforeRows | None:
        """What stands before each row; None: nothing does."""
        return self.first.virtual_tokens

    def put_before_rows(self, tokens: BeforeRows) -> None:
        """Have virtual tokens from now on."""
        for stage in self.stages:
            stage.virtual_tokens = tokens

    @property
    def context(self) -> ContextRanks | None:
        """Ranks that have the other parts of this one's sequences; None: it has whole ones."""
        return self.first.context

    @context.setter
    def context(self, context: ContextRanks | None) -> None:
        for stage in self.stages:
            stage.context = context

    @contextmanager
    def messages_of(self, places: int) -> Iterator[None]:
        """Inside the block stages of a pipeline hand on so many places of each pass, and take as many."""
        for stage in self.stages:
            stage.message = places
        try:
            yield
        finally:
            for stage in self.stages:
                stage.message = None

    def scored_here(self, micro_batch: MicroBatch) -> Tensor | None:
        """See `PipelineStage.scored_here`."""
        return self.first.scored_here(micro_batch)


@contextmanager
def whole_sequences(model: MegatronModel) -> Iterator[None]:
    """Inside the block no rank keeps a part of the sequence only: decoding moves too few tokens to share them."""
    shared, context = model.config.sequence_parallel, model.context
    model.context = None
    if shared:
        _share_sequences(model, False)
    try:
        yield
    finally:
        model.context = context
        if shared:
            _share_sequences(model, True)


def _share_sequences(model: MegatronModel, on: bool) -> None:
    model.config.sequence_parallel = on
    for module in model.modules():
        for name in ("sequence_parallel", "reduce_scatter_embeddings"):
            if hasattr(module, name):
                setattr(module, name, on)
        if isinstance(module, MoELayer):
            module.training = on  # Megatron refuses whole sequences on tensor-parallel ranks in training only


def hidden_states(model: MegatronModel, micro_batch: MicroBatch) -> Tensor:
    """`model(micro_batch)` with the micro-batch moved to the model's device: [M, H] on the last stage."""
    out: Tensor = model(micro_batch.to(next(model.parameters()).device, model.dtype))
    return out
