"""NVIDIA NIM for LLMs: the folder that a container reads, the environment that names it, and the adapter tree of `NIM_PEFT_SOURCE`.

Layouts: NIM for LLMs 2.1 (model-free, `NIM_MODEL_PATH`) and 1.15 (`NIM_FT_MODEL`), https://docs.nvidia.com/nim/large-language-models/ .
Nothing here was run in a NIM container.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from nemo_rl_like.export.folders import link_tree
from nemo_rl_like.export.hf_layout import ADAPTER_CONFIG, TOKENIZER_CONFIG, hf_problems, link_adapters, peft_problems
from nemo_rl_like.export.problems import Problem, read_object
from nemo_rl_like.spec.export import NimLoraTarget, NimTarget

MODEL, ENVIRONMENT, ADAPTERS = "model", "nim.env", "adapters"
SPECIAL_TOKENS = "special_tokens_map.json"
EVALUATOR, GUARDRAILS = "evaluator.yaml", "guardrails"
_LINE = re.compile(r"[A-Z][A-Z0-9_]*=\S*")
_KNOWN = {
    "NIM_MODEL_PATH": "2.x",
    "NIM_FT_MODEL": "1.x",
    "NIM_CUSTOM_MODEL_NAME": "1.x",
    "NIM_USE_TRTLLM_LEGACY_BACKEND": "1.x",
    "NIM_DISABLE_TRTLLM_PYTORCH_RT": "1.x",
    "NIM_SERVED_MODEL_NAME": "",
    "NIM_MAX_MODEL_LEN": "",
    "NIM_TENSOR_PARALLEL_SIZE": "",
    "NIM_PEFT_SOURCE": "",
    "NIM_MAX_LORA_RANK": "",
}
"""Variables that `nim.env` may set, with the only version that reads them."""


def write_nim(hf: Path, folder: Path, target: NimTarget) -> None:
    """`model/` and `nim.env`."""
    link_tree(hf, folder / MODEL)
    _write_special_tokens(folder / MODEL)
    _write_environment(folder, nim_environment(target))
    (folder / EVALUATOR).write_text(_EVALUATOR.format(name=json.dumps(target.model_name)), encoding="utf-8")
    (folder / GUARDRAILS).mkdir()
    (folder / GUARDRAILS / "config.yml").write_text(
        _GUARDRAILS.format(name=json.dumps(target.model_name)), encoding="utf-8"
    )


def nim_environment(target: NimTarget) -> dict[str, str]:
    """The container's variables by name."""
    path = f"{target.mounted_at}/{MODEL}"
    if target.version == "2.x":
        given = {"NIM_MODEL_PATH": path}
    else:
        given = {
            "NIM_FT_MODEL": path,
            "NIM_CUSTOM_MODEL_NAME": target.model_name,
            "NIM_USE_TRTLLM_LEGACY_BACKEND": "1",
            "NIM_DISABLE_TRTLLM_PYTORCH_RT": "1",
        }
    given |= {
        "NIM_SERVED_MODEL_NAME": target.model_name,
        "NIM_TENSOR_PARALLEL_SIZE": str(target.tensor_parallel_size),
    }
    if target.max_model_len is not None:
        given["NIM_MAX_MODEL_LEN"] = str(target.max_model_len)
    return given


def write_nim_lora(own: Path, folder: Path, target: NimLoraTarget) -> None:
    """`adapters/<name>/` for each, and `nim.env`."""
    sources = {target.adapter_name: own, **{name: Path(path) for name, path in target.adapters.items()}}
    for name, source in sources.items():
        link_adapters(source, folder / ADAPTERS / name)
    ranks = [json.loads((folder / ADAPTERS / name / ADAPTER_CONFIG).read_bytes())["r"] for name in sources]
    given = {"NIM_PEFT_SOURCE": f"{target.mounted_at}/{ADAPTERS}", "NIM_MAX_LORA_RANK": str(max(ranks))}
    _write_environment(folder, given)


def nim_problems(folder: Path, mounted_at: str | None) -> list[Problem]:
    """What a NIM container would stumble on in its model folder and environment."""
    problems = (
        hf_problems(folder / MODEL, MODEL)
        + read_object(folder / MODEL / SPECIAL_TOKENS, f"{MODEL}/{SPECIAL_TOKENS}")[1]
    )
    given = _environment(folder, problems)
    if given and len({"NIM_MODEL_PATH", "NIM_FT_MODEL"} & given.keys()) != 1:
        problems.append(
            Problem(ENVIRONMENT, "must set one of NIM_MODEL_PATH (2.x) and NIM_FT_MODEL (1.x); export again")
        )
    version = "1.x" if "NIM_FT_MODEL" in given else "2.x"
    for name in sorted(given):
        if _KNOWN.get(name) not in (None, "", version):
            problems.append(Problem(ENVIRONMENT, f"sets {name}, which NIM {version} does not read; remove it"))
    path = given.get("NIM_MODEL_PATH") or given.get("NIM_FT_MODEL")
    if mounted_at is not None and path not in (None, f"{mounted_at}/{MODEL}"):
        problems.append(
            Problem(ENVIRONMENT, f"names {path}, and the bundle is meant to be at {mounted_at}; export again")
        )
    if given and not given.get("NIM_SERVED_MODEL_NAME"):
        problems.append(Problem(ENVIRONMENT, "sets no NIM_SERVED_MODEL_NAME, by which clients ask; add it"))
    return problems


