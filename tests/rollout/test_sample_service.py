"""Laws of drawing a dataset: the cut into batches changes nothing, and what cannot be scored or was cut is never kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.data.datasets import load_messages
from nemo_rl_like.data.tokenizer import character_tokenizer
from nemo_rl_like.rollout.choice import Counts
from nemo_rl_like.rollout.sample_service import SampleService, read_part
from nemo_rl_like.spec.environment import EnvironmentSpec
from nemo_rl_like.spec.sample import SampleStageSpec
from nemo_rl_like.spec.stage import SamplingSpec
from tests.rollout.scripted_engine import ScriptedEngine, random_script

ALPHABET = "0123456789+=x"
TOKENIZER = character_tokenizer(ALPHABET)
LETTERS = TOKENIZER(ALPHABET, add_special_tokens=False).input_ids
TASKS = 7


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SampleService]:
    folder = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(folder)
    spec = EnvironmentSpec(name="tests.rollout.conversations:Chatter", config={}, processes=0)
    made = SampleService(
        None, environment_json=spec.model_dump_json(), tokenizer_folder=str(folder), run_seed=1, max_context=256
    )
    yield made
    made.close()


def draw(service: SampleService, folder: Path, stage: SampleStageSpec, size: int) -> tuple[Counts, list[str]]:
    """Counts and lines of the first tasks, drawn `size` at a time."""
    engine = ScriptedEngine(random_script(LETTERS, TOKENIZER.eos_token_id))
    counts, lines = Counts(), list[str]()
    for first in range(0, TASKS, size):
        file = folder / f"{size}-{first}.json"
        told = service.draw(stage, first, min(size, TASKS - first), 0, engine, str(file))
        part = read_part(file)
        assert part.counts == told
        counts, lines = counts + told, [*lines, *part.lines]
    return counts, lines


@pytest.mark.parametrize("choose", ["best", "random"])
def test_the_cut_into_batches_changes_nothing(service: SampleService, tmp_path: Path, choose: str) -> None:
    stage = SampleStageSpec.model_validate({"samples_per_prompt": 5, "keep": 2, "choose": choose})
    whole = draw(service, tmp_path, stage, TASKS)
    assert whole == draw(service, tmp_path, stage, 1) == draw(service, tmp_path, stage, 3)
    assert (whole[0].prompts, whole[0].samples) == (TASKS, 5 * TASKS)
    assert whole[0].kept == len(whole[1]) > 0


def test_what_is_kept_is_conversations_that_sft_reads(service: SampleService, tmp_path: Path) -> None:
    stage = SampleStageSpec(samples_per_prompt=5, keep=5, keep_truncated=True)
    counts, lines = draw(service, tmp_path, stage, TASKS)
    (tmp_path / "dataset.jsonl").write_text("".join(f"{line}\n" for line in lines))
    examples = load_messages(tmp_path / "dataset.jsonl").examples
    assert len(examples) == counts.kept
    assert any(sum(m.role == "assistant" for m in e.messages) > 1 for e in examples), "several turns"
    assert all(e.messages[-1].role == "assistant" for e in examples)
    assert len({(e.fields["task"], e.messages) for e in examples}) == len(examples), "equal ones count once"


def test_episodes_that_a_limit_cut_are_left_out_unless_asked_for(service: SampleService, tmp_path: Path) -> None:
    short = SamplingSpec(max_new_tokens=1)
    stage = SampleStageSpec(samples_per_prompt=4, sampling=short)
    counts, lines = draw(service, tmp_path, stage, TASKS)
    assert counts.truncated > 0 and counts.kept < TASKS
    every, _ = draw(service, tmp_path, stage.model_copy(update={"keep_truncated": True}), TASKS)
    assert every.kept > counts.kept == len(lines)


def test_a_damaged_part_is_told_by_name(tmp_path: Path) -> None:
    file = tmp_path / "00000000.json"
    file.write_text(json.dumps({"lines": []}))
    with pytest.raises(InputError, match=r"00000000\.json: is no part of a sample stage"):
        read_part(file)
