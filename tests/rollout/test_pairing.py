"""Pairs of fresh samples: who is better, what makes no pair, and what the rows say; and how an opponent's episodes are made."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_rl_like.algorithms.preference import Preference
from nemo_rl_like.rollout.episode import Episode
from nemo_rl_like.rollout.pairing import against, best_and_worst, pair_rows
from nemo_rl_like.spec.online import OnlinePairsSpec
from nemo_rl_like.tokens.batch import batch_rows
from tests.rollout.scripted_engine import ScriptedEngine, random_script
from tests.rollout.test_judging import EOS, JUDGE, LETTERS, fake_scores, sampled, service, stored  # noqa: F401


def episodes(folder: Path, *rewards: float | None) -> list[Episode]:
    """Real episodes, two a group, with these rewards; None: invalid."""
    made = service(folder)
    sampled(made)
    found = made._collected().episodes
    return [
        replace(e, invalid="planted", reward=math.nan) if r is None else replace(e, reward=r)
        for e, r in zip(found, rewards, strict=True)
    ]


def test_of_each_group_the_best_and_the_worst(tmp_path: Path) -> None:
    one, two, three, four, five, six = episodes(tmp_path, 1.0, 0.0, 0.5, 0.5, None, 1.0)
    assert best_and_worst([one, two, three, four, five, six]) == [
        (one, two)
    ]  # a tie and a lone valid sample make no pair
    crowd = [replace(e, group_id=0) for e in (two, three, one, four)]
    assert best_and_worst(crowd) == [(crowd[2], crowd[0])]


def test_against_an_opponent_the_better_one_is_chosen(tmp_path: Path) -> None:
    mine = episodes(tmp_path, 1.0, 0.0, 0.5, None, 1.0, 0.0)
    theirs = episodes(tmp_path, 0.0, 1.0, 0.5, 1.0, None, 0.5)
    assert against(mine, theirs) == [(mine[0], theirs[0]), (theirs[1], mine[1]), (theirs[5], mine[5])]
    rows = pair_rows(against(mine, theirs), theirs)
    batch = batch_rows(rows)
    said = [(r.group_id, r.columns["chosen"], r.columns["explored"], r.columns["margin"]) for r in rows]
    segments = [(len(mine[0].segments), len(theirs[0].segments)), (len(theirs[1].segments), len(mine[1].segments))]
    assert said[: segments[0][0]] == [(0, 1.0, 0.0, 1.0)] * segments[0][0]
    assert {row for row in said if row[0] == 1} == {(1, 1.0, 1.0, 1.0), (1, 0.0, 0.0, 1.0)}
    assert {row for row in said if row[0] == 2} == {(2, 1.0, 1.0, 0.5), (2, 0.0, 0.0, 0.5)}
    Preference(OnlinePairsSpec(losses=({"kind": "simpo"},))).prepare(batch)  # type: ignore[arg-type]  # three whole pairs


def test_equal_prompts_are_shared_over_pairs(tmp_path: Path) -> None:
    rows = pair_rows(best_and_worst(episodes(tmp_path, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0)))
    prompts = {row.prompt_id: tuple(row.tokens[: row.prompt_len]) for row in rows}
    assert all(prompts[row.prompt_id] == tuple(row.tokens[: row.prompt_len]) for row in rows)
    assert len(set(prompts.values())) == len(prompts)


def test_the_opponent_answers_every_prompt_and_its_failures_count(tmp_path: Path, stored: None) -> None:  # noqa: F811
    made = service(tmp_path, fail_on="2")
    sampled(made)
    before = made._collected().episodes
    made.sample_opponent(ScriptedEngine(random_script(LETTERS[5:], EOS, 0.25), version=3))
    last = made._collected()
    assert last.opponents is not None
    assert [e.group_id for e in last.opponents] == [e.group_id for e in last.episodes]
    assert [e.prompt for e in last.opponents] == [e.prompt for e in last.episodes]
    for old, new, other in zip(before, last.episodes, last.opponents, strict=True):
        assert (new.invalid is None) == (old.invalid is None and other.invalid is None)
    rows = made.rows_to_score(None)
    valid = sum(e.invalid is None for e in [*last.episodes, *last.opponents])
    assert len(rows.episode_id) == valid
    batch, summary = made.judged_to_store(JUDGE, rows, fake_scores(rows, 1.0), fake_scores(rows, 1.0))
    scored = made._collected()
    assert all("reward_model" in e.rewards for e in scored.all if e.invalid is None)
    theirs = {e.id: o.reward for e, o in zip(scored.episodes, scored.opponents or (), strict=True)}
    for episode_id, value in zip(batch.episode_id.tolist(), batch.columns["opponent"].tolist(), strict=True):
        want = theirs[episode_id]
        assert value == pytest.approx(want, rel=1e-6) or (math.isnan(value) and math.isnan(want))
    assert summary.seconds["opponent"] > 0
    pairs, count = made.pairs_to_store()
    assert count == len(against(scored.episodes, scored.opponents or ())) and (pairs is None) == (count == 0)
