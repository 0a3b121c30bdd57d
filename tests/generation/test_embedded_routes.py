"""The embedded engine's record of experts: those that transformers' routers choose, token by token, through turns and cuts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.cluster.context import RankContext
from nemo_rl_like.data.messages import Message
from nemo_rl_like.environment.types import Reset, Task
from nemo_rl_like.generation.embedded import EmbeddedEngine
from nemo_rl_like.generation.types import Completion, Request, Sampling
from nemo_rl_like.model import runtime
from nemo_rl_like.model.factory import build_model
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.rollout.live import LiveEpisode, Plan
from nemo_rl_like.rollout.runner import within
from nemo_rl_like.spec.engine import EngineSpec
from nemo_rl_like.spec.policy import LayoutSpec
from tests.generation.embedded_ranks import Job, free_port, run, start_engine
from tests.model import tiny

PROMPTS = ((3, 1, 4, 1, 5), (9, 2), (6, 5, 3, 5, 8, 9, 7))
SAMPLING = Sampling(max_new_tokens=9, stop_token_ids=tuple(range(40)))
REQUESTS = [Request(f"r{i}", prompt, (10 * i, 10 * i + 1, 10 * i + 2)) for i, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a dense first layer and groups of experts."""
    folder = tmp_path_factory.mktemp("model") / "deepseek_v3"
    tiny.make_model("deepseek_v3").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[EmbeddedEngine]:
    torch.set_num_threads(1)
    yield start_engine(folder, 0, 1, free_port(), LayoutSpec(), 64, record_routes=True)
    runtime.shutdown_distributed()


def chosen_by_transformers(folder: Path, row: tuple[int, ...]) -> list[list[list[int]]]:
    """[tokens][layers with experts] the sorted experts of each."""
    model = tiny.hugging_face(folder, torch.float64)
    routed: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if name.endswith("mlp"):
            experts = getattr(module, "experts", None)
            if experts is not None:
                experts.register_forward_pre_hook(lambda _, inputs: routed.append(inputs[1]))
    with torch.no_grad():
        model(torch.tensor([row]))
    return [[sorted(layer[t].tolist()) for layer in routed] for t in range(len(row))]


def told(sample: Completion, layers: int) -> list[list[list[int]]]:
    """The same of what the engine told; empty lists where it told nothing."""
    assert sample.prompt_routes is not None and sample.routes is not None
    both = (sample.prompt_routes + sample.routes).tensor().unflatten(1, (layers, -1))
    return [[sorted(e - 1 for e in layer.tolist() if e) for layer in token] for token in both]


def test_every_token_that_the_engine_read_went_where_transformers_sends_it(
    folder: Path, engine: EmbeddedEngine
) -> None:
    lengths = set()
    for request, samples in zip(REQUESTS, engine.generate(REQUESTS, SAMPLING), strict=True):
        for sample in samples:
            row = (*request.prompt_ids, *sample.ids)
            expected = chosen_by_transformers(folder, row)
            found = told(sample, len(expected[0]))
            assert found[:-1] == expected[:-1] and found[-1] == [[] for _ in expected[0]]
            lengths.add(len(sample.ids))
    assert len(lengths) > 1  # some rows left the batch before others


def test_recording_changes_no_sample_and_costs_a_prompt_one_record(engine: EmbeddedEngine) -> None:
    recorded = engine.generate(REQUESTS, SAMPLING)
    engine._decoder._routes, kept = None, engine._decoder._routes
    plain = engine.generate(REQUESTS, SAMPLING)
    engine._decoder._routes = kept
    assert [[c.ids for c in group] for group in plain] == [[c.ids for c in group] for group in recorded]
    assert all(c.routes is None and c.prompt_routes is None for group in plain for c in group)
    assert all(len({id(c.prompt_routes) for c in group}) == 1 for group in recorded)


def test_a_dialogue_has_each_tokens_first_record_and_those_of_what_was_said_between(
    folder: Path, engine: EmbeddedEngine
) -> None:
    task = Task("t", {})
    episode = LiveEpisode(Plan(0, 0, 0, task, "train", 1, 1), budget=100)
    episode.begin(Reset(()), PROMPTS[0])
    said = (11, 12, 13)
    for turn in range(2):
        request = Request(f"turn {turn}", episode.tokens, (turn,))
        ((completion,),) = engine.generate([request], Sampling(max_new_tokens=5))
        episode.take(within(completion, 4), Message("assistant", "said"))
        episode.segments[-1].add_environment(said)
    segment = episode.segments[-1].freeze()
    assert segment.routes is not None and segment.routes.tokens == len(segment.tokens)
    expected = chosen_by_transformers(folder, segment.tokens)
    record = segment.routes.tensor().unflatten(1, (len(expected[0]), -1))
    last = len(segment.tokens) - len(said) - 1  # sampled last, and what was said after it: the engine never read them
    found = [[sorted(e - 1 for e in layer.tolist()) for layer in token] for token in record[:last]]
    assert found == expected[:last] and not record[last:].any()


@pytest.mark.usefixtures("engine")
def test_a_dense_model_has_no_experts_to_record() -> None:
    dense = ModelConfig("llama", 64, 32, 48, 1, 2, 2, 16, 64, 10_000.0, 1e-5, False)
    model = build_model(dense, LayoutSpec(), torch.float32, seed=0)
    context = RankContext("policy", 0, 1, {}, {}, "127.0.0.1", 0, 1, Path("log"), "localhost")
    with pytest.raises(InputError, match="a llama model has no experts to record"):
        EmbeddedEngine(context, model_handle=model, engine=EngineSpec(), record_routes=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        LayoutSpec(tp=2, pp=2, sp=True, ep=2, etp=1),
        LayoutSpec(dp=2, tp=2, sp=True, ep=2, etp=1),
        LayoutSpec(dp=2, cp=2, ep=2),
    ],
    ids=str,
)
def test_every_rank_of_every_layout_tells_the_same_experts(
    folder: Path, engine: EmbeddedEngine, tmp_path: Path, layout: LayoutSpec
) -> None:
    alone = engine.generate(REQUESTS, SAMPLING)
    answers = run(folder, Job(REQUESTS, [SAMPLING], [PROMPTS[0]], 5, record_routes=True), layout, tmp_path)
    layers = 2
    for answer in answers:
        for mine, theirs in zip(alone, answer.completions[0], strict=True):
            assert [c.ids for c in mine] == [c.ids for c in theirs]
            assert [told(c, layers) for c in mine] == [told(c, layers) for c in theirs]
