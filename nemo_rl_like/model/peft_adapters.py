"""The adapters of a PEFT folder, by the tensors of a base that they change; all is checked by headers, before a tensor is read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.hf_io import SafetensorsReader, TensorReader, some
from nemo_rl_like.model.outline import Outline
from nemo_rl_like.model.peft_config import FILE, PeftConfig
from nemo_rl_like.model.weight_entries import HEAD

PREFIX = "base_model.model."
"""Before every name of PEFT's files."""
_WEIGHT, _BASE_LAYER, _EXPERTS = ".weight", ".base_layer", ".experts"
_ROLES = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_embedding_A": "a",
    ".lora_embedding_B": "b",
    ".lora_magnitude_vector": "lengths",
    ".lora_magnitude_vector.weight": "lengths",
}
_STACKED = ("gate_up_proj", "down_proj")
"""Parameters of a layer's experts, in the order in which PEFT wraps them."""
_APART = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}
"""Names that files have for the matrices of an expert, which transformers joins in memory."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to one tensor: scale B A, or of a model with experts those of one or all of them."""

    a: str
    """Key of A [rank, in]; of experts that PEFT has as one parameter [experts * rank, in]."""
    b: str
    """Key of B [out, rank]; of such experts [out, rank * experts]."""
    rank: int
    scale: float
    lengths: str | None = None
    """Key of DoRA's row lengths [out]."""
    transposed: bool = False
    """The base holds [in, out]."""
    experts: int = 0
    """Experts in A and B; 0: they are of one matrix."""
    expert: int | None = None
    """The one of them that this tensor is of; None: the base holds all in one tensor [experts, in, out]."""
    rows: tuple[int, int] | None = None
    """First and last row of the product that this tensor has; None: all."""


@dataclass(slots=True)
class _Found:
    """The keys of one adapted module."""

    keys: dict[str, str] = field(default_factory=dict)
    embedding: bool = False


