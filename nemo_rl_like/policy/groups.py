"""What each parameter is trained with: the optimizer's numbers, the spec's groups, and the rule that norms and biases do not decay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

from nemo_rl_like.artifacts.errors import SpecError
from nemo_rl_like.model.weight_entries import Entry
from nemo_rl_like.spec.optimizer import MuonOptimizer, OptimizerSpec, ParameterGroup

_ROUTER = "mlp.router."
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Settings:
    """The numbers of one parameter."""

    lr: float
    """Peak learning rate."""
    min_lr: float
    """Learning rate at the end of the schedule."""
    weight_decay: float
    muon: bool
    """Whether Muon moves it, not AdamW or SGD."""


def settings_of(spec: OptimizerSpec, entries: Sequence[Entry]) -> dict[Entry, Settings]:
    """The settings of every parameter of the model.

    Raises SpecError for a group that no parameter belongs to, and for one that holds a part of what Megatron keeps as one tensor.
    """
    names = [name for entry in entries for name in entry.hf]
    groups = _groups_of(spec.groups, names)
    found = {}
    for entry in entries:
        usual = _usual(spec, entry)
        each = {name: _in_group(usual, groups.get(name)) for name in entry.hf}
        if len(set(each.values())) > 1:
            raise SpecError(
                f"`optimizer.groups` give {', '.join(entry.hf)} different numbers, but they are trained as one tensor; let a `match` cover all "
                "of them, or none"
            )
        found[entry] = each[entry.hf[0]]
    return found


def is_hidden_matrix(entry: Entry) -> bool:
    """Whether Muon orthogonalises the parameter: a matrix of a layer with several rows, but not a router, whose rows are choices, nor all
    experts in one tensor."""
    shape, other = entry.shapes[0], entry.names[0].startswith(_ROUTER) or entry.packing == "experts"
    return entry.layer is not None and len(shape) == 2 and shape[0] > 1 and not other


def _usual(spec: OptimizerSpec, entry: Entry) -> Settings:
    """The settings of a parameter that is in no group."""
    muon = isinstance(spec, MuonOptimizer) and is_hidden_matrix(entry)
    lr, weight_decay = spec.lr, spec.weight_decay
    if isinstance(spec, MuonOptimizer) and not muon:
        lr = spec.lr if spec.adamw.lr is None else spec.adamw.lr
        weight_decay = spec.weight_decay if spec.adamw.weight_decay is None else spec.adamw.weight_decay
    return Settings(lr, spec.min_lr * (lr / spec.lr), 0.0 if entry.is_vector else weight_decay, muon)


def _in_group(usual: Settings, group: ParameterGroup | None) -> Settings:
    if group is None:
        return usual
    weight_decay = usual.weight_decay if group.weight_decay is None else group.weight_decay
    scale = group.lr_scale
    return replace(usual, lr=usual.lr * scale, min_lr=usual.min_lr * scale, weight_decay=weight_decay)


def _groups_of(groups: Sequence[ParameterGroup], names: Sequence[str]) -> Mapping[str, ParameterGroup]:
    """The first group that matches each name; names without one are left out."""
    found: dict[str, ParameterGroup] = {}
    for index, group in enumerate(groups):
        matched = [name for name in names if fnmatchcase(name, group.match)]
        field = f"`optimizer.groups[{index}].match` is {group.match!r}"
        if not matched:
            close = get_close_matches(group.match, names, n=_SHOWN, cutoff=0.0)
            raise SpecError(
                f"{field}, which matches no parameter; the {len(names)} names are those of Hugging Face, for example {', '.join(close)}"
            )
        left = [name for name in matched if name not in found]
        if not left:
            raise SpecError(f"{field}, and all that it matches is in groups before it; move it up, or leave it out")
        found |= dict.fromkeys(left, group)
    return found
