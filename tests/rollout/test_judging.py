"""Reward models as judges: which state they read, how scores become one, and what that does to rewards, parts and records."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import torch

from nemo_rl_like.data.tokenizer import character_tokenizer
from nemo_rl_like.rollout.collected import CollectPlan
from nemo_rl_like.rollout.judging import combined, judged, rows_to_score, scores_of
from nemo_rl_like.rollout.service import RolloutService
from nemo_rl_like.spec.environment import EnvironmentSpec
from nemo_rl_like.spec.reward_model import ProcessScores, RewardModelSpec
from nemo_rl_like.spec.stage import SamplingSpec
from nemo_rl_like.tokens.batch import TokenBatch
from tests.rollout.scripted_engine import ScriptedEngine, random_script

TOKENIZER = character_tokenizer("0123456789+=x")
EOS = TOKENIZER.eos_token_id
LETTERS = TOKENIZER("0123456789+=x", add_special_tokens=False).input_ids
JUDGE = RewardModelSpec(paths=("a", "b"))


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's store without Ray: what is put comes back."""
    monkeypatch.setattr(ray, "put", lambda value: value)


def service(folder: Path, **config: object) -> RolloutService:
    TOKENIZER.save_pretrained(folder)
    spec = EnvironmentSpec(
        name="tests.rollout.conversations:Chatter",
        config={"turns": 2, **config},
        processes=0,
        max_turns=2,
        max_invalid_fraction=1.0,
    )
    return RolloutService(
        None, environment_json=spec.model_dump_json(), tokenizer_folder=str(folder), run_seed=1, max_context=256
    )


def sampled(made: RolloutService, *, greedy: bool = False) -> None:
    plan = CollectPlan(
        step=1,
        task_ids=("train-0", "train-1", "train-2"),
        samples_per_prompt=2,
        version=0,
        sampling=SamplingSpec(max_new_tokens=24),
        greedy=greedy,
        show=6,
    )
    made.sample(plan, ScriptedEngine(random_script(LETTERS, EOS, 0.25)))


def fake_scores(rows: TokenBatch, factor: float) -> torch.Tensor:
    """Float32 [N]: a number at each scored place that depends on the row."""
    return torch.where(rows.loss_mask, factor * rows.lengths[rows.row_of_token].float(), 0.0)


def test_a_row_is_the_whole_conversation_scored_behind_its_last_token(tmp_path: Path, stored: None) -> None:
    made = service(tmp_path)
    sampled(made)
    rows = made.rows_to_score(None)
    assert isinstance(rows, TokenBatch)
    episodes = made._collected().episodes
    for i, episode in enumerate(episodes):
        start, end = rows.cu_seqlens[i : i + 2].tolist()
        assert tuple(rows.tokens[start : end - 1].tolist()) == episode.segments[-1].tokens
        assert rows.loss_mask[start:end].nonzero()[:, 0].tolist() == [end - start - 1]


def test_scores_enter_rewards_parts_summary_samples_and_records(tmp_path: Path, stored: None) -> None:
    made = service(tmp_path, fail_on="1")
    sampled(made)
    before = made._collected().episodes
    assert any(e.invalid for e in before) and not all(e.invalid for e in before)
    rows = made.rows_to_score(None)
    spec = JUDGE.model_copy(update={"weight": 2.0, "environment_weight": 0.5})
    batch, summary = made.judged_to_store(spec, rows, fake_scores(rows, 1.0), fake_scores(rows, 3.0))
    lengths = {i: int(n) for i, n in zip(rows.episode_id.tolist(), rows.lengths.tolist(), strict=True)}
    rewards = []
    for i, (old, new) in enumerate(zip(before, made._collected().episodes, strict=True)):
        if old.invalid is not None:
            assert new == old and math.isnan(new.reward)
            continue
        score = 2.0 * lengths[i]  # the mean of one and three times the length
        assert new.reward == pytest.approx(0.5 * old.reward + 2.0 * score)
        assert new.rewards == {**old.rewards, "reward_model": score}
        assert sum(sum(s.rewards) for s in new.segments) == pytest.approx(0.5 * old.reward)
        rewards.append(new.reward)
    assert summary.rewards["reward"].mean == pytest.approx(sum(rewards) / len(rewards))
    assert "reward_model" in summary.rewards
    shown = {s.episode_id: s.reward for s in summary.samples if not math.isnan(s.reward)}
    assert shown == {e.id: e.reward for e in made._collected().episodes if e.invalid is None}
    first = batch.episode_id.tolist()
    by_id = {e.id: e for e in made._collected().episodes}
    for row, episode_id in enumerate(first):
        expected = by_id[episode_id].reward
        got = float(batch.rewards["reward"][row])
        assert got == pytest.approx(expected, rel=1e-6) or (math.isnan(got) and math.isnan(expected))
    made.append_records(str(tmp_path / "rollouts.jsonl"), 0)
    lines = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert [line["reward"] for line in lines if line["reward"] is not None] == pytest.approx(rewards)


