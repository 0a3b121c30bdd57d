"""Ctrl-C while Ray starts is answered when it has started; a second one at once."""

from __future__ import annotations

import os
import signal

import pytest

from nemo_rl_like.cluster.ray_session import answered_after


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_one_ctrl_c_is_answered_at_the_end_and_the_handler_is_put_back() -> None:
    before, reached = signal.getsignal(signal.SIGINT), False
    with pytest.raises(KeyboardInterrupt), answered_after():
        press()
        reached = True
    assert reached and signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_is_answered_at_once() -> None:
    before, reached = signal.getsignal(signal.SIGINT), False
    with pytest.raises(KeyboardInterrupt), answered_after():
        press()
        press()
        reached = True
    assert not reached and signal.getsignal(signal.SIGINT) is before


def test_an_error_of_the_start_is_not_hidden_by_ctrl_c() -> None:
    with pytest.raises(ValueError, match="the start failed"), answered_after():
        press()
        raise ValueError("the start failed")
