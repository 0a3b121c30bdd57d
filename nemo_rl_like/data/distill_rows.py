"""Conversations to distill on: read with the teacher that answers for each, made into rows of the data's or the student's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.data.datasets import load_messages
from nemo_rl_like.data.messages import Message
from nemo_rl_like.data.render import Renderer
from nemo_rl_like.data.sft_rows import sft_rows
from nemo_rl_like.data.trained_rows import TrainedRows
from nemo_rl_like.tokens.batch import Row


@dataclass(frozen=True, slots=True)
class Conversation:
    """One line of a file."""

    index: int
    """Number in the file, from 0, blank lines aside."""
    messages: tuple[Message, ...]
    """What is said."""
    teacher: int
    """Number of the teacher that answers for it."""
    where: str
    """`file:line`, for messages to people."""

    @property
    def prompt(self) -> tuple[Message, ...]:
        """What comes before the response: all messages but the last one, if that is the assistant's."""
        return self.messages[:-1] if self.messages[-1].role == "assistant" else self.messages

    @property
    def has_response(self) -> bool:
        """Whether the assistant says something."""
        return any(message.role == "assistant" for message in self.messages)


@dataclass(frozen=True, slots=True)
class ConversationDataset:
    """The conversations of one file."""

    source: str
    """The file, for messages to people."""
    examples: tuple[Conversation, ...]
    """At least one, in the order of the file."""
    sha256: str
    """Hash of their content and order."""


def load_conversations(path: str | Path, teachers: Mapping[str | None, int]) -> ConversationDataset:
    """Read a file; `teachers`: number by `domain`, None for all other domains; without any, teacher 0 answers for all.

    Raises InputError as `load_messages` does, and for a row whose domain no teacher answers for.
    """
    data = load_messages(path)
    examples = []
    for index, example in enumerate(data.examples):
        where = f"{data.source}:{example.line}"
        teacher = _teacher_of(example.fields.get("domain"), teachers, where)
        examples.append(Conversation(index, example.messages, teacher, where))
    return ConversationDataset(data.source, tuple(examples), data.sha256)


def _teacher_of(domain: object, teachers: Mapping[str | None, int], where: str) -> int:
    if domain is not None and not isinstance(domain, str):
        raise InputError(f"{where}: domain: must be text, got {type(domain).__name__}")
    if not teachers:
        return 0
    found = teachers.get(domain, teachers.get(None))
    if found is None:
        named = ", ".join(sorted(name for name in teachers if name is not None))
        what = "no `domain`" if domain is None else f"the domain {domain!r}"
        raise InputError(
            f"{where}: has {what}, and the teachers' domains are {named}; correct it, or add a teacher for it or one without `domain`"
        )
    return found


def own_rows(
    conversations: Sequence[Conversation], renderer: Renderer, *, max_tokens: int, first: int = 0
) -> TrainedRows:
    """Rows with the data's assistant messages trained; prompts, groups and episodes are numbered from `first`.

    `group_id` less `first` is the conversation's place in the list.
    """
    made = sft_rows([c.messages for c in conversations], renderer, max_tokens=max_tokens)
    rows = tuple(
        replace(
            row,
            prompt_id=first + row.prompt_id,
            group_id=first + row.group_id,
            episode_id=first + row.episode_id,
            columns=_columns(conversations[row.group_id].teacher, sampled=False),
        )
        for row in made.rows
    )
    return replace(made, rows=rows)


def sampled_row(
    prompt: Sequence[int], ids: Sequence[int], logprobs: Sequence[float], *, version: int, number: int, teacher: int
) -> Row:
    """A row with the student's own response to a prompt trained; `number` is that of its prompt, group and episode."""
    before, count = len(prompt), len(ids)
    return Row(
        tokens=(*prompt, *ids),
        prompt_len=before,
        loss_mask=(False,) * before + (True,) * count,
        behavior=(0.0,) * before + tuple(logprobs),
        version=(-1,) * before + (version,) * count,
        prompt_id=number,
        group_id=number,
        episode_id=number,
        columns=_columns(teacher, sampled=True),
    )


def _columns(teacher: int, *, sampled: bool) -> dict[str, float]:
    return {"teacher": float(teacher), "sampled": float(sampled)}
