"""Laws of text as data: held out by document, resumed exactly, added to other losses a batch at a time, and averages that follow."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_like.algorithms.objectives import Auxiliary, CrossEntropy, Objective
from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.data.tokenizer import character_tokenizer
from nemo_rl_like.spec.pretrain import PretrainStageSpec, PtxSpec
from nemo_rl_like.spec.sft import SftStageSpec
from nemo_rl_like.tokens.batch import TokenBatch
from nemo_rl_like.training import data_service
from nemo_rl_like.training.pretrain_service import PretrainService, check_text, sequence_tokens_of
from nemo_rl_like.training.pretraining import PretrainRecipe
from nemo_rl_like.training.ptx import Ptx
from nemo_rl_like.training.sft_service import SftService
from nemo_rl_like.training.supervised import SftRecipe

TOKENIZER = character_tokenizer("0123456789+=")
TEXTS = [str(i) * (3 + i % 5) for i in range(10)] + ["12+3=15"] * 2


@pytest.fixture(autouse=True)
def no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are handed over as they are."""
    monkeypatch.setattr(data_service.ray, "put", lambda value: value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer, a text and two conversations."""
    TOKENIZER.save_pretrained(str(tmp_path / "model"))
    (tmp_path / "text.txt").write_text("\n\n".join(TEXTS))
    line = '{"messages": [{"role": "user", "content": "1="}, {"role": "assistant", "content": "2", "weight": 0.5}]}\n'
    (tmp_path / "sft.jsonl").write_text(line * 2)
    return tmp_path


def stage(folder: Path, **fields: Any) -> PretrainStageSpec:
    data = {"paths": [str(folder / "text.txt")], "validation_fraction": 0.3}
    return PretrainStageSpec.model_validate({"data": data, "rows_per_step": 2, "sequence_tokens": 8, **fields})


class Workers:
    """The data group of one process."""

    def __init__(self, folder: Path) -> None:
        spec = stage(folder)
        options: Any = {"tokenizer_folder": str(folder / "model"), "seed": 1}
        sft: Any = SftStageSpec.model_validate({"data": {"path": str(folder / "sft.jsonl")}}).data
        self.services: dict[str, Any] = {
            "data": PretrainService(None, data=spec.data, sequence_tokens=8, validation_fraction=0.3, **options),
            "ptx": PretrainService(None, data=spec.data, sequence_tokens=8, **options),
            "sft": SftService(None, data=sft, environment=None, max_tokens=20, **options),
        }

    def call(self, service: str, method: str, *args: Any, what: str = "") -> Any:
        return getattr(self.services[service], method)(*args)


class Model:
    """A policy that notes what it is asked for."""

    def __init__(self) -> None:
        self.trained: list[tuple[TokenBatch, Objective, tuple[TokenBatch, Auxiliary] | None]] = []
        self.validated: list[TokenBatch] = []

    def train_step(
        self,
        batch: TokenBatch,
        rows: None,
        objective: Objective,
        what: str = "",
        auxiliary: tuple[TokenBatch, Auxiliary] | None = None,
    ) -> dict[str, float]:
        self.trained.append((batch, objective, auxiliary))
        return {"loss": 0.5, "nll": math.log(3)}

    def loss(self, batch: TokenBatch, objective: Objective, what: str = "") -> dict[str, float]:
        self.validated.append(batch)
        return {"loss": 0.25, "nll": math.log(2)}


class Moves:
    """Notes when the average is moved."""

    def __init__(self) -> None:
        self.alphas: list[float] = []

    def move(self, alpha: float) -> None:
        self.alphas.append(alpha)


def documents(batch: TokenBatch) -> set[str]:
    """What the batch's rows say."""
    return {TOKENIZER.decode(batch.select([i]).tokens.tolist()).removesuffix("<eos>") for i in range(batch.rows)}


def recipe(folder: Path, policy: Model, **fields: Any) -> PretrainRecipe:
    workers: Any = Workers(folder)
    average: Any = Moves()
    return PretrainRecipe.of(stage(folder, **fields), policy, workers, average)  # type: ignore[arg-type]


def test_held_out_documents_are_never_trained_and_perplexity_is_told(folder: Path) -> None:
    policy = Model()
    made = recipe(folder, policy, validate_every_steps=1, ema={"decay": 0.75})
    made.start()
    for step in range(1, 20):
        report = made.step(step)
    held = documents(policy.validated[0])
    assert held
    trained = set[str]().union(*(documents(batch) for batch, _, _ in policy.trained))
    for one in held:
        assert all(one not in other for other in trained if len(one) > 2)
    assert report.metrics["perplexity"] == pytest.approx(3)
    assert report.metrics["validation/perplexity"] == pytest.approx(2)
    moves: Any = made.average
    assert moves.alphas == [0.25] * 19


def test_a_resumed_recipe_goes_on_with_the_same_rows(folder: Path) -> None:
    whole, second = Model(), Model()
    one, other = recipe(folder, whole), recipe(folder, second)
    for step in range(1, 4):
        one.step(step)
    other.load_state(one.state())
    for step in range(4, 12):
        one.step(step), other.step(step)
    for (want, _, _), (got, _, _) in zip(whole.trained[3:], second.trained, strict=True):
        assert want.tokens.tolist() == got.tokens.tolist()


def test_sft_adds_the_next_rows_of_text_to_each_step_and_goes_on_with_them(folder: Path) -> None:
    spec = SftStageSpec.model_validate(
        {
            "data": {"path": "unused"},
            "examples_per_step": 2,
            "ptx": {"paths": [str(folder / "text.txt")], "coef": 0.5, "rows_per_step": 2},
        }
    )

    def made(policy: Model) -> SftRecipe:
        workers: Any = Workers(folder)
        workers.services["data"] = workers.services["sft"]
        assert spec.ptx is not None
        return SftRecipe.of(spec, policy, workers, None, Ptx(spec.ptx, workers))  # type: ignore[arg-type]

    whole, second = Model(), Model()
    one, other = made(whole), made(second)
    one.step(1)
    one.step(2)
    other.load_state(one.state())
    one.step(3), other.step(3)
    texts = []
    for batch, _, further in (*whole.trained, *second.trained):
        assert further is not None and further[1] == Auxiliary(CrossEntropy(), 0.5, "ptx")
        assert batch.extras["weight"].max() == 0.5
        texts.append(further[0].tokens.tolist())
    assert texts[0] != texts[1] and texts[2] == texts[3]


def test_rows_longer_than_the_context_and_text_that_holds_nothing_out_are_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="`sequence_tokens` is 9, more than the context of 8"):
        sequence_tokens_of(9, 8)
    assert sequence_tokens_of(None, 8) == 8
    few = stage(folder, validate_every_steps=1)
    few = few.model_copy(update={"data": few.data.model_copy(update={"validation_fraction": 0.01})})
    with pytest.raises(InputError, match=r"holds out none of 12 documents"):
        check_text(few, 1)


def test_text_has_a_weight_and_a_length() -> None:
    with pytest.raises(ValueError, match="coef"):
        PtxSpec.model_validate({"paths": ["x.txt"], "coef": 0.0})
    with pytest.raises(ValueError, match="sequence_tokens"):
        PtxSpec.model_validate({"paths": ["x.txt"], "sequence_tokens": 1})
