"""Laws of the opponent's engine: its log-probs are those of the reference, or of the geometric mixture with the policy of the moment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from nemo_rl_like.cluster.context import RankContext
from nemo_rl_like.generation.opponent import OpponentEngine
from nemo_rl_like.generation.types import Completion, Request, Sampling
from nemo_rl_like.model import runtime
from nemo_rl_like.model.factory import build_model
from nemo_rl_like.model.forward import MegatronModel
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.hf_io import SafetensorsReader
from nemo_rl_like.spec.engine import EngineSpec
from nemo_rl_like.spec.online import MixtureOpponent, OpponentSpec, ReferenceOpponent
from nemo_rl_like.spec.policy import LayoutSpec
from tests.ports import free_port

from .tiny_models import VOCAB, save, tiny_llama

REQUESTS = [
    Request(f"r{i}", tuple((7 * i + 3 * j) % VOCAB for j in range(3 + 4 * i)), (10 * i, 10 * i + 1)) for i in range(4)
]
SHARE = 0.3


@pytest.fixture(scope="module")
def models() -> dict[str, LlamaForCausalLM]:
    return {"policy": tiny_llama(seed=0), "reference": tiny_llama(seed=1)}


@pytest.fixture(scope="module")
def built(
    models: dict[str, LlamaForCausalLM], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, MegatronModel]]:
    torch.set_num_threads(1)
    runtime.init_distributed(0, 1, "127.0.0.1", free_port(), LayoutSpec(), 120.0, 1)
    found = {}
    for name, model in models.items():
        folder = save(model, tmp_path_factory.mktemp(name))
        with SafetensorsReader(folder) as reader:
            config = ModelConfig.from_hf_folder(folder)
            found[name] = build_model(config, LayoutSpec(), torch.float32, weights=reader)
    yield found
    runtime.shutdown_distributed()


def engine(built: dict[str, MegatronModel], opponent: OpponentSpec, rows: int = 64) -> OpponentEngine:
    context = RankContext("policy", 0, 1, {}, {}, "127.0.0.1", 1, 1, Path("unused"), "localhost")
    return OpponentEngine(
        context,
        reference_handle=built["reference"],
        policy_handle=built["policy"],
        engine=EngineSpec(max_batch_rows=rows),
        opponent=opponent,
    )


@torch.no_grad()
def worst_gap(
    models: dict[str, LlamaForCausalLM], answer: list[list[Completion]], share: float, temperature: float
) -> float:
    """Largest |engine - transformers| log-prob, the mixture made of two tables of log-probs."""
    worst = 0.0
    for request, group in zip(REQUESTS, answer, strict=True):
        for sample in group:
            ids = torch.tensor([[*request.prompt_ids, *sample.ids]])
            tables = {name: model(ids).logits[0].double().log_softmax(-1) for name, model in models.items()}
            mixed = ((1 - share) * tables["policy"] + share * tables["reference"]) / temperature
            table = mixed.log_softmax(-1)
            for t, (token, logprob) in enumerate(zip(sample.ids, sample.logprobs, strict=True)):
                worst = max(worst, abs(float(table[len(request.prompt_ids) - 1 + t, token]) - logprob))
    return worst


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize(
    ("opponent", "share"),
    [(MixtureOpponent(share=SHARE), SHARE), (ReferenceOpponent(), 1.0)],
    ids=["mixture", "reference"],
)
def test_logprobs_are_those_of_what_it_samples_from(
    built: dict[str, MegatronModel],
    models: dict[str, LlamaForCausalLM],
    opponent: OpponentSpec,
    share: float,
    temperature: float,
) -> None:
    sampling = Sampling(temperature=temperature, max_new_tokens=12, stop_token_ids=(3, 5))
    answer = engine(built, opponent).generate(REQUESTS, sampling)
    assert worst_gap(models, answer, share, temperature) < 1e-4
    assert worst_gap(models, answer, 0.0, temperature) > 1e-2  # the control: the policy itself


def test_small_batches_change_no_sample(built: dict[str, MegatronModel]) -> None:
    sampling = Sampling(max_new_tokens=12, stop_token_ids=(3, 5, 7, 11))
    wide, narrow = (engine(built, MixtureOpponent(share=SHARE), rows).generate(REQUESTS, sampling) for rows in (64, 3))
    assert [[c.ids for c in group] for group in wide] == [[c.ids for c in group] for group in narrow]


def test_a_mixture_follows_the_policy(built: dict[str, MegatronModel]) -> None:
    both = engine(built, MixtureOpponent(share=0.01))
    sampling = Sampling(max_new_tokens=8)
    before = both.generate(REQUESTS, sampling)
    parameter = next(p for name, p in built["policy"].named_parameters() if name.endswith("word_embeddings.weight"))
    kept = parameter.detach().clone()
    with torch.no_grad():
        parameter.copy_(kept.flip(0))
    after = both.generate(REQUESTS, sampling)
    with torch.no_grad():
        parameter.copy_(kept)
    assert before != after
    assert both.generate(REQUESTS, sampling) == before