class PeftAdapters:
    """LoRA adapters, and whole tensors beside them, that PEFT's `save_pretrained` wrote.

    Raises InputError naming file, key, value and fix for what cannot be read. Close it, or the reader that owns it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / FILE
        self.config = PeftConfig.of(folder)
        self._reader = SafetensorsReader(folder, single=FILE)
        self.modules: dict[str, _Found] = {}
        self.whole: dict[str, str] = {}
        """Key of each tensor that stands in the place of the base's, by that one's name."""
        self._tied = False
        for key in self._reader.keys():
            self._sort_in(key)
        if not self.modules and not self.whole:
            raise InputError(f"{self.file} holds no tensor; save the adapters again")
        for module in self.config.modules_to_save or ():
            if not any(f".{module}." in f".{name}" for name in self.whole):
                raise InputError(
                    f"{self.config.file}: `modules_to_save` has {module!r}, of which {FILE} has no tensor; save the adapters again"
                )

    def close(self) -> None:
        """Unmap the file."""
        self._reader.close()

    def get(self, key: str) -> Tensor:
        """A tensor of the file."""
        return self._reader.get(key)

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of a tensor of the file."""
        return self._reader.shape(key)

    def over(self, base: TensorReader, outline: Outline) -> dict[str, LowRank]:
        """The adapters by the tensor of `base` that each changes. Raises InputError for one that does not fit it, and for what is missing."""
        names = set(base.keys())
        if outline.tie_embeddings:
            self._drop_tied_head(outline)
        self._check_whole(base, names)
        found: dict[str, LowRank] = {}
        lost = []
        for module, keys in self.modules.items():
            mine = dict(self._of_module(module, keys, base, names))
            lost += [] if mine else [keys.keys["a"]]
            found |= mine
        if lost:
            raise InputError(
                f"{self.file}: {len(lost)} of {len(self.modules)} adapters belong to no tensor of {_folder_of(base)}: {some(lost, 3)}; give the base that "
                f"they were trained over ({_named(self.config)})"
            )
        self._check_complete(base, names, found)
        if outline.tie_embeddings:
            self._check_tie(base, outline, found)
        return found

    def _drop_tied_head(self, outline: Outline) -> None:
        """A whole head that is its embedding's equal is that one's copy (`ensure_weight_tying`)."""
        head = self.whole.get(HEAD)
        if head is None or HEAD.removesuffix(_WEIGHT) in self.modules:
            return
        shape = (outline.vocab_size, outline.hidden_size)
        others = [k for n, k in self.whole.items() if n != HEAD and self.shape(k) == shape]
        if others and torch.equal(self.get(head), self.get(others[0])):
            del self.whole[HEAD]
            self._tied = True

    def _check_tie(self, base: TensorReader, outline: Outline, found: Mapping[str, LowRank]) -> None:
        """Raise InputError for adapters of an embedding that is the output head too: PEFT changes one of the two."""
        shape = (outline.vocab_size, outline.hidden_size)
        changed = sorted(name for name in (*found, *self.whole) if base.shape(name) == shape)
        if changed and not (self._tied and changed[0] not in found):
            key = self.whole.get(changed[0]) or found[changed[0]].a
            raise InputError(
                f"{self.file}: {key!r} changes the embedding alone, and the output head of {_folder_of(base)} is tied to it (`tie_word_embeddings: true`); save the "
                "base with `tie_word_embeddings: false` and a head of its own, or train with `ensure_weight_tying` and `modules_to_save`"
            )

    def _sort_in(self, key: str) -> None:
        if not key.startswith(PREFIX):
            raise InputError(
                f"{self.file}: the key {key!r} does not begin with {PREFIX!r}; save the adapters of a `PeftModel`"
            )
        name = key.removeprefix(PREFIX)
        for ending, role in _ROLES.items():
            if name.endswith(ending):
                found = self.modules.setdefault(name.removesuffix(ending), _Found())
                found.keys[role] = key
                found.embedding |= "embedding" in ending
                return
        if ".lora_" in name or ".token_adapter." in name:
            raise InputError(
                f"{self.file}: the key {key!r} is of a kind of adapter that cannot be merged; train plain LoRA"
            )
        self.whole[name.replace(f"{_BASE_LAYER}.", ".")] = key

    def _check_whole(self, base: TensorReader, names: set[str]) -> None:
        for name, key in self.whole.items():
            if name not in names:
                raise InputError(
                    f"{self.file}: {key!r} is to take the place of {name!r}, which {_folder_of(base)} does not have; give the base that it was trained with "
                    f"({_named(self.config)}). If its output head is tied to its embedding, save the base with `tie_word_embeddings: false` first"
                )
            if self.shape(key) != base.shape(name):
                raise InputError(
                    f"{self.file}: {key!r} has shape {list(self.shape(key))}, and {name!r} of {_folder_of(base)} {list(base.shape(name))}; give a base of the "
                    "same vocabulary (`resize_token_embeddings`, then `save_pretrained`)"
                )

    def _of_module(
        self, module: str, found: _Found, base: TensorReader, names: set[str]
    ) -> Iterator[tuple[str, LowRank]]:
        """What the adapter of one module changes; nothing, if the base has no such module."""
        lost = sorted({"a", "b"} - found.keys.keys())
        if lost:
            there = next(iter(found.keys.values()))
            raise InputError(f"{self.file} has {there!r} without its lora_{lost[0].upper()}; save the adapters again")
        parameter = self.parameter_of(module)
        if parameter is None:
            if f"{module}{_WEIGHT}" in names:
                yield f"{module}{_WEIGHT}", self._of_matrix(module, found, base)
        elif f"{parameter}" in names:
            yield parameter, self._of_stacked(parameter, found, base)
        else:
            yield from self._of_apart(parameter, found, base, names)

    def _of_matrix(self, module: str, found: _Found, base: TensorReader) -> LowRank:
        shape = base.shape(f"{module}{_WEIGHT}")
        made = self._low_rank(module, found, 1)
        outputs, inputs = self.shape(made.b)[0], self.shape(made.a)[1]
        if found.embedding:
            outputs, inputs = inputs, outputs
        straight, crossed = shape == (outputs, inputs), shape == (inputs, outputs)
        if not straight and not crossed:
            raise self._misfit(made, f"{module}{_WEIGHT}", shape)
        transposed = not found.embedding and crossed and (self.config.fan_in_fan_out or not straight)
        return replace(made, transposed=transposed or found.embedding)

    def _of_stacked(self, parameter: str, found: _Found, base: TensorReader) -> LowRank:
        """All experts of a layer in one tensor [experts, in, out]."""
        shape = base.shape(parameter)
        made = self._low_rank(parameter, found, shape[0])
        if (self.shape(made.a)[1], self.shape(made.b)[0]) != shape[1:]:
            raise self._misfit(made, parameter, shape)
        return replace(made, transposed=True, experts=shape[0])

    def _of_apart(
        self, parameter: str, found: _Found, base: TensorReader, names: set[str]
    ) -> Iterator[tuple[str, LowRank]]:
        """Experts whose matrices are apart in files and joined in memory: gate above up."""
        layer, _, name = parameter.partition(".mlp.experts.")
        for parts in _APART.get(name, ()):
            pattern = re.compile(
                re.escape(layer) + r"\.\w+\.experts\.(\d+)\." + re.escape(parts[0]) + re.escape(_WEIGHT)
            )
            first = {int(m[1]): m[0] for m in map(pattern.fullmatch, names) if m is not None}
            if not first:
                continue
            made = self._low_rank(parameter, found, len(first))
            for expert, one in first.items():
                start = 0
                for part in parts:
                    tensor = one.removesuffix(f"{parts[0]}{_WEIGHT}") + f"{part}{_WEIGHT}"
                    rows, inputs = base.shape(tensor)
                    if inputs != self.shape(made.a)[1] or start + rows > self.shape(made.b)[0]:
                        raise self._misfit(made, tensor, (rows, inputs))
                    yield tensor, replace(made, experts=len(first), expert=expert, rows=(start, start + rows))
                    start += rows

    def _low_rank(self, module: str, found: _Found, experts: int) -> LowRank:
        """The pair of a module. Raises InputError for another rank than the configuration's."""
        a, b = found.keys["a"], found.keys["b"]
        rank = self.config.rank_of(module)
        for key, axis in ((a, 0), (b, 1)):
            shape = self.shape(key)
            if len(shape) != 2 or shape[axis] != rank * experts:
                raise InputError(
                    f"{self.file}: {key!r} has shape {list(shape)}, and {self.config.file.name} a rank of {rank} there (`r`, `rank_pattern`)"
                    + (f", for each of {experts} experts" if experts > 1 else "")
                    + "; save the adapters again, with their own configuration"
                )
        return LowRank(a, b, rank, self.config.scale_of(module), self._lengths(found))

    def _lengths(self, found: _Found) -> str | None:
        """Key of DoRA's row lengths. Raises InputError where they and the configuration differ."""
        key = found.keys.get("lengths")
        if self.config.use_dora != (key is not None):
            raise InputError(
                f"{self.config.file}: `use_dora` is {str(self.config.use_dora).lower()}, and {self.file.name} has {'a' if key else 'no'} lora_magnitude_vector beside "
                f"{found.keys['a']!r}; save the adapters again, with their own configuration"
            )
        if key is None:
            return None
        if found.embedding or self.shape(key) != (self.shape(found.keys["b"])[0],):
            what = "is of an embedding" if found.embedding else f"has shape {list(self.shape(key))}"
            raise InputError(f"{self.file}: {key!r} {what}, which is not read; train without `use_dora` there")
        return key

    def parameter_of(self, module: str) -> str | None:
        """The parameter of experts that PEFT adapts as such (`target_parameters`); None: the module's weight.

        PEFT wraps one after the other around the module, so `.base_layer` tells which it is.
        """
        bare = module
        while bare.endswith(_BASE_LAYER):
            bare = bare.removesuffix(_BASE_LAYER)
        if not bare.endswith(_EXPERTS):
            return None
        asked = self.config.target_parameters or ()
        here = [name for name in _STACKED if any(one == name or one.endswith(f".{name}") for one in asked)]
        inside = (len(module) - len(bare)) // len(_BASE_LAYER)
        if inside >= len(here):
            raise InputError(
                f"{self.config.file}: `target_parameters` is {list(asked)}, and {self.file.name} has adapters of {PREFIX}{module}; of experts only "
                f"{' and '.join(_STACKED)} are read"
            )
        return f"{bare}.{here[len(here) - 1 - inside]}"

    def _misfit(self, made: LowRank, name: str, shape: Sequence[int]) -> InputError:
        pair = f"{list(self.shape(made.a))} and {list(self.shape(made.b))}"
        return InputError(
            f"{self.file}: {made.a!r} and its lora_B have shapes {pair}, which do not fit {name!r} of the base, {list(shape)}; give the base that they were "
            f"trained over ({_named(self.config)})"
        )

    def _check_complete(self, base: TensorReader, names: set[str], found: Mapping[str, LowRank]) -> None:
        """Raise InputError for a matrix that `target_modules` names and the file has no adapter of: a save that was cut off."""
        if not self.config.everywhere:
            return
        modules = (
            name.removesuffix(_WEIGHT)
            for name in sorted(names)
            if name.endswith(_WEIGHT) and f"{_EXPERTS}." not in name
        )
        lost = [
            module
            for module in modules
            if f"{module}{_WEIGHT}" not in found
            and self.config.targets(module)
            and len(base.shape(f"{module}{_WEIGHT}")) == 2
        ]
        if lost:
            raise InputError(
                f"{self.file} has no adapters of {some(lost, 3)}, which `target_modules` of {self.config.file.name} names; save the adapters again, or give the "
                f"base that they were trained over ({_named(self.config)})"
            )


def _folder_of(base: TensorReader) -> str:
    keys = base.keys()
    return str(Path(base.source(keys[0])).parent) if keys else "the base"


def _named(config: PeftConfig) -> str:
    base = config.base_model_name_or_path
    return f"{config.file.name} names {base!r}" if base else f"{config.file.name} names none"
