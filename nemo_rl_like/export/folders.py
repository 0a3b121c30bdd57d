"""Folders of bundles: whole or not there, readable by everyone, without links or pickles, weights shared between bundles by hard links."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nemo_rl_like.artifacts.errors import OutputFolderError
from nemo_rl_like.export.problems import Problem

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy")
"""Files that run code when they are read, or may."""
SIDE_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
"""Of a model folder's files beside its weights, those that a server may need."""
_NOT_SIDE = ("manifest.json", "trainer_state.json", "trainer_log.json", "all_results.json", "train_results.json")
_FILE_MODE, _SCRIPT_MODE, _FOLDER_MODE = 0o644, 0o755, 0o755
_NO_HARD_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP)


@contextmanager
def whole(target: Path) -> Iterator[Path]:
    """A folder that takes the name `target`, readable by everyone, when the block ends well. Raises OutputFolderError if that is taken."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise OutputFolderError(f"{target} exists and is not an empty folder; choose another or remove it")
    partial = target.with_name(f".tmp-{target.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        make_readable(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if target.exists():
        target.rmdir()
    partial.rename(target)


def make_readable(folder: Path) -> None:
    """Permissions 0755 of folders and scripts, 0644 of other files."""
    folder.chmod(_FOLDER_MODE)
    for path in folder.rglob("*"):
        path.chmod(_FOLDER_MODE if path.is_dir() else _SCRIPT_MODE if path.suffix == ".sh" else _FILE_MODE)


def copy_side_files(source: Path, target: Path) -> None:
    """Copy what a server may need beside weights: configuration, tokenizer, chat templates, licence."""
    for file in sorted(source.iterdir()):
        if file.is_file() and _is_side_file(file.name):
            shutil.copyfile(file, target / file.name)


def _is_side_file(name: str) -> bool:
    if name.upper().startswith(("LICENSE", "LICENCE", "NOTICE")):
        return True
    return name.endswith(SIDE_SUFFIXES) and not name.endswith(".index.json") and name not in _NOT_SIDE


def link_tree(source: Path, target: Path, only: tuple[str, ...] = ()) -> None:
    """The folder `source` as `target`: its safetensors by hard links where the file system has them, everything else copied; `only` these files."""
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        if path.is_dir() or (only and relative.as_posix() not in only):
            continue
        (target / relative).parent.mkdir(parents=True, exist_ok=True)
        if path.suffix != ".safetensors" or not _linked(path, target / relative):
            shutil.copyfile(path, target / relative)


def _linked(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        return False
    return True


def file_problems(folder: Path) -> list[Problem]:
    """Links out of the folder, pickles, left-overs, and what another user could not read."""
    root = folder.resolve()
    problems = []
    for path in [folder, *sorted(folder.rglob("*"))]:
        name = path.relative_to(folder).as_posix()
        problem = _link_problem(path, root) if path.is_symlink() else _mode_problem(path)
        if problem is None and path != folder and path.name.startswith((".tmp-", ".part-")):
            problem = "is left over from an interrupted write; remove it"
        if problem is not None:
            problems.append(Problem(name, problem))
    return problems


def _link_problem(path: Path, root: Path) -> str | None:
    points = path.resolve()
    if not points.is_relative_to(root):
        return f"is a link to {points}, outside the folder, which a container does not see; copy the file in its place"
    return None if points.exists() else f"is a link to {points}, which does not exist; copy the file in its place"


def _mode_problem(path: Path) -> str | None:
    mode = path.stat().st_mode
    if path.is_dir():
        if not (mode & stat.S_IROTH and mode & stat.S_IXOTH):
            return (
                f"has permissions {stat.S_IMODE(mode):04o}, and a server under another user must enter it; chmod 0755"
            )
        return None
    if not path.is_file():
        return "is neither file nor folder; remove it"
    if path.suffix in PICKLES:
        return f"ends in {path.suffix}, a pickle or the like, which may run code when it is read; save safetensors and remove it"
    if not mode & stat.S_IROTH:
        return f"has permissions {stat.S_IMODE(mode):04o}, and a server under another user must read it; chmod 0644"
    return None
