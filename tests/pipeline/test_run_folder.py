"""Laws of the output folder: never touched unless ours, never mixed, never used twice at once."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from nemo_rl_like.artifacts.errors import OutputFolderError
from nemo_rl_like.pipeline.run_folder import MARKER, RunFolder, Start, check_output

NOBODY = 65534
STARTS: tuple[Start, ...] = ("new", "resume", "overwrite")


def a_run(folder: Path) -> Path:
    with RunFolder.open(folder, "new"):
        (folder / "sft").mkdir()
        (folder / "sft/x").write_text("old")
    return folder


@pytest.mark.parametrize("start", STARTS)
def test_a_new_folder_is_made_with_its_parents_and_marked(tmp_path: Path, start: Start) -> None:
    with RunFolder.open(tmp_path / "a/b", start) as folder:
        assert (folder.path / MARKER).exists()


def test_a_second_run_over_a_run_refuses_resumes_or_overwrites_as_told(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    with pytest.raises(OutputFolderError, match="--resume.*--overwrite"):
        RunFolder.open(folder, "new")
    with RunFolder.open(folder, "resume"):
        assert (folder / "sft/x").read_text() == "old"
    with RunFolder.open(folder, "overwrite"):
        assert [p.name for p in folder.iterdir()] == [MARKER]


@pytest.mark.parametrize("start", STARTS)
def test_a_folder_with_foreign_files_is_never_touched(tmp_path: Path, start: Start) -> None:
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(OutputFolderError, match=r"thesis\.tex"):
        RunFolder.open(tmp_path, start)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_that_was_taken_and_killed_before_its_first_file_may_be_used_again(tmp_path: Path) -> None:
    RunFolder.open(tmp_path / "run", "new").close()
    RunFolder.open(tmp_path / "run", "new").close()


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_file_in_the_way_is_named(tmp_path: Path, start: Start, below: str) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(OutputFolderError, match=f"{file}.*is a file"):
        RunFolder.open(file / below, start)


@pytest.mark.parametrize("start", STARTS)
def test_a_running_run_is_not_disturbed_and_named(tmp_path: Path, start: Start) -> None:
    folder = tmp_path / "run"
    with RunFolder.open(folder, "new"):
        (folder / "work").write_text("in progress")
        if start == "new":
            (folder / "work").unlink()
        for refuse in (RunFolder.open, check_output):
            with pytest.raises(OutputFolderError, match=f"in use by process {os.getpid()}"):
                refuse(folder, start)
        assert start == "new" or (folder / "work").read_text() == "in progress"
    RunFolder.open(folder, "resume").close()


def test_who_only_asks_whether_a_run_lives_keeps_none_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`holder_of` of another process has the lock for a moment."""
    folder = a_run(tmp_path / "run")
    asking = os.open(folder / MARKER, os.O_RDONLY)
    fcntl.flock(asking, fcntl.LOCK_SH)
    monkeypatch.setattr("nemo_rl_like.pipeline.run_folder.time.sleep", lambda seconds: os.close(asking))
    RunFolder.open(folder, "resume").close()


def test_no_permission_is_an_error_before_anything_is_made() -> None:
    with tempfile.TemporaryDirectory() as name:
        locked = Path(name)
        locked.chmod(0o555)
        told = _refusal_as_nobody(locked / "run")
        assert f"no permission to write in {locked}" in told
        assert not list(locked.iterdir())


def _refusal_as_nobody(folder: Path) -> str:
    """What a process without root's rights is told when it opens `folder`."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            RunFolder.open(folder, "new")
        except OutputFolderError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as told:
        return told.read()


def test_an_early_check_changes_nothing(tmp_path: Path) -> None:
    check_output(tmp_path / "a/b", "overwrite")
    assert not list(tmp_path.iterdir())


def test_what_a_killed_run_was_writing_is_removed_at_the_next_start(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    (folder / "sft/.tmp-x-123").write_text("half")
    (folder / "sft/.tmp-step_3/.tmp-y").mkdir(parents=True)
    with RunFolder.open(folder, "resume"):
        assert [p.name for p in (folder / "sft").iterdir()] == ["x"]
