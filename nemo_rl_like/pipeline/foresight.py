"""What a run would do with each stage, told without starting, importing or changing anything: `nrl pipeline plan` and `why`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.pipeline.decision import decide
from nemo_rl_like.pipeline.keys import Ingredients, ingredients
from nemo_rl_like.pipeline.records import StageRecord, Status, read_status
from nemo_rl_like.pipeline.wiring import Wire, wire
from nemo_rl_like.spec.experiment import ExperimentSpec

ForeseenAction = Literal["run", "resume", "skip", "wait", "blocked"]


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What would become of one stage."""

    wire: Wire
    action: ForeseenAction
    """`wait`: decided once a stage before it has ended; `blocked`: a file that the spec names is not there."""
    reason: str
    changes: tuple[str, ...] = ()
    """With a record of other ingredients: every one that differs, `name: old -> new`."""
    key: str | None = None
    """Its key; None while an input is not made yet."""


def foresee(spec: ExperimentSpec) -> tuple[Foreseen, ...]:
    """What `nrl run SPEC --resume` would do with each stage, in order.

    Behind a stage that is run everything is run. Behind one that is only resumed, what was done may stand: it may come to the same bytes.

    Raises:
        SpecError: a reference between stages is wrong.
        OutputFolderError: the run's records are damaged.
    """
    folder = Path(spec.output)
    status = read_status(folder)
    found: dict[str, Foreseen] = {}
    for one in wire(spec):
        found[one.name] = _foreseen(one, spec, folder, status, found)
    return tuple(found.values())


def _foreseen(one: Wire, spec: ExperimentSpec, folder: Path, status: Status, known: dict[str, Foreseen]) -> Foreseen:
    record = status.stages.get(one.name)
    unmade = [name for name in one.sources if known[name].action != "skip"]
    try:
        if unmade:
            again = any(known[name].action == "run" for name in unmade)
            return _behind(one, spec, record, unmade, again=again)
        inputs = {name: (str(known[name].key), _content(status, name)) for name in one.sources}
        made_from = ingredients(one.stage, spec.for_stage(one.stage), inputs)
    except InputError as error:
        return Foreseen(one, "blocked", str(error))
    decision = decide(folder, record, made_from)
    changed = () if record is None or record.key == made_from.key else made_from.changes_from(record.made_from)
    return Foreseen(one, decision.action, decision.reason, tuple(changed), made_from.key)


def _behind(one: Wire, spec: ExperimentSpec, record: StageRecord | None, unmade: list[str], *, again: bool) -> Foreseen:
    """A stage whose inputs are not made: what differs beside them is known already."""
    partly = ingredients(one.stage, spec.for_stage(one.stage), {})
    old = {} if record is None else {n: v for n, v in record.made_from.items() if not n.startswith("input.")}
    changes = () if record is None else tuple(Ingredients(partly.values).changes_from(old))
    names = ", ".join(unmade)
    if record is None:
        return Foreseen(one, "run", f"not started before; builds on {names}", changes)
    if again or changes:
        return Foreseen(one, "run", "; ".join(changes[:3]) or f"builds on {names}, run again", changes)
    return Foreseen(one, "wait", f"stands if {names} comes to the same")


def _content(status: Status, name: str) -> str:
    output = status.stages[name].output
    assert output is not None  # only a stage that is done is skipped
    return output.content_hash
