"""Laws of the embedded engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.generation.embedded import EmbeddedEngine
from nemo_rl_like.generation.types import Completion, Request, Sampling
from nemo_rl_like.model import runtime
from nemo_rl_like.model.forward import hidden_states
from nemo_rl_like.model.heads import output_head, token_logprobs
from nemo_rl_like.model.layouts import plan_microbatches
from nemo_rl_like.spec.policy import LayoutSpec
from nemo_rl_like.tokens.batch import Row, batch_rows

from .embedded_ranks import Job, free_port, run, start_engine
from .tiny_models import VOCAB, save, scores, tiny_llama

SAMPLING = Sampling(max_new_tokens=12)
PROMPTS = tuple(tuple((7 * i + 3 * j) % VOCAB for j in range(3 + 4 * i)) for i in range(5))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(layers=4)  # two interleaved stages on each of two ranks


@pytest.fixture(scope="module")
def folder(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[EmbeddedEngine]:
    torch.set_num_threads(1)
    yield start_engine(folder, 0, 1, free_port(), LayoutSpec(), 64)
    runtime.shutdown_distributed()


def requests(samples: int = 3) -> list[Request]:
    """Five prompts of different lengths."""
    return [Request(f"r{i}", p, tuple(1000 * i + s for s in range(samples))) for i, p in enumerate(PROMPTS)]


def ids(answer: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    """Sampled ids only."""
    return [[c.ids for c in group] for group in answer]


def worst_gap(
    model: LlamaForCausalLM, wanted: list[Request], answer: list[list[Completion]], temperature: float
) -> float:
    """Largest |engine - transformers| log-prob over the sampled tokens."""
    worst = 0.0
    for request, group in zip(wanted, answer, strict=True):
        assert len(group) == len(request.seeds)
        for sample in group:
            row = request.prompt_ids + sample.ids
            reference = scores(model, [row], temperature)[0][len(request.prompt_ids) - 1 :]
            worst = max(worst, *(abs(a - b) for a, b in zip(reference, sample.logprobs, strict=True)))
    return worst


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_logprobs_are_those_of_transformers_at_the_temperature(
    engine: EmbeddedEngine, model: LlamaForCausalLM, temperature: float
) -> None:
    sampling = dataclasses.replace(SAMPLING, temperature=temperature)
    answer = engine.generate(requests(), sampling)
    assert worst_gap(model, requests(), answer, temperature) < 1e-5
    assert worst_gap(model, requests(), answer, temperature * 1.1) > 0.01


def test_greedy_equals_transformers_generate(engine: EmbeddedEngine, model: LlamaForCausalLM) -> None:
    answer = engine.generate(requests(1), Sampling(max_new_tokens=12, greedy=True))
    for prompt, (sample,) in zip(PROMPTS, answer, strict=True):
        ask = torch.tensor([prompt])
        out = model.generate(
            ask,
            attention_mask=torch.ones_like(ask),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert tuple(out[0, len(prompt) :].tolist()) == sample.ids
    assert worst_gap(model, requests(1), answer, 1.0) < 1e-5


def test_the_same_call_gives_the_same_completions_bit_for_bit(engine: EmbeddedEngine) -> None:
    assert engine.generate(requests(), SAMPLING) == engine.generate(requests(), SAMPLING)


def test_a_sample_depends_on_its_seed_and_not_on_its_batch(engine: EmbeddedEngine) -> None:
    together = ids(engine.generate(requests(), SAMPLING))
    for i, request in enumerate(requests()):
        for k, seed in enumerate(request.seeds):
            alone = engine.generate([Request("alone", request.prompt_ids, (seed,))], SAMPLING)
            assert ids(alone) == [[together[i][k]]]
    assert len({c for group in together for c in group}) == 15


def test_a_small_batch_queues_whole_prompts_and_changes_no_sample(folder: Path, engine: EmbeddedEngine) -> None:
    wanted = ids(engine.generate(requests(), SAMPLING))
    wide = engine._max_rows
    try:
        for engine._max_rows in (7, 3, 2):
            assert ids(engine.generate(requests(), SAMPLING)) == wanted
    finally:
        engine._max_rows = wide


def test_finished_rows_leave_the_batch_and_change_no_other(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = engine.generate(requests(), SAMPLING)
    stops = (free[0][0].ids[2], free[1][1].ids[4], free[4][2].ids[7])
    live: list[int] = []
    step = engine._decoder.step
    monkeypatch.setattr(
        engine._decoder, "step", lambda state, tokens: (live.append(state.rows), step(state, tokens))[1]
    )
    stopped = engine.generate(requests(), dataclasses.replace(SAMPLING, stop_token_ids=stops))
    for long, short in zip([c for g in free for c in g], [c for g in stopped for c in g], strict=True):
        hit = next((i for i, token in enumerate(long.ids) if token in stops), None)
        cut = len(long.ids) if hit is None else hit + 1
        assert short.ids == long.ids[:cut] and short.stop == ("length" if hit is None else "stop")
        assert short.logprobs == pytest.approx(long.logprobs[:cut], abs=1e-5)
    assert live == sorted(live, reverse=True) and live[-1] < live[0] == 15


def test_ignored_stop_tokens_end_nothing(engine: EmbeddedEngine) -> None:
    free = engine.generate(requests(), SAMPLING)
    stop = (free[0][0].ids[2],)
    ignored = engine.generate(requests(), dataclasses.replace(SAMPLING, stop_token_ids=stop, ignore_stop=True))
    assert ids(ignored) == ids(free) and {c.stop for g in ignored for c in g} == {"length"}


def test_the_context_ends_a_completion_and_refuses_a_prompt_without_room(engine: EmbeddedEngine) -> None:
    asked = [Request("long", (5,) * 250, (1,)), Request("short", (5,) * 3, (2,))]
    (long,), (short,) = engine.generate(asked, SAMPLING)
    assert (len(long.ids), long.stop, len(short.ids)) == (6, "length", 12)
    with pytest.raises(InputError, match=r"'full'.*256 tokens.*context of 256"):
        engine.generate([Request("full", (5,) * 256, (1,))], SAMPLING)
    with pytest.raises(InputError, match=rf"'alien'.*0 \.\. {VOCAB - 1}; found {VOCAB}"):
        engine.generate([Request("alien", (VOCAB,), (1,))], SAMPLING)


def test_an_update_changes_the_version_of_what_follows(engine: EmbeddedEngine) -> None:
    report = engine.update_weights(7, None)
    assert report.version == engine.version == 7
    assert {c.version for g in engine.generate(requests(1), SAMPLING) for c in g} == {7}


def test_the_model_can_be_trained_after_it_has_generated(engine: EmbeddedEngine) -> None:
    engine.generate(requests(), SAMPLING)
    model = engine._decoder._model
    row = Row([1, 2, 3, 4], 1, [False, True, True, True], [0.0] * 4, [-1] * 4, 0, 0, 0)
    plan = plan_microbatches(batch_rows([row]), [0], dp_size=1, dp_rank=0, kind="shared_prefix", token_budget=64)
    out = token_logprobs(
        hidden_states(model, plan[0]), output_head(model), plan[0].targets, temperature=1.0, chunk_tokens=8
    )
    out.logprobs.sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    model.zero_grad()


@pytest.fixture(scope="module")
def job() -> Job:
    greedy = Sampling(max_new_tokens=12, greedy=True)
    return Job(requests(), [SAMPLING, greedy], [(*p, 1, 2, 3) for p in PROMPTS], max_batch_rows=6)


@pytest.mark.parametrize(
    "layout",
    [
        LayoutSpec(tp=2, pp=2, vpp=2, sp=True),
        LayoutSpec(dp=2, tp=2),
        pytest.param(LayoutSpec(tp=2, pp=2), marks=pytest.mark.slow),
        pytest.param(LayoutSpec(tp=2, pp=2, sp=True), marks=pytest.mark.slow),
        pytest.param(LayoutSpec(dp=2, pp=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_rank_of_every_layout_gets_the_same_and_the_right_completions(
    folder: Path, model: LlamaForCausalLM, engine: EmbeddedEngine, job: Job, tmp_path: Path, layout: LayoutSpec
) -> None:
    alone = [engine.generate(job.requests, sampling) for sampling in job.samplings]
    answers = run(folder, job, layout, tmp_path)
    assert all(answer == answers[0] for answer in answers[1:])
    for mine, theirs in zip(alone, answers[0].completions, strict=True):
        assert ids(mine) == ids(theirs)
        assert worst_gap(model, job.requests, theirs, 1.0) < 1e-5
    for mine, theirs in zip(scores(model, job.scored), answers[0].scores, strict=True):
        assert theirs == pytest.approx(mine, abs=1e-5)
