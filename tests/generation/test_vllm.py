"""Laws of the vLLM engine and of its weight sync; every fault must be told by name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.cluster.context import RankContext
from nemo_rl_like.generation import vllm
from nemo_rl_like.generation.probe import check_gap, probe_gap, probe_prompts
from nemo_rl_like.generation.types import Completion, Request, Sampling
from nemo_rl_like.generation.vllm import VllmEngine
from nemo_rl_like.spec.engine import EngineSpec
from nemo_rl_like.weights.errors import WeightSyncError
from nemo_rl_like.weights.manifest import compare
from nemo_rl_like.weights.shared_memory import SharedMemorySender

from .tiny_models import VOCAB, K, Q, named_weights, save, scores, tiny_llama

pytestmark = pytest.mark.service

LIMIT = 1e-3
EMBEDDING = "model.embed_tokens.weight"
PROBES = list(probe_prompts(VOCAB, count=8, tokens=64))
PROMPTS = tuple(tuple((7 * i + 3 * j) % VOCAB for j in range(20 + i)) for i in range(4))
KINDS = (
    EMBEDDING,
    "model.norm.weight",
    Q,
    K,
    "model.layers.1.self_attn.v_proj.weight",
    "model.layers.1.self_attn.o_proj.weight",
    "model.layers.1.mlp.gate_proj.weight",
    "model.layers.1.mlp.up_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
    "model.layers.1.input_layernorm.weight",
    "model.layers.1.post_attention_layernorm.weight",
)

Plant = Callable[[str], None]


def context(folder: Path) -> RankContext:
    """A one-rank place without Ray."""
    return RankContext("engine", 0, 1, {"dp": 1}, {"dp": 0}, "127.0.0.1", 0, 1, folder / "log", "localhost")


class Trainer:
    """Publishes weights and knows the right log-probs."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine, self.sender = engine, SharedMemorySender()
        self.model = tiny_llama()
        self._seed = 0

    def step(self) -> dict[str, Tensor]:
        """Other weights: what an optimizer step would leave."""
        self._seed += 1
        self.model = tiny_llama(seed=self._seed)
        return named_weights(self.model)

    def sync(self, weights: dict[str, Tensor]) -> None:
        """Publish `weights` as the next version and let the engine take them over."""
        version = self.engine.version + 1
        self.engine.update_weights(version, self.sender.publish(version, weights.items()))

    def probe(self) -> None:
        """The functional proof, against this trainer's own model."""
        report = probe_gap(self.engine.score(PROBES), scores(self.model, PROBES))
        check_gap(report, LIMIT, f"probe prompts at weight version {self.engine.version}")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    folder = tmp_path_factory.mktemp("model")
    save(tiny_llama(), folder)
    spec = EngineSpec(kind="vllm", kv_cache_gib=0.02, max_batch_rows=16, max_context=160)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm, "_PREFILL_TOKENS", 192)  # so that prompts have to wait for each other
        engine = VllmEngine(
            context(folder),
            model_folder=str(folder),
            dtype="float32",
            engine=spec,
            worker_extension=f"{__package__}.faulty_worker.FaultyWorker",
        )
    yield engine
    engine.close()


@pytest.fixture
def plant(engine: VllmEngine) -> Iterator[Plant]:
    """Plant a fault in the worker; it is gone after the test."""

    def ask(fault: str) -> None:
        engine._loop.run(engine._llm.collective_rpc("plant", args=(fault,)), 30, "planting a fault")

    yield ask
    ask("")


@pytest.fixture(scope="module")
def shared_trainer(engine: VllmEngine) -> Iterator[Trainer]:
    trainer = Trainer(engine)
    yield trainer
    trainer.sender.close()


@pytest.fixture
def trainer(shared_trainer: Trainer) -> Trainer:
    """A trainer whose weights the engine holds."""
    shared_trainer.sync(shared_trainer.step())
    shared_trainer.probe()
    return shared_trainer


def test_more_seeded_prompts_than_fit_one_pass_are_sampled_whole(engine: VllmEngine) -> None:
    """A prompt cut in two would rewind its request's generator, of which vLLM's engine dies on the CPU."""
    prompts = [tuple((11 * i + 5 * j) % VOCAB for j in range(100)) for i in range(12)]
    asked = [Request(f"long-{i}", prompt, (i,)) for i, prompt in enumerate(prompts)]
    completions = engine.generate(asked, Sampling(max_new_tokens=4, ignore_stop=True))
    assert [len(samples[0].ids) for samples in completions] == [4] * 12


def requests(samples: int) -> list[Request]:
    """Four prompts of different lengths."""
    return [Request(f"r{i}", p, tuple(100 * i + s for s in range(samples))) for i, p in enumerate(PROMPTS)]


