"""Laws of the rollout service: episodes in, token batches out, with a scripted engine and real environment processes."""

import json
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.data.tokenizer import character_tokenizer
from nemo_rl_like.rollout.collected import CollectPlan, TooManyInvalid, WrongWeightVersion
from nemo_rl_like.rollout.service import RolloutService
from nemo_rl_like.spec.environment import EnvironmentSpec
from nemo_rl_like.spec.evaluate import EvaluationSpec
from nemo_rl_like.spec.stage import SamplingSpec
from nemo_rl_like.tokens.batch import TokenBatch
from tests.data.small_tokenizers import CHATML, FORGETS_THOUGHTS, bpe_tokenizer
from tests.rollout.scripted_engine import ScriptedEngine, random_script

ALPHABET = "0123456789+=x"
TOKENIZER = character_tokenizer(ALPHABET)
EOS = TOKENIZER.eos_token_id
BOS = TOKENIZER.bos_token_id
LETTERS = TOKENIZER(ALPHABET, add_special_tokens=False).input_ids
CHATTER = "tests.rollout.conversations:Chatter"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(path)
    return str(path)


@pytest.fixture
def make(folder):
    made: list[RolloutService] = []

    def _make(
        spec: EnvironmentSpec, run_seed: int = 1, max_context: int = 256, tokenizer: str = folder
    ) -> RolloutService:
        service = RolloutService(
            None,
            environment_json=spec.model_dump_json(),
            tokenizer_folder=tokenizer,
            run_seed=run_seed,
            max_context=max_context,
        )
        made.append(service)
        return service

    yield _make
    for service in made:
        service.close()


def _chatter(**settings) -> EnvironmentSpec:
    keys = ("processes", "max_turns", "max_invalid_fraction", "step_timeout_s")
    spec = {k: settings.pop(k) for k in keys if k in settings}
    return EnvironmentSpec(name=CHATTER, config=settings, **{"processes": 0, **spec})


def _engine(**settings) -> ScriptedEngine:
    return ScriptedEngine(random_script(LETTERS, EOS), **settings)


def _same(first: TokenBatch, other: TokenBatch) -> bool:
    names = (
        "tokens",
        "cu_seqlens",
        "prompt_lens",
        "loss_mask",
        "behavior",
        "version",
        "prompt_id",
        "group_id",
        "episode_id",
    )
    return (
        all(torch.equal(getattr(first, n), getattr(other, n)) for n in names)
        and first.rewards.keys() == other.rewards.keys()
        and all(torch.equal(first.rewards[n].nan_to_num(-7), other.rewards[n].nan_to_num(-7)) for n in first.rewards)
    )


def _rows(batch: TokenBatch):
    for i in range(batch.rows):
        cut = slice(int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1]))
        yield batch.tokens[cut].tolist(), batch.loss_mask[cut].tolist(), batch.behavior[cut], batch.version[cut]


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(delay_seed=st.integers(1, 10**6), processes=st.sampled_from([0, 0, 0, 2]))
def test_the_batch_does_not_depend_on_which_environment_answers_first(make, delay_seed, processes):
    ids = ["train-3", "train-1", "train-3"]
    batches = [
        make(_chatter(delay_seed=d, processes=p)).collect(
            CollectPlan(4, tuple(ids), 3, 0, SamplingSpec(max_new_tokens=40)), _engine()
        )[0]
        for d, p in ((0, 0), (delay_seed, processes))
    ]
    assert _same(*batches)


def test_the_same_step_is_the_same_batch_and_another_step_or_seed_is_not(make):
    def batch(step, run_seed):
        service = make(_chatter(), run_seed=run_seed)
        service.collect(CollectPlan(0, ("train-0",), 2, 0, SamplingSpec()), _engine())
        return service.collect(
            CollectPlan(
                step,
                ("train-3", "train-1"),
                3,
                0,
                SamplingSpec(),
            ),
            _engine(),
        )[0]

    assert _same(batch(5, 1), batch(5, 1))
    assert not _same(batch(5, 1), batch(6, 1))
    assert not _same(batch(5, 1), batch(5, 2))


