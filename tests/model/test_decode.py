"""Laws of decoding with a cache: the same logits as the training forward, whatever shares the batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from nemo_rl_like.model import decode
from nemo_rl_like.model.check_rank import row_logits
from nemo_rl_like.model.decode import Decoder
from nemo_rl_like.model.factory import build_model
from nemo_rl_like.model.forward import MegatronModel
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.hf_io import SafetensorsReader
from nemo_rl_like.spec.policy import LayoutSpec
from tests.model import tiny

TOLERANCE = 1e-5
PROMPTS = ([5, 9, 11], [100, 2, 3, 4, 77, 6, 1], [42])
SAMPLES = (3, 1, 2)


def load(folder: Path) -> MegatronModel:
    """The one-rank model of a folder."""
    with SafetensorsReader(folder) as reader:
        return build_model(ModelConfig.from_hf_folder(folder), LayoutSpec(), torch.float32, weights=reader)


def continuations(rows: int, length: int) -> Tensor:
    """int64 [length, rows] tokens to append."""
    return torch.randint(tiny.VOCAB, (length, rows), generator=torch.Generator().manual_seed(2))


def truth(model: MegatronModel, row: list[int]) -> Tensor:
    """float32 [V] logits after the row's last token, by the training forward."""
    logits = row_logits(model, [row])
    assert logits is not None
    return logits[0][-1]


def forced(
    model: MegatronModel, prompts: list[list[int]], samples: list[int], tokens: Tensor, leave: dict[int, list[int]]
) -> float:
    """Largest |decoded - training| logit while `tokens` are appended; before step s only rows `leave[s]` stay."""
    decoder = Decoder(model)
    state, logits = decoder.prefill(prompts, samples)
    assert logits is not None
    worst = max(float((logits[g] - truth(model, p)).abs().max()) for g, p in enumerate(prompts))
    rows = [list(p) for p, k in zip(prompts, samples, strict=True) for _ in range(k)]
    ids = list(range(len(rows)))
    for step, appended in enumerate(tokens):
        if step in leave:
            state.keep([ids.index(i) for i in leave[step]])
            ids = leave[step]
        for i in ids:
            rows[i].append(int(appended[i]))
        logits = decoder.step(state, appended[ids])
        assert logits is not None and state.rows == len(ids)
        worst = max(worst, *(float((logits[j] - truth(model, rows[i])).abs().max()) for j, i in enumerate(ids)))
    return worst


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_decoded_logits_equal_the_training_forwards(one_rank: None, folders: dict[str, Path], family: str) -> None:
    assert forced(load(folders[family]), list(PROMPTS), list(SAMPLES), continuations(6, 5), {}) <= TOLERANCE


def test_rows_and_prompts_that_leave_do_not_change_the_others(one_rank: None, folders: dict[str, Path]) -> None:
    leave = {1: [0, 2, 3, 4, 5], 2: [0, 2, 4], 4: [2]}
    assert forced(load(folders["llama"]), list(PROMPTS), list(SAMPLES), continuations(6, 6), leave) <= TOLERANCE


def test_prompts_of_one_length_with_equally_many_samples_need_no_mask(one_rank: None, folders: dict[str, Path]) -> None:
    prompts = [[1, 2, 3], [4, 5, 6]]
    assert forced(load(folders["qwen3"]), prompts, [2, 2], continuations(4, 4), {}) <= TOLERANCE


def test_the_cache_grows_beyond_its_first_room(
    one_rank: None, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "_GROWTH", 2)
    leave = {5: [1, 2, 5]}
    assert forced(load(folders["llama"]), list(PROMPTS), list(SAMPLES), continuations(6, 9), leave) <= TOLERANCE


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "gpt_oss", "mistral", "qwen2"])
def test_a_window_leaves_prompts_and_a_rows_own_tokens_behind(
    one_rank: None, folders: dict[str, Path], family: str
) -> None:
    leave = {6: [0, 3, 4]}
    assert forced(load(folders[family]), list(PROMPTS), list(SAMPLES), continuations(6, 10), leave) <= TOLERANCE


def test_prefill_in_several_passes_equals_one_pass(
    one_rank: None, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "_PREFILL_TOKENS", 4)
    assert forced(load(folders["llama"]), list(PROMPTS), list(SAMPLES), continuations(6, 3), {}) <= TOLERANCE


def test_scores_equal_the_training_forwards(one_rank: None, folders: dict[str, Path]) -> None:
    model = load(folders["llama_tied"])
    rows = [[3, 4, 5, 6, 7, 8], [9], [10, 11], [1] * 20]
    logits = row_logits(model, rows)
    assert logits is not None
    wanted = [
        table[:-1].log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None])[:, 0]
        for table, row in zip(logits, rows, strict=True)
        if len(row) > 1
    ]
    got = Decoder(model).score(rows)
    assert got is not None and (got - torch.cat(wanted)).abs().max() <= TOLERANCE
