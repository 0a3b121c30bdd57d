"""One Megatron rank in the test process, tiny Hugging Face folders, one run of four ranks for all parallel laws."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nemo_rl_like.model import runtime
from nemo_rl_like.spec.policy import LayoutSpec
from tests.model import tiny
from tests.model.parallel_rank import Results, run_four_ranks
from tests.ports import free_port


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Hugging Face folder of each family."""
    return tiny.save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="package")
def one_rank() -> Iterator[None]:
    """A world of one rank in this process."""
    torch.set_num_threads(1)
    port = free_port()
    runtime.init_distributed(0, 1, "127.0.0.1", port, LayoutSpec(), 120.0, 1)
    yield
    runtime.shutdown_distributed()


@pytest.fixture(scope="session")
def four_ranks(
    request: pytest.FixtureRequest, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Results:
    """What four gloo ranks computed (one start for all tests): in every layout if one of the slow tests needs it, else in few."""
    asking = (item for item in request.session.items if "four_ranks" in getattr(item, "fixturenames", ()))
    every = any(item.get_closest_marker("slow") for item in asking)
    return run_four_ranks(folders, tmp_path_factory.mktemp("ranks"), every=every)
