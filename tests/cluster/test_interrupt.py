"""Ctrl-C while a session is open is answered at the next safe point, a second one at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from nemo_rl_like.cluster import interrupt
from nemo_rl_like.training.signals import StopRequest


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    interrupt.install()
    yield
    interrupt.uninstall()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_is_answered_at_the_next_safe_point_and_once() -> None:
    interrupt.check()
    press()
    with pytest.raises(KeyboardInterrupt):
        interrupt.check()
    interrupt.check()


def test_a_second_ctrl_c_is_answered_at_once() -> None:
    press()
    with pytest.raises(KeyboardInterrupt):
        press()


def test_in_the_step_loop_the_first_asks_to_save_and_the_second_ends_at_a_safe_point() -> None:
    with StopRequest() as stop:
        press()
        interrupt.check()
        assert stop.received == "SIGINT"
        press()
        with pytest.raises(KeyboardInterrupt):
            interrupt.check()


def test_a_handler_of_somebody_else_is_left_alone() -> None:
    interrupt.uninstall()
    mine = signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupt.install()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, mine)