def test_what_was_sampled_is_in_the_batch_token_for_token_and_nothing_else_is_trained(make):
    engine = _engine(version=7)
    batch, _ = make(_chatter()).collect(
        CollectPlan(
            1,
            ("train-1", "train-2"),
            4,
            7,
            SamplingSpec(max_new_tokens=60),
        ),
        engine,
    )
    sampled = {}
    for requests in engine.calls:
        for request in requests:
            for seed in request.seeds:
                full = random_script(LETTERS, EOS)(request.prompt_ids, seed)
                sampled.setdefault(request.prompt_ids, []).append(full)
    for tokens, mask, behavior, version in _rows(batch):
        runs = _runs(mask)
        assert runs
        for start, end in runs:
            context, said = tuple(tokens[:start]), tokens[start:end]
            assert any(full[: len(said)] == said for full in sampled[context])
            assert behavior[start:end].tolist() == pytest.approx([-1 - t / 100 - start / 1000 for t in said])
            assert all(t != EOS for t in said[:-1])
        assert [v == 7 for v in version.tolist()] == mask
        assert all((b == 0) == (not m) for b, m in zip(behavior.tolist(), mask, strict=True))


def _runs(mask):
    edges = [i for i in range(len(mask) + 1) if (mask[i] if i < len(mask) else False) != (mask[i - 1] if i else False)]
    return list(zip(edges[::2], edges[1::2], strict=True))


def test_a_next_turn_continues_the_exact_ids_so_far(make):
    engine = _engine()
    batch, _ = make(_chatter()).collect(CollectPlan(1, ("train-1",), 3, 0, SamplingSpec(max_new_tokens=60)), engine)
    rows = [tokens for tokens, *_ in _rows(batch)]
    assert len(engine.calls) > 1
    for requests in engine.calls:
        for request in requests:
            assert any(tuple(row[: len(request.prompt_ids)]) == request.prompt_ids for row in rows)


def test_samples_of_one_prompt_share_a_request_and_a_prompt_id_and_drawn_twice_stay_two_groups(make):
    engine = _engine()
    service = make(_chatter(turns=1))
    batch, summary = service.collect(
        CollectPlan(
            1,
            ("train-1", "train-1", "train-2"),
            4,
            0,
            SamplingSpec(),
        ),
        engine,
    )
    assert [len(r.seeds) for r in engine.calls[0]] == [4, 4, 4]
    assert batch.group_id.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert batch.episode_id.tolist() == list(range(12))
    assert batch.prompt_id.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    seeds = [seed for r in engine.calls[0] for seed in r.seeds]
    assert len(set(seeds)) == 12
    assert (summary.groups, summary.episodes) == (3, 12)


def test_turn_rewards_are_summed_and_parts_are_kept(make):
    batch, summary = make(_chatter(turns=3)).collect(
        CollectPlan(1, ("train-1",), 6, 0, SamplingSpec(max_new_tokens=200)), _engine()
    )
    assert torch.equal(batch.rewards["reward"], batch.rewards["length"])
    assert batch.rewards["turn3"].tolist() == [1.0] * 6
    said = (batch.trained_per_row - 3).float()
    assert torch.equal(batch.rewards["reward"], said)
    assert summary.rewards["reward"].mean == pytest.approx(said.mean().item())
    assert summary.environment == {"said": 3.0}
    assert summary.turns == 3.0


