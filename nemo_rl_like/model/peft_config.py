"""PEFT's adapter_config.json of LoRA: what its adapters mean, and what no weights can hold of them. PEFT 0.21."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, FiniteFloat, PositiveInt, ValidationError

from nemo_rl_like.artifacts.errors import InputError

CONFIG, FILE = "adapter_config.json", "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
ALL_LINEAR = "all-linear"
_OTHERWISE = (
    "merge them with PEFT (`merge_and_unload`), which says whether it can, and give the merged folder as `model.path`"
)
_PLAIN_START = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base as it is."""
_REFUSED: Mapping[str, str] = {
    "bias": f'adapters with trained biases are not read, only `bias: "none"`; {_OTHERWISE}',
    "init_lora_weights": "it changed the base's weights as well; save the adapters with `path_initial_model_for_weight_conversion`, which makes plain LoRA of them",
    "alora_invocation_tokens": "these adapters work behind those tokens alone, and no weights compute as they do; train plain LoRA",
    "trainable_token_indices": f"single rows of embeddings are not read; {_OTHERWISE}",
    "lora_bias": f"biases of B are not read; {_OTHERWISE}",
    "layer_replication": f"the base has other layers than its folder says; {_OTHERWISE}",
    "use_qalora": f"QA-LoRA's pooled inputs are not read; {_OTHERWISE}",
}
"""Why, and what to do."""


class PeftConfig(BaseModel):
    """The fields that decide what a file of adapters means; `of` reads a folder's."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())

    file: Path
    r: PositiveInt
    lora_alpha: FiniteFloat
    base_model_name_or_path: str | None = None
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    rank_pattern: dict[str, PositiveInt] | None = None
    alpha_pattern: dict[str, FiniteFloat] | None = None
    target_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    modules_to_save: list[str] | None = None
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None

    @classmethod
    def of(cls, folder: Path) -> PeftConfig:
        """The configuration in `folder`. Raises InputError naming the file, the field and what to do for anything but LoRA that weights can hold."""
        raw = _read(folder)
        file = folder / CONFIG
        kind = raw.get("peft_type")
        if kind != "LORA":
            raise InputError(f"{file}: `peft_type` is {kind!r}, and only LORA can be merged into a base; {_OTHERWISE}")
        try:
            config = cls.model_validate({**raw, "file": file})
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise InputError(
                f"{file}: `{where}` is {first['input']!r}: {first['msg']}; save the adapters again"
            ) from error
        config._refuse_what_changes_the_product()
        for pattern in (*(config.rank_pattern or ()), *(config.alpha_pattern or ()), *_as_regex(config.target_modules)):
            _require_regex(file, pattern)
        return config

    def rank_of(self, module: str) -> int:
        """Rank of a module's adapter."""
        found = _pattern_value(self.rank_pattern or {}, module)
        return self.r if found is None else found

    def scale_of(self, module: str) -> float:
        """Factor of B A."""
        found = _pattern_value(self.alpha_pattern or {}, module)
        alpha = self.lora_alpha if found is None else found
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, module: str) -> bool:
        """Whether `target_modules` names the module, as PEFT reads it."""
        named = self.target_modules
        if named is None or named == ALL_LINEAR:
            return False
        if isinstance(named, str):
            return re.fullmatch(named, module) is not None
        return any(module == name or module.endswith(f".{name}") for name in named)

    @property
    def everywhere(self) -> bool:
        """Whether every module that `target_modules` names has an adapter."""
        return self.exclude_modules is None and self.layers_to_transform is None

    def _refuse_what_changes_the_product(self) -> None:
        """Raise InputError for settings that are on and that this package does not compute."""
        for name, value in (self.model_extra or {}).items():
            if name in _HARMLESS or _is_off(name, value):
                continue
            why = _REFUSED.get(name, f"this package does not know what it means for the weights; {_OTHERWISE}")
            raise InputError(f"{self.file}: `{name}` is {json.dumps(value, default=str)}: {why}")


_HARMLESS = (
    "peft_type",
    "peft_version",
    "task_type",
    "auto_mapping",
    "revision",
    "inference_mode",
    "lora_dropout",
    "layers_pattern",
    "megatron_config",
    "megatron_core",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "runtime_config",
    "qalora_group_size",
    "ensure_weight_tying",
)
"""Fields that say nothing about what a trained adapter adds, or whose effect another field tells."""


def require_folder(folder: Path, field: str) -> None:
    """Raise InputError, which starts with `field`, unless the folder has adapters as safetensors."""
    if not folder.is_dir():
        raise InputError(
            f"`{field}` is {str(folder)!r}, which is not a folder (looked in {Path.cwd()}); give a folder with {CONFIG} and {FILE}"
        )
    if (folder / CONFIG).is_file() and (folder / FILE).is_file():
        return
    below = sorted(file.parent.relative_to(folder).as_posix() for file in folder.glob(f"*/{CONFIG}"))
    if below:
        raise InputError(
            f"`{field}` is {str(folder)!r}, which holds adapters in {', '.join(below[:4])}; give {str(folder / below[0])!r}"
        )
    if (folder / _PICKLE).is_file():
        raise InputError(
            f"`{field}` is {str(folder)!r}, whose adapters are a pickle ({_PICKLE}), which is not read: it may run code; if you trust it, load it "
            "with PEFT and save it again (`save_pretrained` writes safetensors)"
        )
    lost = CONFIG if not (folder / CONFIG).is_file() else FILE
    raise InputError(
        f"`{field}` is {str(folder)!r}, which has no {lost}; give a folder that PEFT's `save_pretrained` wrote"
    )


def other_base(model: Path, adapter: Path) -> str | None:
    """What to tell where the adapters' configuration names another base than `model`; names move, so it is no error."""
    config = PeftConfig.of(adapter)
    named = config.base_model_name_or_path
    if not named or Path(named).resolve() == model.resolve():
        return None
    return (
        f"`model.path` is {str(model)!r}, and {config.file} names the base {named!r}; make sure that they are one model"
    )


def _read(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG
    if not file.is_file():
        raise InputError(f"{file} does not exist; give a folder that PEFT's `save_pretrained` wrote")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{file} is not valid JSON: {error}; save the adapters again") from error
    if not isinstance(raw, dict):
        raise InputError(f"{file} holds no object; save the adapters again")
    return raw


def _is_off(name: str, value: object) -> bool:
    if name == "init_lora_weights":
        return any(value is one or value == one for one in _PLAIN_START)
    return value in (None, False, "none") or value == {} or value == []


def _as_regex(targets: list[str] | str | None) -> tuple[str, ...]:
    return (targets,) if isinstance(targets, str) else ()


def _require_regex(file: Path, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise InputError(f"{file}: the pattern {pattern!r} is no regular expression: {error}") from error


def _pattern_value(patterns: Mapping[str, Any], module: str) -> Any:
    """That of the first pattern at the end of the module's name, as PEFT's `get_pattern_key`."""
    return next((v for p, v in patterns.items() if re.match(rf"(.*\.)?({p})$", module)), None)
