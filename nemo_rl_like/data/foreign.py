"""Rows as other post-training systems write them, turned into this package's. A row is recognised by its keys alone.

Conversations: TRL (`prompt` and `completion`, or `prompt` alone), ShareGPT and NeMo chat (`conversations` with `from` and `value`), Alpaca (`instruction`, `input`,
`output`), NeMo RL and OpenRLHF (`input` and `output`), verl (`prompt` with `reward_model.ground_truth`). Pairs: NeMo RL (`context` and ranked `completions`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.data.messages import JSON

SPEAKERS: Mapping[str, str] = MappingProxyType(
    {
        "system": "system",
        "human": "user",
        "user": "user",
        "gpt": "assistant",
        "assistant": "assistant",
        "chatgpt": "assistant",
        "model": "assistant",
        "tool": "tool",
        "observation": "tool",
    }
)
"""Roles by what ShareGPT files call who speaks, in lower case."""
FORMATS = "TRL, ShareGPT, Alpaca, NeMo RL, OpenRLHF or verl"


def as_conversation(row: Mapping[str, JSON], where: str) -> Mapping[str, JSON] | None:
    """The row with `messages`, its other fields kept; None for a row of no known format.

    Raises:
        InputError: that starts with `where` and names the field, for a row of a known format that is malformed.
    """
    if "conversations" in row:
        return _sharegpt(row, where)
    if "instruction" in row and "output" in row:
        asked = "\n\n".join(_text(row, key, where) for key in ("instruction", "input") if row.get(key))
        return _turn(row, asked, _text(row, "output", where), ("instruction", "input", "output"))
    if "input" in row and "output" in row:
        return _turn(row, row["input"], row["output"], ("input", "output"))
    if "prompt" in row and "completion" in row:
        return _turn(row, row["prompt"], row["completion"], ("prompt", "completion"))
    if "prompt" in row:
        return _verl(row, where)
    return None


def as_pair(row: Mapping[str, JSON], where: str) -> Mapping[str, JSON]:
    """A row of ranked completions as `prompt`, `chosen` and `rejected`; any other row as it is. Raises InputError."""
    ranked = row.get("completions")
    if "context" not in row or not isinstance(ranked, Sequence) or isinstance(ranked, str):
        return row
    by_rank: dict[int, JSON] = {}
    for index, one in enumerate(ranked):
        rank = one.get("rank") if isinstance(one, Mapping) else None
        if not isinstance(one, Mapping) or not isinstance(rank, int) or "completion" not in one:
            raise InputError(f"{where}: completions[{index}]: must be an object with `rank` and `completion`")
        by_rank[rank] = one["completion"]
    if len(by_rank) != len(ranked) or len(ranked) != 2:
        raise InputError(
            f"{where}: completions: must be two of different `rank`, 0 the better; split longer rankings into pairs"
        )
    better, worse = (by_rank[rank] for rank in sorted(by_rank))
    kept = {key: value for key, value in row.items() if key not in ("context", "completions")}
    return {**kept, "prompt": row["context"], "chosen": better, "rejected": worse}


def _turn(row: Mapping[str, JSON], asked: JSON, answer: JSON, used: Sequence[str]) -> Mapping[str, JSON]:
    """One question and its answer, each a text or a list of messages."""
    messages = [*_said(asked, "user"), *_said(answer, "assistant")]
    return {"messages": messages, **{key: value for key, value in row.items() if key not in used}}


def _said(value: JSON, role: str) -> list[JSON]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return list(value)
    return [{"role": role, "content": value}]


def _sharegpt(row: Mapping[str, JSON], where: str) -> Mapping[str, JSON]:
    turns = row["conversations"]
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise InputError(f"{where}: conversations: must be a list, got {type(turns).__name__}")
    messages: list[JSON] = []
    if row.get("system"):
        messages.append({"role": "system", "content": row["system"]})
    for index, turn in enumerate(turns):
        if not isinstance(turn, Mapping):
            raise InputError(f"{where}: conversations[{index}]: must be an object, got {type(turn).__name__}")
        if "role" in turn:
            messages.append(turn)
            continue
        role = SPEAKERS.get(str(turn.get("from")).lower())
        if role is None:
            raise InputError(
                f"{where}: conversations[{index}].from: is {turn.get('from')!r}, must be one of {', '.join(SPEAKERS)}"
            )
        messages.append({"role": role, "content": turn.get("value")})
    return {"messages": messages, **{k: v for k, v in row.items() if k not in ("conversations", "system", "mask")}}


def _verl(row: Mapping[str, JSON], where: str) -> Mapping[str, JSON]:
    """A prompt alone; the answer that a verl row is judged by becomes its `label`."""
    kept = {key: value for key, value in row.items() if key != "prompt"}
    judged = row.get("reward_model")
    if isinstance(judged, Mapping) and "ground_truth" in judged and "label" not in row:
        kept["label"] = judged["ground_truth"]
    return {"messages": _said(row["prompt"], "user"), **kept}


def _text(row: Mapping[str, JSON], key: str, where: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise InputError(f"{where}: {key}: must be text, got {type(value).__name__}")
    return value
