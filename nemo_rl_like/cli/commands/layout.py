"""`nrl layout`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import typer

from nemo_rl_like.artifacts.hashing import JSON
from nemo_rl_like.model.known_shapes import shape_of
from nemo_rl_like.model.layout_plan import GIB, RESERVED, NoLayout, Planned, Question, named, plan

_SHOWN = 8
"""Layouts of the table; --json has all."""
_WIDTH = 5
"""Least characters of a column."""
_PLANNED = "planned by arithmetic, not run"


def question(
    model: str, gpus: int, gpu_memory: float, gpus_per_node: int, micro_batch_tokens: int, step_tokens: int
) -> Question:
    """What the command line asks."""
    return Question(shape_of(model), gpus, gpu_memory, gpus_per_node, micro_batch_tokens, step_tokens)


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
        "bytes": {**planned.memory.parts, "total": planned.memory.total},
        "stage": planned.memory.stage,
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
    columns = [*_sizes(found[0]), "peak", *found[0].memory.parts]
    typer.echo("".join(f"{name:>{max(_WIDTH, len(name) + 2)}}" for name in columns) + "  why")
    for planned in found[:_SHOWN]:
        typer.echo(_line(planned))
    if len(found) > _SHOWN:
        typer.echo(f"and {len(found) - _SHOWN} more (--json)")
    typer.echo(f"\npolicy: {{layout: {named(found[0].layout)}, micro_batch_tokens: {question.micro_batch_tokens}}}")


def _line(planned: Planned) -> str:
    memory = planned.memory
    gib = {name: f"{size / GIB:.1f}" for name, size in {"peak": memory.total, **memory.parts}.items()}
    values = {**_sizes(planned), **gib}
    cells = "".join(f"{value:>{max(_WIDTH, len(name) + 2)}}" for name, value in values.items())
    return f"{cells}  {', '.join(planned.reasons)}"


def _sizes(planned: Planned) -> dict[str, str]:
    """The layout's columns; a dense model has none for experts."""
    spec = planned.layout
    sizes = {"tp": spec.tp, "cp": spec.cp, "pp": spec.pp, "dp": spec.dp}
    if planned.question.config.experts is not None:
        sizes |= {"ep": spec.ep, "etp": spec.expert_tp}
    return {**{name: str(size) for name, size in sizes.items()}, "sp": "yes" if spec.sp else "no"}
