"""A frozen model whose weights lie in host memory, and on the device for its passes alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nemo_rl_like.model import runtime


class HostWeights:
    """Moves a model's parameters to host memory, where they may be read and written; no pass may run outside `on_device`."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._host = [runtime.host_empty(parameter).copy_(parameter.data) for parameter in self._parameters]
        self._leave()

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory."""
        return sum(tensor.nbytes for tensor in self._host)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Inside the block the parameters are copies on the device, which must not be written to.

        The copies run on the stream that the passes run on, so that no pass starts before its weights are there.
        """
        for parameter, host in zip(self._parameters, self._host, strict=True):
            parameter.data = torch.empty_like(host, device=runtime.device()).copy_(host, non_blocking=True)
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        for parameter, host in zip(self._parameters, self._host, strict=True):
            parameter.data = host
