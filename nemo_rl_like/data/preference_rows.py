"""Pairs and judged completions to rows: the completion's assistant messages are trained, the prompt's are not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.data.messages import Message
from nemo_rl_like.data.preferences import Judged, Pair
from nemo_rl_like.data.render import Renderer, TrainedText
from nemo_rl_like.data.trained_rows import RowCollector, TooLong, TrainedRows, row_of, texts_of


def pair_rows(pairs: Sequence[Pair], renderer: Renderer, *, max_tokens: int, too_long: TooLong = "drop") -> TrainedRows:
    """Rows of both completions of each pair: `group_id` is the pair, the columns are `chosen` (1 or 0) and, where given, `margin`.

    A pair with a completion that is too long or has no token to train is left out whole.
    Raises:
        InputError: a row is too long and `too_long` is `refuse`; or the template does not fit.
    """
    made = RowCollector(max_tokens, too_long)
    for index, pair in enumerate(pairs):
        sides = [texts_of((*pair.prompt, *side), renderer, len(pair.prompt)) for side in (pair.chosen, pair.rejected)]
        if not made.takes(sides, pair.where):
            continue
        margin = {} if pair.margin is None else {"margin": pair.margin}
        for side, texts in enumerate(sides):
            _add(made, texts, group_id=index, episode_id=2 * index + side, chosen=float(side == 0), **margin)
    return made.done()


def judged_rows(
    examples: Sequence[Judged], renderer: Renderer, *, max_tokens: int, too_long: TooLong = "drop"
) -> TrainedRows:
    """A row of each completion, and of each prompt with another sample's completion (column `mismatched`), for kto.

    The partner is the next sample in the order of the data, round the end, that has another prompt and whose completion fits the
    context; so it is never the sample itself, and the order of rows does not change it. The columns are `chosen` (desirable) and
    `mismatched`.
    Raises:
        InputError: all samples have one prompt; a row is too long and `too_long` is `refuse`; or the template does not fit.
    """
    made = RowCollector(max_tokens, too_long)
    kept: list[tuple[Judged, list[TrainedText]]] = []
    for example in examples:
        texts = texts_of((*example.prompt, *example.completion), renderer, len(example.prompt))
        if made.takes([texts], example.where):
            kept.append((example, texts))
    samples = [example for example, _ in kept]
    for index, (example, texts) in enumerate(kept):
        mismatched = _mismatched(index, samples, renderer, max_tokens)
        if mismatched is None:
            made.long += 1
            continue
        chosen = float(example.desirable)
        _add(made, texts, group_id=index, episode_id=index, chosen=chosen, mismatched=0.0)
        _add(made, mismatched, group_id=index, episode_id=len(kept) + index, chosen=chosen, mismatched=1.0)
    return made.done()


def partners(index: int, prompts: Sequence[Sequence[Message]]) -> Iterator[int]:
    """Samples after `index`, round the end, with another prompt than its own."""
    count = len(prompts)
    after = ((index + step) % count for step in range(1, count))
    return (other for other in after if prompts[other] != prompts[index])


def _mismatched(index: int, samples: Sequence[Judged], renderer: Renderer, max_tokens: int) -> list[TrainedText] | None:
    """This sample's prompt with the first partner's completion that fits; None if none does."""
    prompt = samples[index].prompt
    found = False
    for other in partners(index, [sample.prompt for sample in samples]):
        found = True
        texts = texts_of((*prompt, *samples[other].completion), renderer, len(prompt))
        if texts and all(len(text.ids) <= max_tokens for text in texts):
            return texts
    if not found:
        raise InputError(
            f"{samples[index].where}: all {len(samples)} completions of the step have the same prompt, and kto compares a completion "
            "with those of other prompts; raise `pairs_per_step`, or give data with more prompts"
        )
    return None


def _add(made: RowCollector, texts: Sequence[TrainedText], *, group_id: int, episode_id: int, **columns: float) -> None:
    """The rows of one completion."""
    for text in texts:
        made.add(row_of(text, prompt_id=0, group_id=group_id, episode_id=episode_id, columns=columns))
