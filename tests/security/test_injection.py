"""No text of a spec becomes a command, an option or a key: whatever stands in a field stands there again, whole, in what each target is handed.

Fields are found in the spec's types, so a new one is tested without a line here. Texts are read back as their reader does: words of a shell, options of
sbatch, CSV of docker's mounts, YAML, Kubernetes' `$(NAME)`.
"""

from __future__ import annotations

import csv
import json
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from nemo_rl_like.artifacts.errors import SpecError
from nemo_rl_like.launch import registry
from nemo_rl_like.launch.container import ContainerTarget
from nemo_rl_like.launch.kubernetes import manifests, problems
from nemo_rl_like.launch.kubernetes.names import object_name
from nemo_rl_like.launch.nemo_run import NemoRunSlurm
from nemo_rl_like.launch.submission import jobs_folder
from nemo_rl_like.launch.submit import Request, _common_problems, _job
from nemo_rl_like.launch.target import Job, Target
from nemo_rl_like.pipeline.wiring import wire
from nemo_rl_like.spec.experiment import ExperimentSpec, stage_name
from tests.launch.kubernetes.controllers import expanded
from tests.security import spec_fields
from tests.security.spec_fields import INDEX, label

ROOT = Path(__file__).parents[2]
HOSTILE = [
    '"', "'", "`touch x`", "$(touch x)", "; touch x", "\n#SBATCH --uid=0", "\\", " --wrap=x", "#", "%j", "${HOME}", "|", "&", "é", "--privileged", "-v",
    "a b", "a,/etc:/b", "a:/etc:b", ",readonly", '",readonly,"', "a\nb: c", "a: b", "- a", "1e3", "on", "~", "$(HOME)", "$$", "$$(HOME)", "!!python/object:x",
    "*a", "{{.}}", "\u2028", "\x85", "a\rb", "a\tb", "", " ", "..", "../x", "/etc", "\0", "a\n", "---", "EOF",
]  # fmt: skip
STAGE = ("stages", INDEX, "name")
INSIDE = {"name", "output", "secrets", "launch"}
PLACES = [p for p in spec_fields.texts(ExperimentSpec) if p[0] in INSIDE] + [STAGE]
BASE: dict[str, Any] = {
    "output": "/data/run",
    "model": {"init": {}, "tokenizer": {"characters": "0123456789+="}},
    "environment": {"name": "arithmetic"},
    "stages": [{"kind": "evaluate", "name": "last"}],
    "launch": {},
}
DATA = [{"source": "/data", "target": "/data"}]
LAUNCH: dict[str, dict[str, Any]] = {
    "local": {},
    "slurm": {"image": "registry/x:1", "mounts": DATA},
    "kubernetes": {"image": "registry/x:1", "nodes": 2, "kubernetes": {"claims": [{"claim": "work", "path": "/data"}]}},
    "container": {"image": "registry/x:1", "mounts": DATA, "container": {"user": "1000:1000"}},
    "nemo-run-slurm": {"image": "registry/x:1", "mounts": DATA, "time_limit_min": 10, "slurm": {"account": "a"}},
}
"""What each target needs to take a job at all."""
REFERENCE = {"secret": "hub", "key": "token"}


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """The spec inside of a ConfigMap in JSON, which is written and read sooner; its own writer is tested by its own tests."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (manifests, problems):
            patch.setattr(
                module, "resolved_yaml", lambda spec: json.dumps(spec.model_dump(mode="json", include=INSIDE))
            )
        yield


def job_of(target: str, place: spec_fields.Path, text: str) -> Job | None:
    """The job whose spec has the text at the place; None where spec or target refuses it."""
    values = _values(target, place, text)
    try:
        spec = ExperimentSpec.model_validate(values)
        wire(spec)
    except (ValidationError, SpecError):
        return None
    request = Request(spec, target, Path("/home/me"), until=stage_name(spec.stages[0]) if place == STAGE else None)
    job = _job(request, jobs_folder(Path("/home/me") / spec.output) / "0001")
    assert re.fullmatch(r"[A-Za-z0-9-]+", job.name), "the name of a job is made harmless for all targets"
    job = replace(job, name="job")
    return None if [*_common_problems(job), *target_of(target).problems(job)] else job


def _values(target: str, place: spec_fields.Path, text: str) -> dict[str, Any]:
    base = merged(BASE, {"launch": LAUNCH[target]})
    if place == STAGE:
        return {**base, "stages": [{"kind": "evaluate", "name": text}]}
    given_ = spec_fields.placed(ExperimentSpec, place, text)[place[0]]
    if place[0] == "output":
        given_ = f"/data/{text}"
    if place[0] == "secrets":
        given_ = {name: {"kubernetes": REFERENCE, **secret} for name, secret in given_.items()}
    return merged(base, {place[0]: given_})


def merged(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        return {**one, **{k: merged(one[k], v) if k in one else v for k, v in other.items()}}
    return [*one, *other] if isinstance(one, list) and isinstance(other, list) else other


def target_of(name: str) -> Target:
    return ContainerTarget("1000:1000") if name == "container" else registry.target(name)


def handed(target: str, job: Job) -> list[str]:
    """What the target is handed, in the smallest parts that their reader tells apart."""
    rendered = target_of(target).render(job)
    parts = {"slurm": _sbatch, "kubernetes": _manifests, "container": _words_of_a_run, "nemo-run-slurm": _nemo_run}
    found = [*rendered.command] if target not in parts else [*parts[target](job, rendered)]
    return [part.replace(object_name(job), "OBJECT") for part in found]


def _sbatch(job: Job, rendered: Any) -> Iterator[str]:
    (script,) = rendered.files.values()
    directives = [line for line in script.split("\n") if line.startswith("#SBATCH")]
    for line in directives:
        (word,) = shlex.split(line.removeprefix("#SBATCH "))
        yield word
    yield from _shell("\n".join(line for line in script.split("\n") if not line.startswith("#SBATCH")))
    yield from rendered.command


def _shell(script: str) -> list[str]:
    """A script's words; a line is one too."""
    return [word for line in script.replace("\\\n", " ").split("\n") for word in [*_line(line), "\n"]]


