"""Adapters of a PEFT folder that training goes on from: checked against `policy.lora`, and read under the names of `AdapterMap`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.hf_config import FFN_PROJECTIONS, ModelConfig
from nemo_rl_like.model.hf_io import some
from nemo_rl_like.model.lora_map import AdapterMap, hf_projection, is_stacked
from nemo_rl_like.model.peft_adapters import PREFIX, PeftAdapters
from nemo_rl_like.model.peft_config import require_folder
from nemo_rl_like.spec.policy import LoraSpec

FIELD = "policy.lora.path"
_PARTS = {"a": ".lora_A.weight", "b": ".lora_B.weight", "lengths": ".lora_magnitude_vector"}


class StartAdapters:
    """A `TensorReader` of the folder `policy.lora.path`, whose adapters are all that `policy.lora` asks for and no more.

    Raises InputError with the spec's value and the folder's where they differ; reads headers alone. Close it, or use `check_start`.
    """

    def __init__(self, config: ModelConfig, lora: LoraSpec, folder: Path) -> None:
        self._config, self._lora = config, lora
        self._adapters = PeftAdapters(folder)
        self._check_settings()
        self._key_of = dict(self._named())
        self._shapes = AdapterMap(config, lora).hf_shapes()
        self._check_targets()

    def close(self) -> None:
        """Unmap the file."""
        self._adapters.close()

    def keys(self) -> Sequence[str]:
        """Every tensor's name, sorted."""
        return sorted(self._key_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of `name`."""
        return tuple(self.get(name).shape) if self._is_stacked(name) else self._adapters.shape(self._key_of[name])

    def get(self, name: str) -> Tensor:
        """The tensor; of experts that lie in one [experts, rank, in] or [experts, out, rank]."""
        tensor = self._adapters.get(self._key_of[name])
        if not self._is_stacked(name):
            return tensor
        count = self._shapes[name][0]
        if name.endswith(_PARTS["a"]):
            return tensor.unflatten(0, (count, -1))
        return tensor.unflatten(1, (-1, count)).permute(2, 0, 1)

    def source(self, name: str) -> str:
        """The file."""
        return str(self._adapters.file)

    def _is_stacked(self, name: str) -> bool:
        return len(self._shapes[name]) == 3

    def _named(self) -> Iterator[tuple[str, str]]:
        """Names of `AdapterMap`, and the file's."""
        for module, found in self._adapters.modules.items():
            parameter = self._adapters.parameter_of(module)
            if parameter is not None and not is_stacked(self._config):
                raise InputError(
                    f"{self._adapters.file}: {PREFIX}{module} has the adapters of a layer's experts as one, as PEFT joins them, and `policy.lora` has one for each "
                    f"matrix of an expert; merge them (`model.adapter`) and train new ones, leaving `{FIELD}` out"
                )
            for role, key in found.keys.items():
                yield f"{PREFIX}{parameter or module}{_PARTS[role]}", key

    def _check_settings(self) -> None:
        """Raise InputError where rank, scale or kind of an adapter is another than the spec's."""
        given, lora = self._adapters.config, self._lora
        if self._adapters.whole:
            key = next(iter(self._adapters.whole.values()))
            raise InputError(
                f"{self._adapters.file}: {key!r} is a whole tensor beside the adapters (`modules_to_save`), and `policy.lora` trains adapters alone; merge all of "
                f"it (`model.adapter`) and train new ones, leaving `{FIELD}` out"
            )
        if given.use_dora != lora.dora:
            raise self._differs("dora", lora.dora, "use_dora", given.use_dora)
        for module in self._adapters.modules:
            rank, scale = given.rank_of(module), given.scale_of(module)
            if rank != lora.rank:
                raise self._differs("rank", lora.rank, f"the rank of {module}", rank)
            if not math.isclose(scale, lora.scale, rel_tol=1e-6):
                alpha = scale * (math.sqrt(rank) if lora.rslora else rank)
                ours = f"{lora.alpha:g}` with `rslora: {str(lora.rslora).lower()}"
                raise self._differs("alpha", ours, f"that of {module}", f"{alpha:g}", f"alpha: {alpha:g}")

    def _differs(self, field: str, ours: object, what: str, theirs: object, fix: str = "") -> InputError:
        said = str(theirs).lower() if isinstance(theirs, bool) else theirs
        mine = str(ours).lower() if isinstance(ours, bool) else ours
        return InputError(
            f"`policy.lora.{field}` is `{mine}`, and in {self._adapters.folder}, which `{FIELD}` goes on from, {what} is {said}; set `{fix or f'{field}: {said}'}`"
        )

    def _check_targets(self) -> None:
        """Raise InputError unless the folder has the adapters that the spec asks for, and no others."""
        lost, more = sorted(self._shapes.keys() - self._key_of), sorted(self._key_of.keys() - self._shapes)
        names = {hf_projection(self._config, name): name for name in FFN_PROJECTIONS}
        last = {(self._adapters.parameter_of(module) or module).rpartition(".")[2] for module in self._adapters.modules}
        found = sorted(names.get(name, name) for name in last)
        if set(found) != set(self._lora.targets):
            raise InputError(
                f"`policy.lora.targets` is [{', '.join(self._lora.targets)}], and {self._adapters.folder}, which `{FIELD}` goes on from, has adapters of "
                f"[{', '.join(found)}]; set the same, if this model can have them"
            )
        if lost or more:
            what = (
                f"lacks {some(lost, 3)}"
                if lost
                else f"has {some(more, 3)}, without a place in this {self._config.family} model"
            )
            raise InputError(
                f"{self._adapters.file}, which `{FIELD}` goes on from, {what}; every layer needs the adapters of `policy.lora.targets`"
            )
        for name, shape in self._shapes.items():
            if self.shape(name) != shape:
                raise InputError(
                    f"{self._adapters.file}: {self._key_of[name]!r} has shape {list(self._adapters.shape(self._key_of[name]))}, which does not fit this "
                    f"{self._config.family} model ({list(shape)}); give the base that the adapters were trained over as `model.path`"
                )


def check_start(config: ModelConfig, lora: LoraSpec) -> None:
    """The folder that training goes on from, if there is one, has the adapters of `policy.lora`. Raises InputError."""
    if lora.path is not None:
        require_folder(Path(lora.path), FIELD)
        StartAdapters(config, lora, Path(lora.path)).close()
