"""`nrl layout`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Literal

import typer
from pydantic import ValidationError

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.artifacts.hashing import JSON
from nemo_rl_like.model.known_shapes import shape_of
from nemo_rl_like.model.layout_plan import GIB, RESERVED, NoLayout, Planned, Question, named, plan
from nemo_rl_like.spec.policy import RecomputeSpec

_SHOWN = 8
"""Layouts of the table; --json has all."""
_WIDTH = 5
"""Least characters of a column."""
_PLANNED = "planned by arithmetic, not run"


def question(
    model: str,
    gpus: int,
    gpu_memory: float,
    gpus_per_node: int,
    micro_batch_tokens: int,
    step_tokens: int,
    recompute: str,
    offload_optimizer: bool,
) -> Question:
    """What the command line asks. Raises InputError."""
    again = recompute_of(recompute)
    sizes = (gpus, gpu_memory, gpus_per_node, micro_batch_tokens, step_tokens)
    return Question(shape_of(model), *sizes, again, offload_optimizer)


def recompute_of(text: str) -> RecomputeSpec | Literal["auto"] | None:
    """What --recompute asks for. Raises InputError."""
    if text == "auto":
        return "auto"
    if text == "none":
        return None
    kind, _, layers = text.partition(":")
    fields: dict[str, JSON] = {"kind": "selective", "modules": text.split(",")}
    if kind == "full":
        fields = {"layers": layers} if layers else {}
    try:
        return RecomputeSpec.model_validate(fields)
    except ValidationError as error:
        raise InputError(
            f"--recompute is {text!r}; use auto, none, full, full:N with N layers, or modules of core_attn,mlp,moe"
        ) from error


def layout(model: str, question: Question, asked: Mapping[str, int], *, as_json: bool) -> bool:
    """Print the layouts that fit, best first; true if there are any."""
    try:
        found = plan(question, asked)
    except NoLayout as error:
        if not as_json:
            raise
        nearest = [_as_json(planned) for planned in error.nearest]
        typer.echo(json.dumps({"ok": False, "problem": error.problem, "nearest": nearest}, indent=1))
        return False
    if as_json:
        typer.echo(json.dumps({**_header(model, question), "layouts": [_as_json(p) for p in found]}, indent=1))
    else:
        _print(model, question, found)
    return True


def _header(model: str, question: Question) -> dict[str, JSON]:
    return {
        "ok": True,
        "note": _PLANNED,
        "model": model,
        "gpus": question.gpus,
        "gpus_per_node": question.gpus_per_node,
        "gpu_bytes": int(question.gpu_gib * GIB),
        "usable_bytes": question.usable,
        "micro_batch_tokens": question.micro_batch_tokens,
        "step_tokens": question.step_tokens,
    }


def _as_json(planned: Planned) -> dict[str, JSON]:
    return {
        "layout": planned.layout.model_dump(),
        "recompute": None if planned.recompute is None else planned.recompute.model_dump(mode="json"),
        "bytes": {**planned.memory.parts, "total": planned.memory.total},
        "host_bytes": planned.memory.host,
        "pipeline_rank": planned.memory.rank,
        "micro_batches": planned.micro_batches,
        "bubble": round(planned.bubble, 4),
        "reasons": list(planned.reasons),
    }


def _print(model: str, question: Question, found: Sequence[Planned]) -> None:
    typer.echo(
        f"{model} on {question.gpus} GPUs of {question.gpu_gib:g} GiB, {question.gpus_per_node} a node: {_PLANNED}.\n"
        f"bfloat16, Adam, {question.micro_batch_tokens} tokens a micro-batch, {question.step_tokens} an update; "
        f"{RESERVED:.0%} of the memory is left alone.\n"
        "GiB of the fullest rank; the least tp * cp * pp first, for it communicates least.\n"
    )
    if question.recompute == "auto" and found[0].recompute is not None:
        typer.echo(
            "None fits unless activations are computed again: each computes the fewest layers again with which it fits,\n"
            "and the smallest share of layers comes first.\n"
        )
    columns = [*_sizes(found[0]), "peak", *found[0].memory.parts]
    typer.echo("".join(f"{name:>{max(_WIDTH, len(name) + 2)}}" for name in columns) + "  why")
    for planned in found[:_SHOWN]:
        typer.echo(_line(planned))
    if len(found) > _SHOWN:
        typer.echo(f"and {len(found) - _SHOWN} more (--json)")
    further = "" if found[0].recompute is None else f", recompute: {_spec_of(found[0].recompute)}"
    further += ", offload: {optimizer: true}" if question.offload_optimizer else ""
    typer.echo(
        f"\npolicy: {{layout: {named(found[0].layout)}, micro_batch_tokens: {question.micro_batch_tokens}{further}}}"
    )


def _spec_of(recompute: RecomputeSpec) -> str:
    """As a spec writes it."""
    if recompute.kind == "selective":
        return f"{{kind: selective, modules: [{', '.join(recompute.modules)}]}}"
    return "{kind: full}" if recompute.layers is None else f"{{layers: {recompute.layers}}}"


def _line(planned: Planned) -> str:
    memory = planned.memory
    gib = {name: f"{size / GIB:.1f}" for name, size in {"peak": memory.total, **memory.parts}.items()}
    values = {**_sizes(planned), **gib}
    cells = "".join(f"{value:>{max(_WIDTH, len(name) + 2)}}" for name, value in values.items())
    return f"{cells}  {', '.join(planned.reasons)}"


def _sizes(planned: Planned) -> dict[str, str]:
    """The layout's columns; a dense model has none for experts."""
    spec = planned.layout
    sizes = {"tp": spec.tp, "cp": spec.cp, "pp": spec.pp, "vpp": spec.vpp, "dp": spec.dp}
    if planned.question.config.experts is not None:
        sizes |= {"ep": spec.ep, "etp": spec.expert_tp}
    return {**{name: str(size) for name, size in sizes.items()}, "sp": "yes" if spec.sp else "no"}