def _line(line: str) -> list[str]:
    return [] if line.lstrip().startswith("#") else shlex.split(line)


def _manifests(job: Job, rendered: Any) -> Iterator[str]:
    (text,) = rendered.files.values()
    for manifest in yaml.load_all(text, Loader=yaml.CSafeLoader):
        if manifest["kind"] == "ConfigMap":
            manifest["data"] = json.loads(manifest["data"]["spec.yaml"])
        yield from leaves(_as_the_kubelet(manifest))


def _as_the_kubelet(value: Any) -> Any:
    """With variables and commands as a process gets them."""
    if isinstance(value, list):
        return [_as_the_kubelet(v) for v in value]
    if not isinstance(value, dict):
        return value
    made = {key: _as_the_kubelet(inner) for key, inner in value.items()}
    if "env" in made and "image" in made:
        made["env"] = expanded(value["env"])
        made["command"] = [str(expanded([{"name": "x", "value": w}])["x"]) for w in value.get("command", [])]
    return made


def leaves(value: Any, above: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, f"{above}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{above}[{index}]")
    else:
        yield f"{above}={value}"


def _words_of_a_run(job: Job, rendered: Any) -> Iterator[str]:
    words = rendered.command
    for before, word in zip(("", *words), words, strict=False):
        if before == "--mount":
            (fields,) = csv.reader([word], strict=True)
            yield from fields
        else:
            assert word == words[0] or not word.startswith("-") or word in OPTIONS, word
            yield word


OPTIONS = {
    "--detach", "--init", "--name", "--user", "--cap-drop", "--security-opt", "--read-only", "--tmpfs", "--shm-size", "--gpus", "--stop-timeout", "--restart",
    "--env", "--mount", "--entrypoint", "--until",
}  # fmt: skip
"""Words of `docker run` and of `nrl node` that are meant to start with a dash."""


