"""Dockerfiles and scripts of `containers/`: linted, and their steps run here where no engine is needed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.schema._res import BOM_JSON_STRICT, JSF, SPDX_JSON
from jsonschema import Draft7Validator
from referencing import Registry, Resource

ROOT = Path(__file__).parents[2]
CONTAINERS = ROOT / "containers"
DOCKERFILES = [CONTAINERS / "Dockerfile", CONTAINERS / "Dockerfile.cpu"]
SCRIPTS = sorted(CONTAINERS.glob("*.sh"))
BIN = Path(sys.executable).parent
NOBODY = 65534


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, capture_output=True, text=True, timeout=600, cwd=ROOT, env={**os.environ, **environment}
    )


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    done = run(str(BIN / "hadolint"), "--failure-threshold", "info", str(path))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_shellcheck_finds_nothing(path: Path) -> None:
    done = run(str(BIN / "shellcheck"), str(path))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_no_base_is_used_that_nobody_named_by_digest(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("ARG BASE_IMAGE\n") == 3 and "ARG BASE_IMAGE=" not in text
    stages = re.findall(r"^FROM (\S+)(?: AS (\S+))?$", text, re.MULTILINE)
    assert [s for s, _ in stages if s != "${BASE_IMAGE}"] == ["base", "lock", "wheels", "base"]
    assert "install.sh pinned" in text.split("FROM")[2 - 1]


def test_a_base_without_a_digest_is_refused() -> None:
    script = str(CONTAINERS / "install.sh")
    assert run(script, "pinned", "nvcr.io/nvidia/pytorch@sha256:" + "a" * 64).returncode == 0
    for name in ("", "nvcr.io/nvidia/pytorch:25.12-py3", "x@sha256:abc"):
        done = run(script, "pinned", name)
        assert done.returncode == 2 and "by digest" in done.stderr


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_layers_that_change_least_come_first(path: Path) -> None:
    """A changed source builds no wheel of a dependency again, and a changed lock no base."""
    text = path.read_text(encoding="utf-8")
    order = [
        text.index(word)
        for word in ("install.sh pinned", "requirements/", "install.sh wheels", "COPY . ", "install.sh source")
    ]
    assert order == sorted(order)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_what_is_copied_is_not_ignored(path: Path) -> None:
    """`.dockerignore` lets through each file that a step names, and no tests, models or runs."""
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    let_in = {rule[1:] for rule in rules if rule.startswith("!")}
    copied = {
        w
        for line in re.findall(r"^COPY (?!--from)(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        for w in line.split()[:-1]
    }
    assert copied - {"."} <= let_in
    assert {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "nemo_rl_like",
        "environments",
        "configs",
        "containers/sbom.py",
    } <= let_in
    assert not [name for name in let_in if not (ROOT / name).exists()]
    assert not {"tests", "runs", "models", ".git"} & let_in


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_the_image_runs_nrl_as_nobody_special(path: Path) -> None:
    last = path.read_text(encoding="utf-8").rsplit("\nFROM ", 1)[1]
    assert 'ENTRYPOINT ["nrl"]' in last and "USER 10001:10001" in last
    labels = set(re.findall(r"org\.opencontainers\.image\.([a-z.]+)=", last))
    assert labels == {"title", "description", "licenses", "version", "revision", "base.name"}


def test_the_locked_bases_wheels_are_left_to_the_base() -> None:
    locked = {
        line.split("==")[0]
        for line in (ROOT / "requirements/ngc.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line
    }
    assert {"ray", "transformers", "megatron-core"} <= locked
    assert not [n for n in locked if n in ("torch", "numpy", "triton") or n.startswith("nvidia-")]


def cyclonedx_errors(bill: dict[str, object]) -> list[str]:
    """By the standard's own strict schema, 1.6."""

    def schema(path: Path) -> Resource[object]:
        return Resource.from_contents(json.loads(path.read_text(encoding="utf-8")))

    whole = Path(BOM_JSON_STRICT[SchemaVersion.V1_6])
    registry: Registry[object] = Registry().with_resources(
        [("http://cyclonedx.org/schema/spdx.SNAPSHOT.schema.json", schema(Path(SPDX_JSON))), ("http://cyclonedx.org/schema/jsf-0.82.SNAPSHOT.schema.json", schema(Path(JSF)))]
    )  # fmt: skip
    return [
        e.message
        for e in Draft7Validator(json.loads(whole.read_text(encoding="utf-8")), registry=registry).iter_errors(bill)
    ]