def test_a_turns_reward_sits_on_its_last_sampled_token_and_turns_from_equal_states_share_an_anchor(make):
    batch, _ = make(_chatter(turns=3)).collect(
        CollectPlan(1, ("train-1", "train-2"), 4, 0, SamplingSpec(max_new_tokens=200)), _engine()
    )
    turn, reward, anchor = (batch.extras[name] for name in ("turn", "turn_rewards", "anchor"))
    assert torch.equal(turn >= 0, batch.loss_mask)
    for row in range(batch.rows):
        mine = batch.row_of_token == row
        assert turn[mine & batch.loss_mask].unique().tolist() == [0.0, 1.0, 2.0]
        assert float(reward[mine].sum()) == pytest.approx(float(batch.rewards["reward"][row]))
        for number in range(3):
            said = (mine & (turn == number)).nonzero()[:, 0]
            assert not reward[said[:-1]].any()
    first = anchor[turn == 0]
    group = batch.group_id[batch.row_of_token[turn == 0]]
    assert all(first[group == g].unique().numel() == 1 for g in (0, 1))
    assert first[group == 0].unique() != first[group == 1].unique()


def test_a_step_in_two_parts_counts_its_groups_on_and_greedy_answers_are_a_column(make):
    plan = CollectPlan(1, ("train-1",), 2, 0, SamplingSpec(max_new_tokens=60), first_group=3, greedy=True)
    batch, _ = make(_chatter(turns=1)).collect(plan, _engine())
    assert batch.group_id.tolist() == [3, 3] and batch.episode_id.tolist() == [6, 7]
    assert batch.column("greedy").unique().numel() == 1
    assert batch.column("truncated").tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("limits", "context", "stop"),
    [
        ({"max_new_tokens": 400}, 2000, "stop"),
        ({"max_new_tokens": 7}, 2000, "length"),
        ({"max_new_tokens": 400}, 9, "context"),
    ],
)
def test_limits_end_episodes_and_never_make_a_token_more(make, limits, context, stop):
    service = make(_chatter(turns=4), max_context=context)
    batch, summary = service.collect(
        CollectPlan(1, ("train-1",), 4, 0, SamplingSpec(**limits)), _engine(max_context=context)
    )
    assert set(summary.stops) == {stop}
    assert batch.trained_per_row.max() <= limits["max_new_tokens"]
    assert batch.lengths.max() <= context
    if stop == "length":
        assert batch.trained_per_row.tolist() == [7] * 4


def test_the_turn_limit_ends_episodes(make):
    _, summary = make(_chatter(max_turns=2)).collect(
        CollectPlan(1, ("train-1",), 4, 0, SamplingSpec(max_new_tokens=200)), _engine()
    )
    assert (summary.stops, summary.turns) == ({"max_turns": 4}, 2.0)


def test_failures_are_invalid_not_zero_and_train_nothing(make):
    service = make(_chatter(fail_on="x", max_invalid_fraction=1.0))
    batch, summary = service.collect(
        CollectPlan(
            1,
            ("train-1", "train-2"),
            8,
            0,
            SamplingSpec(max_new_tokens=60),
        ),
        _engine(),
    )
    bad = ~batch.valid
    assert 0 < bad.sum() < 16
    assert summary.invalid == {"planted": int(bad.sum())}
    assert batch.rewards["reward"][bad].isnan().all()
    assert not batch.rewards["reward"][batch.valid].isnan().any()
    assert batch.trained_per_row[bad].sum() == 0
    assert (batch.trained_per_row[batch.valid] > 0).all()
    assert summary.rewards["reward"].mean == pytest.approx(batch.rewards["reward"][batch.valid].mean().item())


def test_a_dead_environment_process_costs_its_episodes_and_the_step_goes_on(make):
    service = make(_chatter(die_on="x", max_invalid_fraction=1.0, processes=2))
    batch, summary = service.collect(
        CollectPlan(
            1,
            ("train-1", "train-2"),
            4,
            0,
            SamplingSpec(max_new_tokens=30),
        ),
        _engine(),
    )
    assert summary.metrics()["restarts/environment"] == summary.invalid["crash"] >= 1
    assert set(summary.invalid) <= {"crash", "process_lost"}
    assert batch.rows == 8
    service.collect(CollectPlan(2, ("train-1",), 2, 0, SamplingSpec(max_new_tokens=1)), _engine())