def test_greedy_answers_are_judged_too(tmp_path: Path, stored: None) -> None:
    made = service(tmp_path)
    sampled(made, greedy=True)
    rows = made.rows_to_score(None)
    own = {e.group_id: e.reward for e in made._collected().greedy or ()}
    asked = {e.group_id: e.prompt for e in made._collected().episodes}
    assert {e.group_id: e.prompt for e in made._collected().greedy or ()} == asked
    batch, _ = made.judged_to_store(JUDGE, rows, fake_scores(rows, 1.0), fake_scores(rows, 1.0))
    greedy = dict(zip(batch.group_id.tolist(), batch.columns["greedy"].tolist(), strict=True))
    assert len(rows.episode_id) == 9 and greedy.keys() == own.keys()
    assert all(greedy[g] > own[g] for g in own)


def test_without_a_valid_episode_there_is_nothing_to_judge(tmp_path: Path, stored: None) -> None:
    made = service(tmp_path, silent=True)
    sampled(made)
    assert made.rows_to_score(None) is None
    batch, summary = made.judged_to_store(JUDGE, None)
    assert summary.invalid_fraction == 1.0 and not batch.loss_mask.any()


def test_the_ensembles_score(tmp_path: Path) -> None:
    members = torch.tensor([[1.0, 4.0], [3.0, 0.0], [5.0, 2.0]], dtype=torch.float64)
    assert combined(members, JUDGE).tolist() == [3.0, 2.0]
    assert combined(members, JUDGE.model_copy(update={"combine": "min"})).tolist() == [1.0, 0.0]
    cautious = JUDGE.model_copy(update={"combine": "mean_minus_variance", "variance_weight": 0.5})
    variance = 8 / 3  # of (1, 3, 5) and of (4, 0, 2) about their means
    assert combined(members, cautious).tolist() == pytest.approx([3.0 - variance / 2, 2.0 - variance / 2])


@pytest.mark.parametrize(
    ("how", "expected"), [("min", 0.25), ("mean", 0.5), ("product", 0.25 * 0.5 * 0.75), ("last", 0.75)]
)
def test_the_scores_of_steps_become_one(tmp_path: Path, stored: None, how: str, expected: float) -> None:
    made = service(tmp_path)
    sampled(made)
    episode = made._collected().episodes[0]
    sign = LETTERS[10]
    segment = episode.segments[-1]
    tokens = (*segment.tokens[: segment.prompt_len], LETTERS[1], sign, LETTERS[2], sign, EOS)
    count = len(tokens)
    written = tuple(i >= segment.prompt_len for i in range(count))
    changed = replace(
        segment, tokens=tokens, sampled=written, behavior=(0.0,) * count, version=(0,) * count, turn=(0,) * count
    )
    rows = rows_to_score([replace(episode, segments=(replace(changed, rewards=(0.0,) * count),))], frozenset({sign}))
    assert rows is not None
    places = rows.loss_mask.nonzero()[:, 0].tolist()
    assert places == [segment.prompt_len + 2, segment.prompt_len + 4, count]
    values = torch.zeros(rows.tokens.numel())
    for place, probability in zip(places, (0.25, 0.5, 0.75), strict=True):
        values[place] = math.log(probability / (1 - probability))
    process = ProcessScores.model_validate({"separator": "+", "over_steps": how})
    spec = RewardModelSpec(paths=("a",), process=process)
    assert scores_of(rows, [values], spec)[0] == pytest.approx(expected, rel=1e-6)
    (one,) = judged([episode], {0: expected}, spec, scored=True)
    assert one.rewards["reward_model"] == expected