def nim_lora_problems(folder: Path, mounted_at: str | None) -> list[Problem]:
    """What NIM's LoRA loader would stumble on: one PEFT folder a name, all of one base, none beyond the largest rank."""
    tree = folder / ADAPTERS
    found = sorted(path for path in tree.iterdir()) if tree.is_dir() else []
    problems = [] if found else [Problem(ADAPTERS, "has no adapter; export again")]
    configs = {}
    for path in found:
        if not path.is_dir():
            problems.append(Problem(f"{ADAPTERS}/{path.name}", "stands where only adapters' folders may; remove it"))
            continue
        problems += peft_problems(path, f"{ADAPTERS}/{path.name}")
        configs[path.name] = read_object(path / ADAPTER_CONFIG, "")[0]
        if configs[path.name].get("peft_type", "LORA") != "LORA":
            problems.append(
                Problem(f"{ADAPTERS}/{path.name}", "is no LoRA adapter, and NIM serves no others; remove it")
            )
    given = _environment(folder, problems)
    limit = given.get("NIM_MAX_LORA_RANK", "")
    for name, config in configs.items():
        rank = config.get("r")
        if given and isinstance(rank, int) and (not limit.isdigit() or rank > int(limit)):
            problems.append(
                Problem(f"{ADAPTERS}/{name}", f"has rank {rank}, and NIM_MAX_LORA_RANK is {limit!r}; raise it")
            )
    if mounted_at is not None and given and given.get("NIM_PEFT_SOURCE") != f"{mounted_at}/{ADAPTERS}":
        problems.append(Problem(ENVIRONMENT, f"must set NIM_PEFT_SOURCE={mounted_at}/{ADAPTERS}; export again"))
    return problems


def _write_special_tokens(folder: Path) -> None:
    """NIM lists the file, which transformers 5 no longer writes: the same tokens as in tokenizer_config.json."""
    if not (folder / SPECIAL_TOKENS).is_file():
        config = json.loads((folder / TOKENIZER_CONFIG).read_bytes())
        tokens = {name: config[name] for name in sorted(config) if name.endswith("_token") and config[name] is not None}
        (folder / SPECIAL_TOKENS).write_text(json.dumps(tokens, indent=1) + "\n", encoding="utf-8")


def _write_environment(folder: Path, values: dict[str, str]) -> None:
    lines = [f"{name}={value}" for name, value in values.items()]
    (folder / ENVIRONMENT).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _environment(folder: Path, problems: list[Problem]) -> dict[str, str]:
    """The variables of `nim.env`, as `docker run --env-file` reads it."""
    file = folder / ENVIRONMENT
    if not file.is_file():
        problems.append(Problem(ENVIRONMENT, "is missing; export again"))
        return {}
    given = {}
    for line in filter(None, file.read_text(encoding="utf-8").splitlines()):
        name, _, value = line.partition("=")
        if not _LINE.fullmatch(line) or name not in _KNOWN:
            problems.append(
                Problem(ENVIRONMENT, f"has the line {line!r}, which sets no variable that NIM reads here; remove it")
            )
        given[name] = value
    return given


_EVALUATOR = """\
# NeMo Evaluator: the served model as the target of an evaluation (nemo-evaluator run_eval --run_config evaluator.yaml). Not run here.
target:
  api_endpoint:
    url: http://localhost:8000/v1/chat/completions
    model_id: {name}
    type: chat
config:
  type: gsm8k
  output_dir: evaluation
  params:
    temperature: 0.0
    max_new_tokens: 512
    parallelism: 8
"""
_GUARDRAILS = """\
# NeMo Guardrails over the served model (nemoguardrails chat --config guardrails). Not run here.
models:
  - type: main
    engine: nim
    model: {name}
    parameters:
      base_url: http://localhost:8000/v1
rails:
  input:
    flows:
      - self check input
prompts:
  - task: self_check_input
    content: |
      Should the following message of a user be refused because it asks for something harmful?
      Message: "{{{{ user_input }}}}"
      Answer Yes or No:
"""
