"""Laws of the preference recipe and its data: what is attached, what moves when, and that a resumed run goes on the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_like.algorithms.objectives import Objective
from nemo_rl_like.algorithms.preference import Kto, Preference
from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.checkpoint.layout import ModelIdentity
from nemo_rl_like.checkpoint.reader import CheckpointReader
from nemo_rl_like.checkpoint.shards import section_writer
from nemo_rl_like.checkpoint.writer import CheckpointWriter
from nemo_rl_like.data.tokenizer import character_tokenizer
from nemo_rl_like.policy.client import TrainedModels
from nemo_rl_like.policy.mixer import ReferenceMixer
from nemo_rl_like.spec.preference import PreferenceStageSpec
from nemo_rl_like.tensors.shards import INDEX, ShardFile
from nemo_rl_like.tokens.batch import TokenBatch
from nemo_rl_like.training import data_service
from nemo_rl_like.training.preference import PreferenceRecipe
from nemo_rl_like.training.preference_service import PreferenceService, check_preferences


@pytest.fixture(autouse=True)
def no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are handed over as they are."""
    monkeypatch.setattr(data_service.ray, "put", lambda value: value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer, and a file of twelve pairs."""
    character_tokenizer("0123456789+=").save_pretrained(str(tmp_path / "model"))
    rows = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": str(i + 2), "margin": i} for i in range(12)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def stage(folder: Path, **fields: Any) -> PreferenceStageSpec:
    data = {"path": str(folder / "pairs.jsonl"), **fields.pop("data", {})}
    return PreferenceStageSpec.model_validate({"data": data, "pairs_per_step": 3, **fields})


class Workers:
    """The data group of one process."""

    def __init__(self, spec: PreferenceStageSpec, folder: Path) -> None:
        self.data = PreferenceService(
            None, data=spec.data, unpaired=spec.unpaired, tokenizer_folder=str(folder / "model"), seed=1, max_tokens=20
        )

    def call(self, service: str, method: str, *args: Any, what: str = "") -> Any:
        if service == "data":
            return getattr(self.data, method)(*args)
        assert (service, method) == ("steps", "attach")
        batch, name, values = args
        return batch.with_extras(**{name: values})


class Model:
    """A policy that notes what it is asked for; its log-probs are a constant."""

    def __init__(self, logprob: float = -1.0) -> None:
        self.logprob = logprob
        self.trained: list[tuple[TokenBatch, Objective]] = []
        self.validated: list[TokenBatch] = []

    def logprobs(self, batch: TokenBatch, temperature: float, what: str = "") -> tuple[torch.Tensor, dict[str, float]]:
        assert temperature == 1.0
        return torch.full((batch.tokens.numel(),), self.logprob), {}

    def train_step(self, batch: TokenBatch, rows: None, objective: Objective, what: str = "") -> dict[str, float]:
        self.trained.append((batch, objective))
        return {"loss": 0.5, "rewards/chosen": 0.4, "rewards/rejected": -0.2}

    def loss(self, batch: TokenBatch, objective: Objective, what: str = "") -> dict[str, float]:
        self.validated.append(batch)
        return {"loss": 0.25}


class Moves:
    """Notes when the reference is moved."""

    def __init__(self) -> None:
        self.alphas: list[float] = []

    def move(self, alpha: float) -> None:
        self.alphas.append(alpha)


def recipe(spec: PreferenceStageSpec, folder: Path, policy: Model, *, moving: Moves | None = None) -> PreferenceRecipe:
    reference: Any = Model(-2.0) if spec.needs_reference else None
    workers: Any = Workers(spec, folder)
    return PreferenceRecipe.of(spec, policy, workers, reference, moving)  # type: ignore[arg-type]


def test_a_step_trains_the_next_pairs_with_the_references_log_probs(folder: Path) -> None:
    policy = Model()
    made = recipe(stage(folder), folder, policy)
    made.load_state({})
    for step in (1, 2):
        report = made.step(step)
    (first, objective), (second, _) = policy.trained
    assert isinstance(objective, Preference)
    assert first.rows == second.rows == 6 and not torch.equal(first.tokens, second.tokens)
    assert first.extras["reference"].unique().tolist() == [-2.0]
    assert report.metrics["tokens"] == second.tokens.numel() and made.updates == {"policy": 2}


def test_a_loss_without_a_reference_attaches_none(folder: Path) -> None:
    policy = Model()
    recipe(stage(folder, losses=[{"kind": "simpo"}]), folder, policy).step(1)
    assert "reference" not in policy.trained[0][0].extras


def test_kto_trains_on_unpaired_pairs_with_mismatched_rows(folder: Path) -> None:
    policy = Model()
    spec = stage(folder, losses=[{"kind": "kto"}], data={"unpair": True}, pairs_per_step=5)
    recipe(spec, folder, policy).step(1)
    batch, objective = policy.trained[0]
    assert isinstance(objective, Kto)
    assert batch.columns["mismatched"].tolist() == [0.0, 1.0] * 5


def test_a_resumed_run_sees_the_same_steps_and_the_same_delta(folder: Path) -> None:
    spec = stage(folder, losses=[{"kind": "bco", "beta": 0.5}])
    whole, cut = Model(), Model()
    made = recipe(spec, folder, whole)
    deltas = [made.step(step).metrics["bco/delta"] for step in (1, 2, 3)]
    begun = recipe(spec, folder, cut)
    begun.step(1)
    begun.step(2)
    saved = json.loads(json.dumps(begun.state()))
    again = recipe(spec, folder, cut)
    again.load_state(saved)
    assert again.step(3).metrics["bco/delta"] == deltas[2]
    assert all(torch.equal(a.tokens, b.tokens) for (a, _), (b, _) in zip(whole.trained, cut.trained, strict=True))


def test_bcos_delta_is_the_mean_reward_of_the_steps_before(folder: Path) -> None:
    policy = Model()
    made = recipe(stage(folder, losses=[{"kind": "bco", "beta": 0.5}]), folder, policy)
    deltas = [made.step(step).metrics["bco/delta"] for step in (1, 2, 3)]
    assert deltas == pytest.approx([0.0, 0.1, 0.1])
    objectives = [objective for _, objective in policy.trained]
    assert [o.mean_log_ratio for o in objectives if isinstance(o, Preference)] == pytest.approx([0.0, 0.2, 0.2])


def test_the_reference_moves_at_its_rhythm(folder: Path) -> None:
    moves = Moves()
    spec = stage(folder, reference_sync={"every_steps": 2, "alpha": 0.25})
    made = recipe(spec, folder, Model(), moving=moves)
    counts = []
    for step in range(1, 6):
        made.step(step)
        counts.append(len(moves.alphas))
    assert counts == [0, 1, 1, 2, 2] and set(moves.alphas) == {0.25}


def test_validation_reads_held_out_pairs_with_the_reference_of_the_moment(folder: Path) -> None:
    policy = Model()
    spec = stage(folder, validate_every_steps=1, data={"validation_fraction": 0.25})
    made = recipe(spec, folder, policy)
    made.start()
    assert made.before_first_step().metrics == {"validation/loss": 0.25}
    assert made.reference is not None
    made.reference.logprob = -3.0  # type: ignore[attr-defined]
    assert made.step(1).metrics["validation/loss"] == 0.25
    before, after = policy.validated
    assert before.rows == after.rows == 6
    assert before.extras["reference"].unique().tolist() == [-2.0] and after.extras["reference"].unique().tolist() == [
        -3.0
    ]
    seen = {tuple(policy.trained[0][0].tokens.tolist())}
    assert tuple(before.tokens.tolist()) not in seen


# -- data of the stage


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"data": {"path": "none.jsonl"}}, ("none.jsonl", "no such file")),
        ({"losses": [{"kind": "kto"}]}, ("pairs.jsonl:1", "`completion`", "data.unpair: true")),
        (
            {"validate_every_steps": 1, "data": {"validation_fraction": 0.01}},
            ("holds out 0 examples", "`validate_every_steps` needs some", "raise it"),
        ),
    ],
)
def test_data_that_does_not_fit_the_stage_is_refused(
    folder: Path, fields: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(InputError) as caught:
        check_preferences(stage(folder, **fields), 1)
    for word in words:
        assert word in str(caught.value)


def test_an_offset_needs_margins(folder: Path) -> None:
    spec = stage(folder, losses=[{"kind": "dpo", "offset": 1.0}])
    check_preferences(spec, 1)
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    bare = [{name: value for name, value in row.items() if name != "margin"} for row in rows]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bare))
    with pytest.raises(InputError, match="has no `margin`, which the `offset` of dpo"):
        check_preferences(spec, 1)


def test_prompts_do_not_straddle_the_validation_split(folder: Path) -> None:
    rows = [{"prompt": f"{i % 4}+", "chosen": str(i), "rejected": str(i + 1)} for i in range(16)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = stage(folder, data={"validation_fraction": 0.5}, pairs_per_step=8)
    service = Workers(spec, folder).data
    held, trained = service.validation(100), service.batch(service.start(), 8).batch
    starts = [{tuple(b.tokens[s : s + 3].tolist()) for s in b.cu_seqlens[:-1].tolist()} for b in (held, trained)]
    assert len(starts[0]) == len(starts[1]) == 2 and not starts[0] & starts[1]


# -- a reference that moves


def test_mixing_moves_the_reference_by_its_share_and_leaves_the_policy() -> None:
    policy, reference = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    kept, old = policy.weight.detach().clone(), reference.weight.detach().clone()
    mixer = ReferenceMixer(None, policy=policy, reference=reference)  # type: ignore[arg-type]
    mixer.mix(0.25)
    torch.testing.assert_close(reference.weight.detach(), 0.25 * kept + 0.75 * old)
    mixer.mix(1.0)
    assert torch.equal(reference.weight, policy.weight) and torch.equal(policy.weight, kept)


class Stored:
    """A policy of one tensor."""

    adapted = False

    def __init__(self, value: float) -> None:
        self.value = value
        self.loaded: list[tuple[Path, int | None, str]] = []

    def save(self, folder: Path, prefix: str = "") -> tuple[ShardFile, ...]:
        with section_writer(folder, f"{prefix}weights") as shards:
            shards.add("w", torch.full((3,), self.value))
        return shards.files

    def load(self, folder: Path, updates: int | None = None, prefix: str = "") -> None:
        self.loaded.append((folder, updates, prefix))


def test_a_checkpoint_carries_the_moved_reference_and_gives_it_back(tmp_path: Path) -> None:
    policy, reference = Stored(1.0), Stored(2.0)
    models = TrainedModels(policy, reference=reference)  # type: ignore[arg-type]
    with CheckpointWriter(tmp_path, 3, ModelIdentity("x", "a model"), models.sections) as writer:
        final = writer.commit({}, models.save(writer.begin()))
    found = CheckpointReader.latest(tmp_path)
    assert found is not None and found.folder == final
    entries = {entry.path for entry in found.manifest.files}
    assert {f"reference-weights/{INDEX}", "reference-weights/model-00000-00000.safetensors"} <= entries
    models.load(final, {"policy": 7})
    assert policy.loaded == [(final, 7, "")] and reference.loaded == [(final, None, "reference-")]
