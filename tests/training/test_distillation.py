"""Laws of the distillation recipe and its data: who answers, who is asked, what is attached, and that a resumed run goes on the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_rl_like.algorithms.distillation import Distillation
from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.data.render import Renderer
from nemo_rl_like.data.stored_logits import LogitsOrigin
from nemo_rl_like.data.tokenizer import character_tokenizer
from nemo_rl_like.generation.types import Completion, Request, Sampling
from nemo_rl_like.policy.gap import GapLimit
from nemo_rl_like.policy.top import TopK
from nemo_rl_like.rollout.collected import WrongWeightVersion
from nemo_rl_like.spec.distill import DistillStageSpec, domains_of
from nemo_rl_like.tokens.batch import TokenBatch
from nemo_rl_like.training import data_service, distillation_service, teacher_logits_service
from nemo_rl_like.training.distillation import DistillationRecipe, Teachers
from nemo_rl_like.training.distillation_service import DistillationService, check_distillation
from nemo_rl_like.training.teacher_logits_service import TeacherLogitsService

ORIGIN = LogitsOrigin("data", "tokenizer", (), 2, 1.0, 20)


@pytest.fixture(autouse=True)
def no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are handed over as they are."""
    for module in (data_service, distillation_service, teacher_logits_service):
        monkeypatch.setattr(module.ray, "put", lambda value: value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer, and a file of twelve conversations of two domains."""
    character_tokenizer("0123456789+=").save_pretrained(str(tmp_path / "model"))
    write(tmp_path, [(f"{i}+1=", str(i + 1), ("even", "odd")[i % 2]) for i in range(12)])
    return tmp_path


def write(folder: Path, rows: Sequence[tuple[str, str | None, str]]) -> None:
    lines = []
    for question, answer, domain in rows:
        messages = [{"role": "user", "content": question}]
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
        lines.append(json.dumps({"messages": messages, "domain": domain}))
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")


def stage(folder: Path, **fields: Any) -> DistillStageSpec:
    data = {"path": str(folder / "rows.jsonl"), **fields.pop("data", {})}
    given = {"teachers": [{"path": "teacher"}], "examples_per_step": 4, "top_k": 2, **fields}
    return DistillStageSpec.model_validate({"data": data, **given})


class Engine:
    """Answers every prompt with its seed's last digits; notes what is asked, and its weight version."""

    def __init__(self) -> None:
        self.version, self.says_version = 0, None
        self.requests: list[Request] = []
        self.synced: list[int] = []

    def client(self) -> Engine:
        return self

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        self.requests += requests
        version = self.version if self.says_version is None else self.says_version
        return [[Completion((4 + r.seeds[0] % 10, 2), (-0.5, -0.25), version, "stop")] for r in requests]

    def sync(self, version: int) -> dict[str, float]:
        self.version = version
        self.synced.append(version)
        return {}

    def probe(self) -> dict[str, float]:
        return {}

    def gap_limit(self) -> GapLimit:
        return GapLimit(0.1, self.version)


class Model:
    """A policy that notes what it is asked for; as a teacher it tells its own number."""

    def __init__(self, number: int = 0) -> None:
        self.number, self.service = number, f"teacher-{number}"
        self.asked: list[TopK] = []
        self.trained: list[tuple[TokenBatch, Any, float, GapLimit | None]] = []
        self.validated: list[tuple[TokenBatch, float]] = []

    def top_logprobs(self, batch: TokenBatch, asked: TopK, what: str) -> tuple[Tensor, Tensor]:
        self.asked.append(asked)
        here = (asked.rows(batch)[batch.row_of_token] & batch.loss_mask)[:, None].expand(-1, asked.k)
        return torch.where(here, self.number + 3, 0).int(), torch.where(here, -float(self.number + 1), 0.0)

    def train_step(
        self, batch: TokenBatch, rows: None, objective: Any, temperature: float, gap: GapLimit | None, what: str
    ) -> dict[str, float]:
        self.trained.append((batch, objective, temperature, gap))
        return {"loss": 0.5}

    def loss(self, batch: TokenBatch, objective: Any, what: str, temperature: float) -> dict[str, float]:
        self.validated.append((batch, temperature))
        return {"loss": 0.25}


def workers(spec: DistillStageSpec, folder: Path, origin: LogitsOrigin = ORIGIN) -> Any:
    """The data group of one process."""
    data = DistillationService(
        None,
        data=spec.data,
        teachers=domains_of(spec.teachers),
        origin=origin,
        tokenizer_folder=str(folder / "model"),
        seed=1,
        max_tokens=20,
    )
    return SimpleNamespace(data=data, call=lambda service, method, *args, what="": getattr(data, method)(*args))


def recipe(
    spec: DistillStageSpec, folder: Path, policy: Model, engine: Engine | None, teachers: Sequence[Model]
) -> DistillationRecipe:
    models: Any = tuple(teachers)
    asked = Teachers(models, TopK(2, spec.temperature, below=16))
    return DistillationRecipe.of(spec, policy, workers(spec, folder), asked, engine)  # type: ignore[arg-type]


def test_half_of_a_step_is_sampled_and_all_of_it_is_told_by_the_teacher(folder: Path) -> None:
    policy, teacher, engine = Model(), Model(1), Engine()
    made = recipe(stage(folder, beta=0.2), folder, policy, engine, [teacher])
    made.load_state({})
    made.start()
    report = made.step(1)
    ((batch, objective, temperature, gap),) = policy.trained
    assert isinstance(objective, Distillation) and objective.options.beta == 0.2 and temperature == 1.0
    assert batch.columns["sampled"].tolist() == [1, 1, 0, 0] and gap == GapLimit(0.1, 0)
    mask = batch.loss_mask
    assert batch.extras["teacher_logprobs"][mask].unique().tolist() == [-2.0]
    assert batch.extras["teacher_ids"][mask].unique().tolist() == [4] and not batch.extras["teacher_ids"][~mask].any()
    assert teacher.asked == [TopK(2, 1.0, below=16)]
    assert engine.synced == [0, 1] and report.metrics["completions/mean_length"] == 2.0
    sampled = batch.tokens[: int(batch.cu_seqlens[1])].tolist()
    assert sampled[-2] == 4 + engine.requests[0].seeds[0] % 10 and sampled[:-2] == list(engine.requests[0].prompt_ids)


def test_without_a_share_nothing_is_sampled_or_synced(folder: Path) -> None:
    policy = Model()
    made = recipe(stage(folder, on_policy_fraction=0), folder, policy, None, [Model()])
    made.start()
    made.step(1)
    batch, _, _, gap = policy.trained[0]
    assert not batch.columns["sampled"].any() and gap is None


def test_the_engines_log_probs_are_compared_only_at_the_same_temperature(folder: Path) -> None:
    policy = Model()
    recipe(stage(folder, temperature=2.0), folder, policy, Engine(), [Model()]).step(1)
    assert policy.trained[0][2:] == (2.0, None)


def test_each_row_is_told_by_the_teacher_of_its_domain(folder: Path) -> None:
    policy = Model()
    names = [{"path": "a", "domain": "odd"}, {"path": "b"}]
    teachers = [Model(0), Model(1)]
    made = recipe(stage(folder, teachers=names, on_policy_fraction=0), folder, policy, None, teachers)
    made.step(1)
    batch = policy.trained[0][0]
    assert [t.asked[0].teacher for t in teachers] == [0, 1]
    for row in range(batch.rows):
        start, end = batch.cu_seqlens[row : row + 2].tolist()
        odd = int(batch.tokens[start + 1]) % 2 == 1  # ids 4.. are the digits, after the begin token
        told = batch.extras["teacher_logprobs"][start:end][batch.loss_mask[start:end]]
        assert told.unique().tolist() == [-1.0 if odd else -2.0]


def test_a_resumed_run_samples_and_trains_the_same(folder: Path) -> None:
    spec = stage(folder)
    whole, cut = Model(), Model()
    made = recipe(spec, folder, whole, Engine(), [Model()])
    for step in (1, 2, 3):
        made.step(step)
    begun = recipe(spec, folder, cut, Engine(), [Model()])
    begun.step(1)
    begun.step(2)
    saved = json.loads(json.dumps(begun.state()))
    engine = Engine()
    again = recipe(spec, folder, cut, engine, [Model()])
    again.load_state(saved)
    again.start()
    again.step(3)
    assert engine.synced == [2, 3] and again.updates == {"policy": 3}
    for (a, *_), (b, *_) in zip(whole.trained, cut.trained, strict=True):
        assert torch.equal(a.tokens, b.tokens) and torch.equal(a.version, b.version)


def test_validation_asks_the_teachers_once_at_the_stages_temperature(folder: Path) -> None:
    policy, teacher = Model(), Model()
    spec = stage(
        folder, on_policy_fraction=0, temperature=1.5, validate_every_steps=1, data={"validation_fraction": 0.25}
    )
    made = recipe(spec, folder, policy, None, [teacher])
    made.start()
    assert made.before_first_step().metrics == {"validation/loss": 0.25}
    made.step(1)
    (first, temperature), (second, _) = policy.validated
    assert first is second and temperature == 1.5 and "teacher_ids" in first.extras
    assert len(teacher.asked) == 2


def test_responses_of_other_weights_stop_the_run(folder: Path) -> None:
    engine = Engine()
    engine.says_version = 5
    with pytest.raises(WrongWeightVersion, match=r"weight version \[5\], but the step asked for 0"):
        recipe(stage(folder), folder, Model(), engine, [Model()]).step(1)


def test_a_prompt_without_room_for_an_answer_is_dropped_and_counted(folder: Path) -> None:
    write(folder, [("1" * (25 if i == 0 else 2), None, "even") for i in range(4)])
    policy = Model()
    report = recipe(stage(folder, on_policy_fraction=1), folder, policy, Engine(), [Model()]).step(1)
    assert report.metrics["dropped_examples"] == 1 and policy.trained[0][0].rows == 3


# -- stored log-probs


def store(folder: Path, spec: DistillStageSpec, teacher: Model, *, per_shard: int = 5) -> None:
    (folder / "logits").mkdir()
    service = TeacherLogitsService(
        None,
        path=spec.data.path,
        teachers={None: 0},
        origin=ORIGIN,
        folder=str(folder / "logits"),
        tokenizer_folder=str(folder / "model"),
        examples_per_shard=per_shard,
    )
    count, missing = service.missing()
    assert (count, missing) == (3, [0, 1, 2])
    for number in missing:
        batch: Any = service.batch(number)
        ids, logprobs = teacher.top_logprobs(batch, TopK(2, 1.0), "")
        service.write(number, batch, [ids], [logprobs])
        assert service.missing() == (3, missing[number + 1 :])
    service.finish()


class Varied(Model):
    """A teacher that says something of its own of every token."""

    def top_logprobs(self, batch: TokenBatch, asked: TopK, what: str) -> tuple[Tensor, Tensor]:
        keys = torch.stack([batch.tokens * 31 + 7, batch.tokens * 17 + 3], dim=1)
        mask = batch.loss_mask[:, None]
        return torch.where(mask, keys % 16, 0).int(), torch.where(mask, -(keys % 97) / 97.0 - 0.1, 0.0)


def test_stored_log_probs_are_those_of_the_live_teacher_bit_for_bit(folder: Path) -> None:
    live, stored, teacher = Model(), Model(), Varied()
    spec = stage(folder, on_policy_fraction=0)
    store(folder, spec, teacher)
    made = recipe(spec, folder, live, None, [teacher])
    other = recipe(
        stage(folder, on_policy_fraction=0, teachers=[], data={"stored_logits": str(folder / "logits")}),
        folder, stored, None, [],
    )  # fmt: skip
    for step in (1, 2, 3, 4):
        made.step(step)
        other.step(step)
    for (a, *_), (b, *_) in zip(live.trained, stored.trained, strict=True):
        assert torch.equal(a.tokens, b.tokens)
        for name in ("teacher_ids", "teacher_logprobs"):
            assert torch.equal(a.extras[name], b.extras[name]) and a.extras[name].dtype == b.extras[name].dtype


def test_stored_log_probs_of_another_origin_are_refused(folder: Path) -> None:
    spec = stage(folder, on_policy_fraction=0)
    store(folder, spec, Varied())
    other = stage(folder, on_policy_fraction=0, teachers=[], data={"stored_logits": str(folder / "logits")})
    with pytest.raises(InputError, match="top_k is 3 here and 2 there"):
        workers(other, folder, replace(ORIGIN, top_k=3))


def test_conversations_without_a_trained_token_are_stored_as_none(folder: Path) -> None:
    write(folder, [("1=", None, "even"), ("2=", None, "odd"), ("3=", "3", "odd")])
    (folder / "logits").mkdir()
    service = TeacherLogitsService(
        None,
        path=str(folder / "rows.jsonl"),
        teachers={None: 0},
        origin=ORIGIN,
        folder=str(folder / "logits"),
        tokenizer_folder=str(folder / "model"),
        examples_per_shard=2,
    )
    assert service.batch(0) is None
    service.write_empty(0)
    batch: Any = service.batch(1)
    ids, logprobs = Varied().top_logprobs(batch, TopK(2, 1.0), "")
    assert service.write(1, batch, [ids], [logprobs]) == 2
    service.finish()
    renderer = Renderer.load(folder / "model")
    stored = distillation_service.open_stored(str(folder / "logits"), ORIGIN)
    assert stored.of(1).tokens.numel() == 0 and stored.of(2).tokens[-1] == renderer.end_of_turn_id


# -- data of the stage


@pytest.mark.parametrize(
    ("rows", "fields", "words"),
    [
        ([("1=", None, "x")], {}, ("rows.jsonl:1", "no assistant message", "0.5 of the responses", "set `on_policy")),
        ([("1=", "2", "law")], {"teachers": [{"path": "a", "domain": "x"}]}, ("rows.jsonl:1", "'law'", "are x")),
        (
            [("1=", "2", "x"), ("2=", "2", "x")],
            {"validate_every_steps": 1, "data": {"validation_fraction": 0.1}},
            ("`data.validation_fraction` 0.1 holds out no", "raise it"),
        ),
    ],
)
def test_data_that_does_not_fit_the_stage_is_refused(
    folder: Path, rows: list[tuple[str, str | None, str]], fields: dict[str, Any], words: tuple[str, ...]
) -> None:
    write(folder, rows)
    with pytest.raises(InputError) as caught:
        check_distillation(stage(folder, **fields), 1)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_prompts_alone_will_do_where_everything_is_sampled(folder: Path) -> None:
    write(folder, [("1=", None, "x"), ("2=", None, "x")])
    check_distillation(stage(folder, on_policy_fraction=1), 1)
    (folder / "rows.jsonl").write_text('{"messages": [{"role": "assistant", "content": "1"}]}\n')
    with pytest.raises(InputError, match="no message before the response"):
        check_distillation(stage(folder, on_policy_fraction=1), 1)
