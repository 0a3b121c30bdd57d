"""How vLLM's workers load a folder whose weights are merged as they are read: `load_format: nrl_merged`.

Imported by `vllm_worker`, which each worker imports before it loads a model. vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from nemo_rl_like.generation.vllm_report import MERGED_FORMAT
from nemo_rl_like.model.merged_reader import open_weights


@register_model_loader(MERGED_FORMAT)
class MergedLoader(DefaultModelLoader):
    """vLLM's own loader, fed with merged tensors, one at a time."""

    def get_all_weights(
        self, model_config: ModelConfig, model: torch.nn.Module
    ) -> Generator[tuple[str, Tensor], None, None]:
        """See `DefaultModelLoader`."""
        with open_weights(model_config.model) as weights:
            for name in weights.keys():
                yield name, weights.get(name)

    def download_model(self, model_config: ModelConfig) -> None:
        """See `DefaultModelLoader`: the files are here."""
