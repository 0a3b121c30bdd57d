"""Laws of environment processes: whatever the author's code does, the framework goes on and counts it."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.environment.pool import MAX_ISOLATED_FAILURES, EnvironmentPool
from nemo_rl_like.environment.types import EnvironmentContractError, Message, Step, Task, Unscorable
from nemo_rl_like.spec.environment import EnvironmentSpec

SOURCES = "tests.environment.sample_sources"
TIMEOUT_S = 3.0
ROOT = Path(__file__).parents[2]


def _pool(kind: str, processes: int = 1, **settings) -> EnvironmentPool:
    return EnvironmentPool(
        EnvironmentSpec(name=f"{SOURCES}:{kind}", processes=processes, step_timeout_s=TIMEOUT_S), **settings
    )


def _task(text: str = "hello") -> Task:
    return Task("t", {"text": text})


def _said(text: str) -> Message:
    return Message("assistant", text)


def _outcomes(results) -> list[float | str]:
    return [r.reason if isinstance(r, Unscorable) else r.reward for r in results]


async def _score(pool: EnvironmentPool, *responses: str) -> list[float | str]:
    return _outcomes(await pool.score([_task()] * len(responses), responses))


async def test_one_bad_answer_costs_only_itself_whatever_it_does():
    async with _pool("BadGrader") as pool:
        assert await _score(pool, "a", "hang", "bbb") == [1.0, "timeout", 3.0]
        assert await _score(pool, "a", "die", "bbb") == [1.0, "crash", 3.0]
        assert await _score(pool, "a", "raise", "bbb") == [1.0, "error", 3.0]
        assert await _score(pool, "a", "unscorable", "bbb") == [1.0, "no_judge", 3.0]
        assert await _score(pool, "a", "", "nan", "bbb") == [1.0, "empty", "not_finite", 3.0]
        assert await _score(pool, "print", "bbb") == [5.0, 3.0]
        assert pool.restarts == 4
        assert pool.failures == {"timeout": 1, "crash": 1, "error": 1, "no_judge": 1, "empty": 1, "not_finite": 1}


async def test_a_batch_that_only_crashes_is_given_up_after_a_few():
    async with _pool("BadGrader") as pool:
        outcomes = await _score(pool, *["die"] * (MAX_ISOLATED_FAILURES + 3))
        assert outcomes == ["crash"] * MAX_ISOLATED_FAILURES + ["given_up"] * 3


async def test_a_batch_is_cut_over_processes_and_comes_back_in_order():
    async with _pool("BadGrader", processes=2) as pool:
        responses = ["x" * n for n in range(1, 8)]
        assert await _score(pool, *responses) == [float(n) for n in range(1, 8)]
        assert await _score(pool, "only") == [4.0]
        assert await _score(pool) == []


async def test_an_episode_that_overruns_is_unscorable_and_its_process_is_replaced():
    async with _pool("Echo") as pool:
        await pool.open(0, _task(), seed=5)
        await pool.open(1, _task(), seed=5)
        start = time.monotonic()
        with pytest.raises(Unscorable, match="timeout: no answer within 3 s"):
            await pool.step(0, _said("hang"))
        assert time.monotonic() - start < TIMEOUT_S + 10
        with pytest.raises(Unscorable, match="process_lost"):
            await pool.step(1, _said("hello"))
        assert (await pool.open(2, _task(), seed=5)).messages[0].content == "hello seed 5"
        assert (await pool.step(2, _said("again"))).messages[0].content == "again 1"
        assert pool.restarts == 1


async def test_a_call_that_waits_is_cut_off_at_the_deadline():
    async with _pool("Echo") as pool:
        await pool.open(0, _task(), seed=0)
        with pytest.raises(Unscorable, match="timeout"):
            await pool.step(0, _said("wait"))


async def test_a_crash_says_how_the_process_ended():
    async with _pool("Echo") as pool:
        with pytest.raises(Unscorable, match="crash: process .* ended with code 7"):
            await pool.open(0, _task("die"), seed=0)


async def test_an_exception_costs_the_episode_and_not_the_process():
    async with _pool("Echo") as pool:
        await pool.open(0, _task(), seed=0)
        await pool.open(1, _task(), seed=0)
        with pytest.raises(Unscorable, match="error: step raised KeyError: 'planted'"):
            await pool.step(0, _said("raise"))
        assert (await pool.step(1, _said("print"))).messages[0].content == "print 1"
        assert (await pool.step(1, _said("end"))) == Step(reward=1.0, rewards={"turns": 2.0}, terminated=True)
        await asyncio.gather(pool.drop(0), pool.drop(1), pool.drop(7))
        assert pool.restarts == 0


async def test_secrets_of_the_run_do_not_reach_the_environment(monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_RUN", "x")
    async with _pool("Echo", extra_env={"GIVEN": "y"}) as pool:
        await pool.open(0, _task(), seed=0)
        variables = (await pool.step(0, _said("variables"))).messages[0].content.split()
    assert "SECRET_OF_THE_RUN" not in variables
    assert "GIVEN" in variables


async def test_a_wrong_number_of_results_stops_the_run():
    async with _pool("ShortList") as pool:
        with pytest.raises(EnvironmentContractError, match="1 results for 2 answers"):
            await _score(pool, "a", "b")


async def test_a_source_that_cannot_be_made_is_an_input_error_with_its_last_words():
    with pytest.raises(InputError, match="did not start .* code 3: the last words"):
        await _pool("NotReady").start()


async def test_without_processes_failures_are_the_same_but_for_hangs_that_block():
    async with _pool("BadGrader", processes=0) as pool:
        assert await _score(pool, "a", "raise", "bbb", "") == [1.0, "error", 3.0, "empty"]
    async with _pool("Echo", processes=0) as pool:
        await pool.open(0, _task(), seed=0)
        with pytest.raises(Unscorable, match="timeout"):
            await pool.step(0, _said("wait"))


async def test_no_process_is_left_after_close():
    pool, before = (
        _pool("BadGrader", processes=2),
        _children(),
    )  # other tests of this process may have left a resource tracker
    await pool.start()
    made = _children() - before
    assert len(made) >= 2
    await pool.aclose()
    assert not _children() & made


def _children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def test_an_environment_that_never_returns_dies_with_its_parent():
    owner = subprocess.Popen(
        [sys.executable, "-m", "tests.environment.pool_owner"],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert owner.stdout is not None
    child = psutil.Process(int(owner.stdout.readline()))
    owner.send_signal(signal.SIGKILL)
    owner.wait(10)
    gone, alive = psutil.wait_procs([child], timeout=20)
    zombies = [p for p in alive if p.status() == psutil.STATUS_ZOMBIE]
    assert gone or zombies
