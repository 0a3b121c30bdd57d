"""Limits of control groups, as a pod and a step of Slurm see them; the tests write the kernel's files, since only a host's root makes groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_rl_like.artifacts import control_group


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(control_group, "ROOT", tmp_path / "fs")
    monkeypatch.setattr(control_group, "_OWN", tmp_path / "own")
    (tmp_path / "fs").mkdir()
    return tmp_path / "fs"


def is_in(root: Path, *lines: str) -> None:
    (root.parent / "own").write_text("\n".join(lines) + "\n")


def write(group: Path, **files: str) -> None:
    """Files of a group, whose names have a dot after the controller."""
    group.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (group / name.replace("_", ".", 1)).write_text(f"{text}\n")


def found() -> tuple[int | None, int | None, int | None]:
    return control_group.memory_limit(), control_group.memory_left(), control_group.process_limit()


def test_a_pod_sees_its_limits_at_the_root(root: Path) -> None:
    is_in(root, "0::/")
    stat = "anon 500\ninactive_file 150\nactive_file 50"
    write(root, memory_max="1000", memory_current="700", memory_stat=stat, pids_max="64")
    assert found() == (1000, 450, 64)


def test_a_steps_limit_is_the_least_of_its_group_and_those_around_it(root: Path) -> None:
    """As Slurm's cgroup plugin makes them: the job's group has the limit, the step's own none."""
    is_in(root, "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0")
    job = root / "system.slice" / "slurmstepd.scope" / "job_7"
    write(job, memory_max="1000", memory_current="900", pids_max="max")
    write(job / "step_0" / "user", memory_max="max", memory_current="100")
    write(root / "system.slice", memory_max="5000", memory_current="4990", pids_max="99")
    assert found() == (1000, 10, 99)


def test_version_1_has_a_tree_for_each_controller(root: Path) -> None:
    is_in(root, "8:pids:/slurm/job_7", "4:memory:/slurm/job_7", "3:cpu,cpuacct:/", "0::/")
    no_limit = str((1 << 63) - 4096)
    stat = "inactive_file 1\ntotal_inactive_file 150"
    write(root / "memory", memory_limit_in_bytes=no_limit, memory_usage_in_bytes="999999")
    write(
        root / "memory" / "slurm" / "job_7",
        memory_limit_in_bytes="1000",
        memory_usage_in_bytes="700",
        memory_stat=stat,
    )
    write(root / "pids" / "slurm", pids_max="64")
    assert found() == (1000, 450, 64)


@pytest.mark.parametrize("group", ["/../../kubelet/pod", "/gone"])
def test_a_group_that_the_file_system_does_not_have_is_its_root(root: Path, group: str) -> None:
    is_in(root, f"0::{group}")
    write(root, memory_max="1000", memory_current="1200")
    assert found() == (1000, 0, None)


def test_without_groups_there_is_no_limit(root: Path) -> None:
    assert found() == (None, None, None)
