"""A model folder that brings code is refused, and its code is not run, wherever this package reads one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl_like.artifacts.errors import NrlError
from nemo_rl_like.data.tokenizer import character_tokenizer, load_tokenizer
from nemo_rl_like.model.outline import outline_of
from nemo_rl_like.model.transformers_model import empty_model
from tests.tiny_folders import save_llama

CODE = """
from pathlib import Path
Path("RAN").touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class EvilConfig(LlamaConfig):
    model_type = "evil"
class EvilModel(LlamaForCausalLM): ...
class EvilTokenizer(PreTrainedTokenizerFast): ...
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama whose files say that its classes are in a file beside them."""
    found = save_llama(tmp_path / "model", 16)
    character_tokenizer("0123456789+=").save_pretrained(found)
    (found / "evil.py").write_text(CODE.replace("RAN", str(tmp_path / "ran")))
    for name, changes in (
        (
            "config.json",
            {
                "model_type": "evil",
                "auto_map": {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"},
            },
        ),
        (
            "tokenizer_config.json",
            {"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": [None, "evil.EvilTokenizer"]}},
        ),
    ):
        (found / name).write_text(json.dumps(json.loads((found / name).read_text()) | changes))
    return found


@pytest.mark.parametrize("read", [load_tokenizer, outline_of, empty_model], ids=["tokenizer", "shape", "transformers"])
def test_code_of_a_model_is_not_run(
    read: Callable[[Path], object], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is anybody asked whether it may be."""
    monkeypatch.setattr("builtins.input", lambda *words: pytest.fail("somebody was asked"))
    with pytest.raises(NrlError):
        read(folder)
    assert not (tmp_path / "ran").exists()