def gaps(trainer: Trainer, completions: list[list[Completion]], temperature: float) -> list[float]:
    """|engine - trainer| of every sampled token."""
    out = []
    for prompt, samples in zip(PROMPTS, completions, strict=True):
        for sample in samples:
            reference = scores(trainer.model, [prompt + sample.ids], temperature)[0][len(prompt) - 1 :]
            out += [abs(a - b) for a, b in zip(reference, sample.logprobs, strict=True)]
    return out


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_logprobs_are_the_trainers_at_the_sampling_temperature(trainer: Trainer, temperature: float) -> None:
    got = trainer.engine.generate(requests(3), Sampling(temperature=temperature, max_new_tokens=16))
    assert max(gaps(trainer, got, temperature)) < 1e-4
    wrong = gaps(trainer, got, 1.0 if temperature != 1.0 else 0.9)
    assert max(wrong) > 0.05


def test_greedy_takes_the_trainers_most_likely_tokens_at_temperature_one(trainer: Trainer) -> None:
    got = trainer.engine.generate(requests(1), Sampling(greedy=True, max_new_tokens=8))
    assert max(gaps(trainer, got, 1.0)) < 1e-4
    for prompt, (sample,) in zip(PROMPTS, got, strict=True):
        with torch.inference_mode():
            best = trainer.model(torch.tensor([prompt + sample.ids])).logits[0].argmax(-1)
        assert best[len(prompt) - 1 : -1].tolist() == list(sample.ids)


def test_a_sample_depends_on_its_seed_only(trainer: Trainer) -> None:
    sampling = Sampling(max_new_tokens=16)
    together = trainer.engine.generate(requests(3), sampling)
    again = trainer.engine.generate(list(reversed(requests(3))), sampling)
    assert [[c.ids for c in g] for g in together] == [[c.ids for c in g] for g in reversed(again)]
    assert len({c.ids for c in together[0]}) == 3


def test_a_stop_token_is_kept_and_ignored_on_request(trainer: Trainer) -> None:
    free = trainer.engine.generate(requests(2), Sampling(max_new_tokens=16))
    stop = free[0][0].ids[5]
    stopped = trainer.engine.generate(requests(2), Sampling(max_new_tokens=16, stop_token_ids=(stop,)))
    for long, short in zip([c for g in free for c in g], [c for g in stopped for c in g], strict=True):
        cut = long.ids.index(stop) + 1 if stop in long.ids else 16
        assert short.ids == long.ids[:cut] and short.stop == ("stop" if stop in long.ids else "length")
    ignored = Sampling(max_new_tokens=16, stop_token_ids=(stop,), ignore_stop=True)
    assert [c.ids for g in trainer.engine.generate(requests(2), ignored) for c in g] == [c.ids for g in free for c in g]


def test_the_context_ends_a_completion_and_refuses_a_prompt_without_room(trainer: Trainer) -> None:
    (sample,) = trainer.engine.generate([Request("long", (5,) * 155, (1,))], Sampling(max_new_tokens=16))[0]
    assert len(sample.ids) == 5 and sample.stop == "length"
    with pytest.raises(InputError, match=r"'full'.*160 tokens.*context of 160"):
        trainer.engine.generate([Request("full", (5,) * 160, (1,))], Sampling())


def test_asynchronous_calls_give_what_synchronous_ones_give(trainer: Trainer) -> None:
    sampling = Sampling(max_new_tokens=8)

    async def ask() -> list[list[Completion]]:
        return list(await asyncio.gather(*(trainer.engine.agenerate(r, sampling) for r in requests(2))))

    assert [[c.ids for c in g] for g in asyncio.run(ask())] == [
        [c.ids for c in g] for g in trainer.engine.generate(requests(2), sampling)
    ]


def test_a_sync_reports_the_bytes_it_read_the_names_it_consumed_and_its_version(trainer: Trainer) -> None:
    weights = trainer.step()
    version = trainer.engine.version + 1
    handle = trainer.sender.publish(version, weights.items())
    report = trainer.engine.update_weights(version, handle)
    compare(handle.manifest, report.checksums, report.consumed, weights.keys())
    assert report.version == trainer.engine.version == version and report.nbytes == handle.manifest.nbytes
    samples = trainer.engine.generate(requests(2), Sampling(max_new_tokens=8))
    assert {c.version for group in samples for c in group} == {version}
    assert max(gaps(trainer, samples, 1.0)) < 1e-4
    trainer.probe()


def test_an_embedding_that_is_also_the_head_reaches_the_head(trainer: Trainer) -> None:
    weights = named_weights(trainer.model)
    weights[EMBEDDING] = weights[EMBEDDING] + 0.1 * torch.randn_like(weights[EMBEDDING])
    trainer.sync(weights)
    trainer.model.load_state_dict(weights, strict=False)
    trainer.probe()