@pytest.fixture(scope="module")
def bill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("bill")
    done = run(sys.executable, str(CONTAINERS / "sbom.py"), str(folder / "a"))
    assert done.returncode == 0, done.stderr
    yield folder / "a"


def test_the_bill_of_materials_is_cyclonedx_and_names_every_package(bill: Path) -> None:
    written = json.loads((bill / "sbom.cdx.json").read_text(encoding="utf-8"))
    assert cyclonedx_errors(written) == []
    assert cyclonedx_errors({**written, "componentz": []}) != []
    named = {c["purl"] for c in written["components"]}
    listed = run(str(BIN / "uv"), "pip", "list", "--python", sys.executable, "--format", "json")
    there = {f"pkg:pypi/{p['name']}@{p['version'].replace('+', '%2B')}" for p in json.loads(listed.stdout)}
    ours = written["metadata"]["component"]["purl"]
    assert named | {ours} == there


def test_equal_environments_have_equal_bills(bill: Path, tmp_path: Path) -> None:
    assert run(sys.executable, str(CONTAINERS / "sbom.py"), str(tmp_path)).returncode == 0
    assert (tmp_path / "sbom.cdx.json").read_bytes() == (bill / "sbom.cdx.json").read_bytes()


def test_every_package_has_a_line_with_its_licence(bill: Path) -> None:
    lines = [line.split("\t") for line in (bill / "licences.txt").read_text(encoding="utf-8").splitlines()]
    licences = {name: licence for name, _, licence in lines}
    assert licences["numpy"] != "not declared" and "Apache" in licences["transformers"]
    assert sum(licence == "not declared" for licence in licences.values()) < len(licences) / 20


def test_enroot_gives_a_whole_file_its_name(tmp_path: Path) -> None:
    """With a double of enroot that notes its words: what is cut off leaves nothing, what is there is not replaced."""
    double = tmp_path / "enroot"
    double.write_text('#!/bin/sh\necho "$@" >>"$WORDS"\necho squashfs >"$3"\nexit "${FAILS:-0}"\n', encoding="utf-8")
    double.chmod(0o755)
    words, file = tmp_path / "words", tmp_path / "shared dir" / "nrl.sqsh"
    file.parent.mkdir()

    def imported(image: str, **more: str) -> subprocess.CompletedProcess[str]:
        return run(
            str(CONTAINERS / "enroot-import.sh"),
            image,
            str(file),
            PATH=f"{tmp_path}:/usr/bin:/bin",
            WORDS=str(words),
            **more,
        )

    assert imported("nvcr.io/team/nrl:1", FAILS="1").returncode == 1 and not list(file.parent.iterdir())
    assert imported("nvcr.io/team/nrl:1").returncode == 0
    assert words.read_text(encoding="utf-8").splitlines()[-1].endswith(" docker://nvcr.io#team/nrl:1")
    assert run("sha256sum", "--check", "--status", "nrl.sqsh.sha256").returncode != 0  # another folder
    assert subprocess.run(["sha256sum", "--check", "--status", "nrl.sqsh.sha256"], cwd=file.parent).returncode == 0
    assert imported("nvcr.io/team/nrl:1").returncode == 1
    for image in ("nrl", "nvcr.io/team/nrl", "nvcr.io/a b:1 c", "x#y/z:1"):
        assert imported(image).returncode == 2