def _nemo_run(job: Job, rendered: Any) -> Iterator[str]:
    """Scripts, and what NeMo-Run's executor is given, which it writes into a script without quotes."""
    for script in rendered.files.values():
        yield from _shell(script)
    recorder = SimpleNamespace(
        SlurmExecutor=lambda **given: SimpleNamespace(**given),
        Packager=lambda: None,
        LocalTunnel=lambda job_dir: job_dir,
    )
    for name, value in vars(NemoRunSlurm()._executor(job, recorder)).items():
        for part in value if isinstance(value, list) else [value]:
            assert not isinstance(part, str) or shlex.split(part) == [part]
            if name == "container_mounts":
                assert "," not in part and len(part.split(":")) == 2
            yield f"{name}={part}"


@cache
def with_a_mark(target: str, place: spec_fields.Path) -> tuple[str, list[str]] | None:
    """A harmless text, and what the target is handed with it; None where it takes no text there."""
    sign = "marked" if place in (STAGE, ("output",)) else spec_fields.mark(ExperimentSpec, place)
    job = job_of(target, place, sign)
    return None if job is None else (sign, handed(target, job))


def check(target: str, place: spec_fields.Path, text: str) -> None:
    """Where the target takes the text, nothing has changed but the text."""
    marked = with_a_mark(target, place)
    if marked is None or (place == STAGE and not text):  # a stage without a name has that of its kind
        return
    if place == ("output",) and str(PurePosixPath(f"/data/{text}")) != f"/data/{text}":
        return
    sign, parts = marked
    text = f"/{text}" if sign.startswith("/") else text
    job = job_of(target, place, text)
    assert job is None or handed(target, job) == [part.replace(sign, text) for part in parts]


@pytest.mark.parametrize("place", PLACES, ids=label)
@pytest.mark.parametrize("target", LAUNCH)
def test_hostile_texts_stay_where_they_stand(target: str, place: spec_fields.Path) -> None:
    own = place[:2] == ("launch", target)
    assert with_a_mark(target, place) or not own, (
        "a field of the target's own must reach it, or this test shows nothing"
    )
    for text in HOSTILE:
        check(target, place, text)


@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from(sorted(LAUNCH)),
    st.sampled_from(PLACES),
    st.lists(st.sampled_from(HOSTILE) | st.text(max_size=3), min_size=1, max_size=4),
)
def test_texts_made_of_hostile_ones_stay_where_they_stand(
    target: str, place: spec_fields.Path, parts: list[str]
) -> None:
    check(target, place, "".join(parts))


def test_a_new_field_is_found() -> None:
    class Inner(BaseModel):
        word: str | None = None
        number: int = 1

    class Outer(BaseModel):
        list_of: tuple[Inner, ...] = ()
        by_name: dict[str, Inner] = {}

    found = spec_fields.texts(Outer)
    assert [label(p) for p in found] == ["list_of[].word", "by_name{key}", "by_name{value}.word"]
    for place in found:
        assert "marked" in str(Outer.model_validate(spec_fields.placed(Outer, place, "marked")))
    places = {label(p) for p in PLACES}
    assert {"launch.slurm.comment", "launch.kubernetes.claims[].sub_path", "secrets{key}", "stages[].name"} <= places


@pytest.mark.parametrize("text", HOSTILE)
def test_a_base_image_of_any_text_is_no_command(text: str, tmp_path: Path) -> None:
    """The one text that Dockerfiles take (`--build-arg BASE_IMAGE`) is read by `install.sh`, and only a digest passes."""
    words = [str(ROOT / "containers/install.sh"), "pinned", text.encode("utf-8", "replace").decode().replace("\0", "")]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, timeout=60)
    assert done.returncode == 2 and not list(tmp_path.iterdir())
