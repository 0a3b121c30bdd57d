"""Messages to token ids: each text is rendered once, and the trained parts are found by rendering prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerFast

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.data.messages import Message, Tool, assistant, user, weight_of
from nemo_rl_like.data.tokenizer import load_tokenizer, require_chat_template

_PROBE = "assistantprobe"


@dataclass(frozen=True, slots=True)
class TrainedText:
    """One row of supervised data."""

    ids: tuple[int, ...]
    """Token ids."""
    mask: tuple[bool, ...]
    """[len(ids)] true on tokens the assistant is to write, its end-of-turn token among them, but those of a message of weight 0."""
    weights: tuple[float, ...]
    """[len(ids)] weight of the message that each of them belongs to; 0 elsewhere."""


class Renderer:
    """A tokenizer and its chat template.

    Every text comes from the template as a whole, special tokens among it, and is then tokenized without adding any.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, source: str) -> None:
        """Raises InputError: no chat template, or one that does not end the assistant's message with a special token."""
        require_chat_template(tokenizer, source)
        self.tokenizer = tokenizer
        self._source = source
        self._enders: dict[str, frozenset[int]] = {}
        self._closing = self._closing_text()
        self.end_of_turn_id = self._end_of_turn()
        """Token that ends an assistant message."""
        self._closing_rest = self._closing[len(self._text_of(self.end_of_turn_id)) :]

    @classmethod
    def load(cls, folder: str | Path) -> Renderer:
        """The renderer of a Hugging Face folder. Raises InputError."""
        return cls(load_tokenizer(folder), str(folder))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an assistant message: the template's own and the tokenizer's end token."""
        eos = self.tokenizer.eos_token_id
        return tuple(sorted({self.end_of_turn_id} | ({int(eos)} if eos is not None else set())))

    def text(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, answer_next: bool) -> str:
        """The template's text; with `answer_next`, up to where the assistant begins to write.

        Raises InputError when the template refuses the messages.
        """
        try:
            rendered = self.tokenizer.apply_chat_template(
                [{"role": m.role, "content": m.content} for m in messages],
                tools=[_tool_json(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=answer_next,
            )
        except TemplateError as error:
            roles = ", ".join(m.role for m in messages)
            raise InputError(
                f"tokenizer: {self._source}: the chat template refuses messages with roles {roles}: {error}"
            ) from error
        return cast(str, rendered)

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> tuple[int, ...]:
        """Token ids of what the model reads before it writes. Raises InputError."""
        return self._encode(self.text(messages, tools, answer_next=True))

    def reply(self, ids: Sequence[int]) -> Message:
        """What the model said, as a message: the text of its ids without the end-of-turn token."""
        kept = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        return assistant(self.decode(kept))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included. For people and environments; never encoded again."""
        return cast(
            str, self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def ids_ending_with(self, text: str) -> frozenset[int]:
        """Token ids whose own text ends with `text`; the vocabulary is read once for each text."""
        if text not in self._enders:
            ids = range(len(self.tokenizer))
            self._enders[text] = frozenset(i for i in ids if self.decode([i]).endswith(text))
        return self._enders[text]

    def next_turn_ids(
        self,
        before: Sequence[Message],
        reply: Message,
        sampled: Sequence[int],
        new: Sequence[Message],
        tools: Sequence[Tool] = (),
    ) -> tuple[int, ...] | None:
        """The ids to append after the sampled ones, so that the model can answer `new`.

        The ids so far must be the prompt of `before` followed by `sampled`, whose text is `reply`. They are kept as they are.

        Returns:
            The new ids only; None when the render of the longer conversation does not start with the text so far (the template
            rewrote history, or the turn ended with another token than the template's): a new segment is needed.
        """
        head = self.text(before, tools, answer_next=True) + reply.content
        longer = self.text([*before, reply, *new], tools, answer_next=True)
        if not longer.startswith(head + self._closing):
            return None
        ids = self._encode(longer[len(head) :])
        if not sampled or ids[0] != sampled[-1]:
            return None
        return ids[1:]

    def trained_texts(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, first: int = 0
    ) -> tuple[TrainedText, ...]:
        """Rows in which each assistant message from number `first` on is trained exactly once; none if there is no such message.

        One row, if the template only ever appends; else one row for each assistant message, as the model sees it when it writes.

        Raises InputError when the template writes a finished assistant message in another way than it asks for one.
        """
        turns = [i for i, message in enumerate(messages) if message.role == "assistant" and i >= first]
        if not turns:
            return ()
        whole = self.text(messages, tools, answer_next=False)
        spans = [self._span(messages[: i + 1], tools) for i in turns]
        weights = [weight_of(messages[i]) for i in turns]
        if all(whole.startswith(through[:end]) for through, _, end in spans):
            return (self._trained(whole, [(start, end) for _, start, end in spans], weights),)
        return tuple(
            self._trained(through[:end], [(start, end)], [weight])
            for (through, start, end), weight in zip(spans, weights, strict=True)
        )

    def _span(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[str, int, int]:
        """The text up to and with the last message, and where that message's trained part starts and ends in it."""
        through = self.text(messages, tools, answer_next=False)
        if len(messages) > 1:
            asked = self.text(messages[:-1], tools, answer_next=True)
        else:  # nothing was asked before, and templates refuse an empty conversation
            asked = through.removesuffix(messages[0].content + self._closing)
        if not through.startswith(asked) or not through.endswith(self._closing):
            raise InputError(
                f"tokenizer: {self._source}: the chat template asks for an answer with {asked[-40:]!r} but writes a finished one as "
                f"{through[-40:]!r}; supervised training needs a template whose finished text starts with its prompt"
            )
        return through, len(asked), len(through) - len(self._closing_rest)

    def _trained(self, text: str, spans: Sequence[tuple[int, int]], spans_weights: Sequence[float]) -> TrainedText:
        ids: list[int] = []
        weights: list[float] = []
        cuts = [cut for span in spans for cut in span]
        between = [weight for span_weight in spans_weights for weight in (0.0, span_weight)]
        done = 0
        for cut, weight in [*zip(cuts, between, strict=True), (len(text), 0.0)]:
            piece = self._piece(ids, text, done, cut)
            ids += piece
            weights += [weight] * len(piece)
            done = cut
        return TrainedText(tuple(ids), tuple(weight > 0 for weight in weights), tuple(weights))

    def _piece(self, ids: Sequence[int], text: str, start: int, end: int) -> Sequence[int]:
        """Ids of text[start:end] that follow `ids`: in context where the tokens cut there, else on their own, as when sampled."""
        if start == end:
            return ()
        through = self._encode(text[:end])
        return through[len(ids) :] if list(through[: len(ids)]) == list(ids) else self._encode(text[start:end])

    def _encode(self, text: str) -> tuple[int, ...]:
        ids = tuple(self.tokenizer(text, add_special_tokens=False).input_ids)
        bos, unknown = self.tokenizer.bos_token_id, self.tokenizer.unk_token_id
        if bos is not None and ids[:2] == (bos, bos):
            raise InputError(
                f"tokenizer: {self._source}: the chat template writes the begin token twice; remove one from the template"
            )
        if unknown is not None and unknown in ids and self._text_of(unknown) not in text:
            raise InputError(
                f"tokenizer: {self._source}: does not know a character of {text[:80]!r}; add it to the alphabet or change the text"
            )
        return ids

    def _text_of(self, token: int) -> str:
        return cast(str, self.tokenizer.convert_ids_to_tokens(token))

    def _closing_text(self) -> str:
        rendered = self.text([user("userprobe"), assistant(_PROBE)], answer_next=False)
        if _PROBE not in rendered:
            raise InputError(f"tokenizer: {self._source}: the chat template does not write the assistant's message")
        return rendered[rendered.rindex(_PROBE) + len(_PROBE) :]

    def _end_of_turn(self) -> int:
        ids = self.tokenizer(self._closing, add_special_tokens=False).input_ids if self._closing else []
        special = {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}
        if not ids or ids[0] not in special or not self._closing.startswith(self._text_of(ids[0])):
            raise InputError(
                f"tokenizer: {self._source}: the chat template ends the assistant's message with {self._closing!r}, which is no special "
                "token, so the model could not learn to stop; write the end token after the assistant's content"
            )
        return int(ids[0])


def _tool_json(tool: Tool) -> dict[str, object]:
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}