def test_a_stale_head_is_caught_by_the_probe(trainer: Trainer, plant: Plant) -> None:
    plant("stale_head")
    trainer.sync(trainer.step())
    with pytest.raises(WeightSyncError, match=r"probe prompts.*p99 .* limit 0.001.*stale head"):
        trainer.probe()


@pytest.mark.parametrize("name", KINDS)
def test_a_perturbed_tensor_of_each_kind_is_caught_by_the_probe(trainer: Trainer, name: str) -> None:
    weights = trainer.step()
    weights[name] = weights[name] * 1.2
    trainer.sync(weights)
    with pytest.raises(WeightSyncError, match=r"p99 .* limit 0.001"):
        trainer.probe()


def test_q_and_k_exchanged_is_caught_by_the_probe(trainer: Trainer) -> None:
    weights = trainer.step()
    rows = weights[K].shape[0]
    weights[Q][:rows], weights[K] = weights[K].clone(), weights[Q][:rows].clone()
    trainer.sync(weights)
    with pytest.raises(WeightSyncError, match=r"p99 .* limit 0.001"):
        trainer.probe()


@pytest.mark.parametrize(
    ("fault", "message"),
    [("flip", rf"different bytes at the receiver \(sha256\): {Q}$"), ("unread", rf"sent but not received: {Q}$")],
)
def test_wrong_bytes_are_told_by_name_and_never_loaded(
    trainer: Trainer, plant: Plant, fault: str, message: str
) -> None:
    plant(fault)
    held, version = trainer.model, trainer.engine.version
    with pytest.raises(WeightSyncError, match=message):
        trainer.sync(trainer.step())
    trainer.model = held
    assert trainer.engine.version == version
    trainer.probe()


def test_a_tensor_that_the_trainer_does_not_send_is_told_by_name(trainer: Trainer) -> None:
    weights = trainer.step()
    del weights[Q]
    with pytest.raises(WeightSyncError, match=rf"needed by the engine's model but not sent: {Q}$"):
        trainer.sync(weights)


def test_a_tensor_that_the_model_does_not_consume_is_told_and_stops_generation(trainer: Trainer, plant: Plant) -> None:
    plant("skip")
    with pytest.raises(WeightSyncError, match=rf"received but not consumed by the engine's model: {Q}$"):
        trainer.sync(trainer.step())
    with pytest.raises(WeightSyncError, match="cannot generate"):
        trainer.engine.generate(requests(1), Sampling(max_new_tokens=1))


def test_an_old_version_is_refused_by_number(trainer: Trainer) -> None:
    version = trainer.engine.version
    old = trainer.sender.publish(version - 1, named_weights(trainer.model).items())
    with pytest.raises(
        WeightSyncError, match=rf"version {version + 1}: the published weights are of version {version - 1}"
    ):
        trainer.engine.update_weights(version + 1, old)
    with pytest.raises(WeightSyncError, match=rf"an old version; the engine holds {version} already"):
        trainer.engine.update_weights(version - 1, old)


@pytest.mark.parametrize(("answer", "message"), [(False, "refused to reset"), (True, "prefix cache was not reset")])
def test_a_prefix_cache_that_is_not_reset_is_told(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, answer: bool, message: str
) -> None:
    async def reset() -> bool:
        return answer

    monkeypatch.setattr(trainer.engine._llm, "reset_prefix_cache", reset)
    with pytest.raises(WeightSyncError, match=message):
        trainer.sync(trainer.step())


def test_old_prefix_entries_are_never_used_by_a_newer_version(trainer: Trainer) -> None:
    sampling = Sampling(greedy=True, max_new_tokens=2)
    trainer.engine.generate(requests(1), sampling)
    trainer.sync(trainer.step())
    assert max(gaps(trainer, trainer.engine.generate(requests(1), sampling), 1.0)) < 1e-4


def test_an_update_while_requests_are_in_flight_is_refused(trainer: Trainer) -> None:
    """The weights lie ready before the request starts, and that draws 48 samples to their full length: far longer than a call takes."""
    version = trainer.engine.version + 1
    handle = trainer.sender.publish(version, named_weights(trainer.model).items())
    long = Sampling(max_new_tokens=120, ignore_stop=True)

    async def both() -> None:
        running = asyncio.ensure_future(trainer.engine.agenerate(Request("slow", (3,) * 20, tuple(range(48))), long))
        while not trainer.engine._running:
            await asyncio.sleep(0.001)
        with pytest.raises(WeightSyncError, match="requests are in flight"):
            await asyncio.to_thread(trainer.engine.update_weights, version, handle)
        await running

    asyncio.run(both())
