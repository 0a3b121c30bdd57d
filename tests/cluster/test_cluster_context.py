"""Laws of axes, of the environment's allow-list and of the errors' texts; nothing is started."""

from __future__ import annotations

import asyncio
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_like.artifacts.errors import NrlError, SpecError
from nemo_rl_like.cluster.context import axis_ranks, world_size
from nemo_rl_like.cluster.devices import require_devices, threads_of_rank
from nemo_rl_like.cluster.environment import allowed
from nemo_rl_like.cluster.errors import DeadlineExceeded, WorkerDied, WorkerFailed
from nemo_rl_like.cluster.last_words import exit_cause
from nemo_rl_like.cluster.worker import Turnstile
from nemo_rl_like.spec.cluster import ClusterSpec
from nemo_rl_like.spec.secret_names import is_secret


@settings(deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=3), st.integers(1, 4), min_size=1, max_size=4))
def test_ranks_fill_the_axes_in_row_major_order(axes: dict[str, int]) -> None:
    seen = [tuple(axis_ranks(rank, axes).values()) for rank in range(world_size(axes))]
    assert seen == sorted(set(seen))
    assert all(0 <= c < size for place in seen for c, size in zip(place, axes.values(), strict=True))


def test_the_last_axis_is_fastest() -> None:
    assert axis_ranks(1, {"dp": 2, "tp": 2}) == {"dp": 0, "tp": 1}


def test_an_empty_axis_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'tp' has size 0"):
        world_size({"dp": 1, "tp": 0})


def test_secrets_and_strangers_stay_out_of_rays_environment() -> None:
    given_env = {
        "PATH": "/bin",
        "OMP_NUM_THREADS": "1",
        "NRL_FAULT": "sync.mid:1",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_AUTH_TOKEN_PATH": "/run/token",
        "https_proxy": "http://proxy:1",
    }
    kept_out = {
        "HF_TOKEN": "x",
        "RAY_AUTH_TOKEN": "x",
        "VLLM_API_KEY": "x",
        "NRL_DB_PASSWORD": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "WANDB_API_KEY": "x",
        "MY_OWN_THING": "x",
        "SLURM_JOB_ID": "7",
        "PMI_RANK": "0",
        "http_proxy": "http://user:pw@proxy:1",
    }
    assert allowed({**given_env, **kept_out}) == given_env
    assert is_secret("my_token") and not is_secret("TOKENIZERS_PARALLELISM")


def test_more_ranks_than_devices_names_field_and_numbers() -> None:
    assert require_devices(3, ClusterSpec(devices=3)).count == 3
    with pytest.raises(SpecError, match=r"`policy\.layout` asks for 4 ranks, but there are 3 "):
        require_devices(4, ClusterSpec(devices=3))


def test_a_rank_always_has_a_thread() -> None:
    assert threads_of_rank(0, 10_000) == 1
    assert threads_of_rank(3, 10_000) == 3


@pytest.mark.parametrize(
    "error",
    [
        WorkerDied("policy", 1, "host", "was killed", "line"),
        WorkerFailed("policy", 0, "host", "update 3", "ValueError: x", "stack", ""),
        DeadlineExceeded("update 3", 5.0, ["policy rank 1"], "line"),
    ],
)
def test_errors_travel_between_processes_unchanged(error: NrlError) -> None:
    twin = pickle.loads(pickle.dumps(error))
    assert (type(twin), str(twin)) == (type(error), str(error))


def test_exit_causes_are_told_apart() -> None:
    dead = "The actor is dead because its worker process has died. connection error code 2. End of file."

    def cause(log: str, detail: str = dead, kills: int = 1 << 40) -> str:
        return exit_cause(log, detail, node="elsewhere", oom_kills_before=kills)

    assert cause("a\nnrl: this process called os._exit(7)\n").startswith("called os._exit(7)")
    assert cause("Fatal Python error: Segmentation fault\n").startswith("crashed (Segmentation fault)")
    assert cause("hello").startswith("was killed by SIGKILL")
    assert cause("hello", "its node has died") == "its node has died"


@settings(deadline=None)
@given(st.permutations(range(6)))
async def test_calls_pass_the_turnstile_in_their_order_whatever_the_order_of_arrival(arrival: list[int]) -> None:
    turnstile, passed = Turnstile(), []

    async def call(sequence: int) -> None:
        await turnstile.enter(sequence)
        passed.append(sequence)
        turnstile.leave()

    await asyncio.gather(*(call(sequence) for sequence in arrival))
    assert passed == list(range(6))