def test_an_episode_without_any_reward_is_invalid(make):
    spec = _chatter(silent=True, max_invalid_fraction=1.0)
    batch, summary = make(spec).collect(CollectPlan(1, ("train-1",), 3, 0, SamplingSpec(max_new_tokens=60)), _engine())
    assert summary.invalid == {"no_reward": 3}
    assert not batch.loss_mask.any()
    assert math.isnan(summary.rewards["reward"].mean)


def test_too_many_invalid_samples_stop_the_run_with_the_cause(make):
    service = make(_chatter(fail_on="x", max_invalid_fraction=0.1))
    with pytest.raises(
        TooManyInvalid, match=r"of 8 samples could not be scored \(\d+ planted\).*max_invalid_fraction` = 0.1"
    ):
        service.collect(CollectPlan(1, ("train-1",), 8, 0, SamplingSpec(max_new_tokens=60)), _engine())


def test_an_engine_with_old_weights_stops_the_step(make):
    with pytest.raises(WrongWeightVersion, match=r"weight version \[3\], but the step asked for 4"):
        make(_chatter()).collect(CollectPlan(1, ("train-1",), 2, 4, SamplingSpec()), _engine(version=3))


def test_a_template_that_rewrites_history_opens_a_new_segment(make, tmp_path):
    tokenizer = bpe_tokenizer(FORGETS_THOUGHTS)
    tokenizer.save_pretrained(tmp_path)
    say = [*tokenizer("<think>12</think>3", add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    service = make(_chatter(turns=2), tokenizer=str(tmp_path))
    batch, _ = service.collect(
        CollectPlan(1, ("train-1",), 2, 0, SamplingSpec()), ScriptedEngine(lambda prompt, seed: say)
    )
    assert batch.episode_id.tolist() == [0, 0, 1, 1]
    for tokens, mask, *_ in _rows(batch):
        assert [t for t, m in zip(tokens, mask, strict=True) if m] == say
        assert not any(mask[: len(mask) - len(say)])
    assert len(set(batch.prompt_id.tolist())) == 2
    texts = [tokenizer.decode(tokens) for tokens, *_ in _rows(batch)]
    assert "12" in texts[0]
    assert "<think>12</think>3<|im_end|>\n<|im_start|>user" not in texts[1]


def test_ids_that_the_tokenizer_would_not_choose_are_continued_as_they_are(make, tmp_path):
    tokenizer = bpe_tokenizer(CHATML)
    tokenizer.save_pretrained(tmp_path)
    spelled = [i for c in "hello" for i in tokenizer(c, add_special_tokens=False).input_ids]
    assert tokenizer("hello", add_special_tokens=False).input_ids != spelled
    say = [*spelled, tokenizer.eos_token_id]
    engine = ScriptedEngine(lambda prompt, seed: say)
    service = make(_chatter(turns=3), tokenizer=str(tmp_path))
    batch, _ = service.collect(CollectPlan(1, ("train-1",), 1, 0, SamplingSpec()), engine)
    ((tokens, mask, *_),) = _rows(batch)
    assert [tokens[a:b] for a, b in _runs(mask)] == [say] * 3
    assert [list(call[0].prompt_ids) for call in engine.calls] == [tokens[:a] for a, _ in _runs(mask)]


def _sums(**config) -> EnvironmentSpec:
    return EnvironmentSpec(name="arithmetic", config=config)


def _answering(wrong_above: int | None = None) -> ScriptedEngine:
    """Adds up what it reads; answers 0 where the sum is above a limit."""

    def script(prompt, seed):
        left, right = TOKENIZER.decode(list(prompt)).removeprefix("<bos>").removesuffix("=").split("+")
        total = int(left) + int(right)
        text = "0" if wrong_above is not None and total > wrong_above else str(total)
        return [*TOKENIZER(text, add_special_tokens=False).input_ids, EOS]

    return ScriptedEngine(script)


def test_single_turn_answers_are_graded_by_the_environment(make):
    service = make(_sums())
    ids = service.task_list("train").ids[:6]
    batch, summary = service.collect(
        CollectPlan(1, tuple(ids), 2, 0, SamplingSpec(max_new_tokens=8), show=8), _answering(wrong_above=99)
    )
    right = [float(sum(map(int, i.split("+"))) <= 99) for i in ids for _ in range(2)]
    assert batch.rewards["reward"].tolist() == right
    assert summary.frac_reward_zero_std == 1.0
    assert [s.group_id for s in summary.samples] == [0, 1, 2, 3, 4, 5, 0, 1]
    assert summary.samples[0].prompt == f"{ids[0]}="
    assert summary.metrics()["stop/stop"] == 12.0


def test_evaluation_is_greedy_and_avg_at_k_over_the_held_out_split(make):
    service = make(_sums())
    evaluation = EvaluationSpec(split="test", tasks=40, samples_per_task=3, max_new_tokens=8)
    report = service.evaluate(evaluation, _answering(wrong_above=120))
    expected = [float(sum(map(int, r.task_id.split("+"))) <= 120) for r in report.results]
    assert [r.greedy for r in report.results] == expected
    assert report.greedy == report.sampled == pytest.approx(sum(expected) / 40)
    assert report.metrics()["eval/avg@3"] == report.sampled
    assert [r.task_id for r in report.results] == list(service.task_list("test").ids[:40])
    assert service.evaluate(evaluation, _answering(wrong_above=120)).results == report.results


def test_an_empty_split_is_refused(make):
    service = make(_sums(validation=0))
    with pytest.raises(InputError, match="validation split has no tasks"):
        service.evaluate(EvaluationSpec(split="validation"), _answering())
    with pytest.raises(InputError, match="validation split has no tasks"):
        service.task_list("validation")


def test_a_prompt_longer_than_the_context_names_its_task_before_the_run(make):
    service = make(_sums(), max_context=7)
    with pytest.raises(InputError, match=r"task \d\d\+\d\d: the prompt has 7 tokens, but the context is 7"):
        service.check_prompts("test")
    check = make(_sums(), max_context=8).check_prompts("train")
    assert (check.tasks, check.longest) == (7332, 7)
    multi = make(_chatter()).check_prompts("train")
    assert (multi.tasks, multi.longest) == (8, 4)


def test_an_unknown_task_is_refused(make):
    with pytest.raises(InputError, match="task 'test-1' is not in the environment's train split"):
        make(_chatter()).collect(CollectPlan(1, ("test-1",), 2, 0, SamplingSpec()), _engine())


def test_records_say_everything_once_also_after_a_resume(make, tmp_path):
    service = make(_chatter())
    path = str(tmp_path / "logs" / "rollouts.jsonl")

    def step(n, offset):
        batch, _ = service.collect(
            CollectPlan(
                n,
                ("train-1", "train-2"),
                2,
                0,
                SamplingSpec(max_new_tokens=30),
            ),
            _engine(),
        )
        return batch, service.append_records(path, offset)

    first, offset = step(1, 0)
    step(2, offset)
    whole = (tmp_path / "logs" / "rollouts.jsonl").read_bytes()
    step(2, offset)
    assert (tmp_path / "logs" / "rollouts.jsonl").read_bytes() == whole
    lines = [json.loads(line) for line in whole.splitlines()]
    assert [(line["step"], line["episode"]) for line in lines] == [(s, e) for s in (1, 2) for e in range(4)]
    for line, (tokens, mask, *_) in zip(lines[:4], _rows(first), strict=True):
        segment = line["segments"][0]
        assert segment["prompt_ids"] + segment["ids"] == tokens
        assert [bool(s) for s in segment["sampled"]] == mask[len(segment["prompt_ids"]) :]
    assert [line["reward"] for line in lines[:4]] == first.rewards["reward"].tolist()
    with pytest.raises(InputError, match="the file was cut or replaced"):
        service.append_records(path, len(whole) + 1)