@pytest.mark.slow
def test_the_steps_of_the_image_make_an_environment_that_a_stranger_runs() -> None:
    """Environment, wheels of the lock, the project's own wheel, bill: in a plain folder, then `nrl` as `nobody` with a home of its own."""
    root = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        root.chmod(0o755)
        prefix, script = root / "opt/nrl", str(CONTAINERS / "install.sh")
        prefix.parent.mkdir()
        python = _open_python(root)
        for step in (
            ("environment", str(prefix), "requirements/uv.txt"),
            ("wheels", str(prefix), "requirements/demo.txt", *_where_wheels_are()),
            ("source", str(prefix), _source(root)),
        ):
            done = run(script, *step, PYTHON=python)
            assert done.returncode == 0, (step, done.stderr[-2000:])
        done = run(str(prefix / "bin/python"), "containers/sbom.py", str(prefix / "share/nrl"), PYTHONPATH="")
        assert done.returncode == 0, done.stderr
        bill = json.loads((prefix / "share/nrl/sbom.cdx.json").read_text(encoding="utf-8"))
        assert bill["metadata"]["component"]["name"] == "nemo-rl-like" and cyclonedx_errors(bill) == []
        _runs_as_a_stranger(root, prefix)
    finally:
        shutil.rmtree(root)


def _open_python(root: Path) -> str:
    """A Python that everybody may run: this one, or a copy where it lies in a folder of root's."""
    base = Path(sys.base_prefix)
    if all(p.stat().st_mode & 0o001 for p in (base, *base.parents)):
        return str(base / "bin/python3")
    shutil.copytree(
        base, root / "python", symlinks=True, ignore=shutil.ignore_patterns("test", "__pycache__", "site-packages")
    )
    return str(root / "python/bin/python3")


def _where_wheels_are() -> list[str]:
    found = run(sys.executable, "-m", "pip", "config", "get", "global.find-links").stdout.strip()
    if found:
        return ["--find-links", found]
    return ["--extra-index-url", "https://download.pytorch.org/whl/cpu", "--index-strategy", "unsafe-best-match"]


def _source(root: Path) -> str:
    """What `.dockerignore` lets into the build."""
    source = root / "source"
    source.mkdir()
    for rule in (ROOT / ".dockerignore").read_text(encoding="utf-8").split():
        if rule.startswith("!"):
            path = ROOT / rule[1:]
            (source / rule[1:]).parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if path.is_dir() else shutil.copy
            copy(path, source / rule[1:])
    return str(source)


def _runs_as_a_stranger(root: Path, prefix: Path) -> None:
    home = root / "home"
    home.mkdir()
    os.chown(home, NOBODY, NOBODY)
    stranger = [
        "setpriv",
        f"--reuid={NOBODY}",
        f"--regid={NOBODY}",
        "--clear-groups",
        "--no-new-privs",
        "--bounding-set=-all",
    ]
    environment = {"HOME": str(home), "PATH": f"{prefix}/bin:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    spec = home / "spec.yaml"
    shutil.copy(prefix / "share/nemo-rl-like/configs/demo.yaml", spec)
    for words in (["nrl", "--help"], ["nrl", "validate", str(spec)]):
        done = subprocess.run(
            [*stranger, *words], cwd=home, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, (words, done.stdout[-1000:], done.stderr[-2000:])
    assert not [p for p in prefix.rglob("*") if p.stat(follow_symlinks=False).st_uid == NOBODY]


@pytest.mark.slow
def test_checkov_finds_nothing() -> None:
    """In an environment of its own: it needs other versions than ours of what we use."""
    k8s = [p for folder in ("base", "examples") for p in sorted((ROOT / "k8s" / folder).glob("*.yaml"))]
    files = [str(p.relative_to(ROOT)) for p in (*DOCKERFILES, *k8s) if p.name != "kustomization.yaml"]
    words = ["--framework", "dockerfile", "kubernetes", "--config-file", "containers/checkov.yaml", "--skip-download"]
    named = [w for f in files for w in ("--file", f)]
    done = run(str(BIN / "uv"), "tool", "run", "--from", "checkov==3.3.30", "checkov", *words, *named)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    passed = [int(n) for n in re.findall(r"Passed checks: (\d+), Failed checks: 0", done.stdout)]
    assert len(passed) == 2 and min(passed) > 50, done.stdout[-4000:]
