"""What the ranks of `test_step_laws.py` do; each function returns plain values from rank 0."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_rl_like.algorithms.policy_gradient import PolicyGradient
from nemo_rl_like.policy.gap import GapExceeded, GapLimit
from nemo_rl_like.policy.rank import NonFinite, PolicyRank, Walk
from nemo_rl_like.spec.algorithm import AlgorithmSpec
from nemo_rl_like.spec.kl import KlSpec
from nemo_rl_like.spec.optimizer import AdamWOptimizer, OptimizerSpec
from nemo_rl_like.spec.policy import LayoutSpec, PolicySpec
from nemo_rl_like.tokens.batch import TokenBatch
from nemo_rl_like.training.step_service import minibatches
from tests.policy.ranks import context_of, save_checkpoint
from tests.policy.test_laws import TEMPERATURE, make_batch

PLAIN = AdamWOptimizer(lr=1e-2, eps=1e-4, clip_grad=1.0)
DECAYED = PLAIN.model_copy(update={"weight_decay": 0.1, "schedule": "cosine", "warmup_steps": 3})
CLIP = PolicyGradient(AlgorithmSpec(kl=KlSpec(coef=0.1)))
UPDATES = 4


def member(rank: int, world: int, port: int, folder: Path, policy: PolicySpec, optimizer: OptimizerSpec) -> PolicyRank:
    """A rank that is ready to train."""
    place = context_of(policy.layout, rank, world, port)
    made = PolicyRank(place, folder=str(folder), policy=policy, dtype="float32")
    made.start_training(optimizer, 10)
    return made


def log_probs(of: PolicyRank, batch: TokenBatch) -> torch.Tensor:
    """Log-probs of the trained tokens, [N]."""
    return of._walk(batch, batch.trained_per_row > 0, Walk(TEMPERATURE), training=False).logprobs


def weights(of: PolicyRank) -> dict[str, torch.Tensor]:
    """A copy of every weight by Hugging Face name."""
    return {name: tensor.clone() for name, tensor in of.backend.store.weights() if tensor is not None}


def one_rank(rank: int, world: int, port: int, folder: Path, biased: Path) -> dict[str, Any]:
    """Every law of a single rank, in one process."""
    ready = (rank, world, port)
    return {
        "step 0": [step_zero(*ready, folder, on_policy) for on_policy in (True, False)],
        "updates": several_updates(*ready, folder),
        "decay": decay(*ready, biased),
        "gap": refused(*ready, folder, GapLimit(1e-3, 0), make_batch()),
        "nan": refused(*ready, folder, None, _poisoned(make_batch())),
        "copies": copies(*ready, folder),
    }


def step_zero(rank: int, world: int, port: int, folder: Path, on_policy: bool) -> dict[str, float]:
    """Metrics of a first update whose proximal and reference log-probs come from another layout of rows and passes."""
    batch = make_batch()
    other = member(rank, world, port, folder, PolicySpec(rows="padded", micro_batch_tokens=20), PLAIN)
    values = log_probs(other, batch)
    ready = batch.with_extras(reference=values, **({} if on_policy else {"proximal": values}))
    this = member(rank, world, port, folder, PolicySpec(micro_batch_tokens=4096), PLAIN)
    return this.train_step(ready, None, replace(CLIP, on_policy=on_policy), TEMPERATURE)


def rows_of_updates(batch: TokenBatch) -> list[list[int] | None]:
    """Minibatches of whole groups, then all rows again."""
    parts = [list(rows) if rows is not None else None for rows in minibatches(batch.group_id, 3, 1, 5)]
    return [*parts, None]


def several_updates(rank: int, world: int, port: int, folder: Path) -> list[dict[str, float]]:
    """Metrics of four updates of one step: three minibatches of whole groups, then all rows."""
    this = member(rank, world, port, folder, PolicySpec(micro_batch_tokens=20), PLAIN)
    batch = make_batch()
    values = log_probs(this, batch)
    ready = batch.with_extras(proximal=values, reference=values)
    return [this.train_step(ready, rows, CLIP, TEMPERATURE) for rows in rows_of_updates(batch)]


def decay(rank: int, world: int, port: int, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights before and after a step with weight decay whose every gradient is zero."""
    this = member(rank, world, port, folder, PolicySpec(), AdamWOptimizer(lr=0.1, weight_decay=0.5))
    before = weights(this)
    batch = make_batch()
    still = batch.with_extras(advantages=torch.zeros(batch.tokens.numel()))
    this.train_step(still, None, PolicyGradient(on_policy=True), TEMPERATURE)
    return before, weights(this)


def refused(rank: int, world: int, port: int, folder: Path, gap: GapLimit | None, batch: TokenBatch) -> dict[str, Any]:
    """What a step that must not be made leaves: its error, weights before and after, and a good step after it."""
    this = member(rank, world, port, folder, PolicySpec(), PLAIN)
    objective = PolicyGradient(on_policy=True)
    before = weights(this)
    try:
        this.train_step(batch, None, objective, TEMPERATURE, gap)
        error = ""
    except (GapExceeded, NonFinite) as caught:
        error = str(caught)
    after = weights(this)
    this.train_step(make_batch(), None, objective, TEMPERATURE)
    fresh = member(rank, world, port, folder, PolicySpec(), PLAIN)
    fresh.train_step(make_batch(), None, objective, TEMPERATURE)
    return {"error": error, "before": before, "after": after, "next": weights(this), "fresh": weights(fresh)}


def _poisoned(batch: TokenBatch) -> TokenBatch:
    """The batch with an advantage whose gradient overflows float32 where the loss does not."""
    advantages = batch.extras["advantages"].clone()
    trained = batch.loss_mask.nonzero()[:, 0]
    advantages[trained] = 1.0
    advantages[trained[0]] = 3e38
    return batch.with_extras(advantages=advantages)


def copies(rank: int, world: int, port: int, folder: Path) -> Counter[str]:
    """Where our own frames wait for the device in one step with gap, KL and entropy."""
    this = member(rank, world, port, folder, PolicySpec(micro_batch_tokens=20), PLAIN)
    batch = make_batch()
    values = log_probs(this, batch)
    ready = batch.with_extras(proximal=values, reference=values)
    with counted_copies() as found:
        this.train_step(
            ready,
            None,
            replace(CLIP, algorithm=CLIP.algorithm.model_copy(update={"entropy_coef": 0.01})),
            TEMPERATURE,
            GapLimit(1e9, 0),
        )
    return found


class _Waits(TorchDispatchMode):
    """Counts operators whose result's value or shape the host must know."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        masks = name == "aten::index" and any(t is not None and t.dtype is torch.bool for t in args[1])
        if masks or name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::unique"):
            _note(self._found)
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_copies() -> Iterator[Counter[str]]:
    """Counts `file:function` of our frames that make a device-to-host copy, directly or through an operator."""
    found: Counter[str] = Counter()
    names = ("cpu", "tolist", "numpy")
    kept = {name: getattr(torch.Tensor, name) for name in names}

    def counting(name: str) -> Any:
        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            _note(found)
            return kept[name](self, *args, **kwargs)

        return method

    for name in names:
        setattr(torch.Tensor, name, counting(name))
    try:
        with _Waits(found):
            yield found
    finally:
        for name, method in kept.items():
            setattr(torch.Tensor, name, method)


def _note(found: Counter[str]) -> None:
    """Count the innermost frame outside torch and this file, if it is ours."""
    frame = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename == __file__ or "/torch/" in frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is not None and "/nemo_rl_like/" in frame.f_code.co_filename:
        found[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"] += 1


def train_two(this: PolicyRank) -> list[float]:
    """Losses of two more steps."""
    return [this.train_step(make_batch(), None, PolicyGradient(), TEMPERATURE)["loss"] for _ in range(2)]


def saved(rank: int, world: int, port: int, folder: Path, root: Path) -> dict[str, list[float]]:
    """Train at tp=2, save, and go on; then load at pp=2 and dp=2 and go on there."""
    first = member(rank, world, port, folder, PolicySpec(layout=LayoutSpec(tp=2)), DECAYED)
    train_two(first)
    save_checkpoint(first, root, 2)
    losses = {"tp=2": train_two(first)}
    for name, layout in (("pp=2", LayoutSpec(pp=2)), ("dp=2", LayoutSpec(dp=2))):
        losses[name] = loaded(rank, world, port, folder, root, layout)
    return losses


def loaded(rank: int, world: int, port: int, folder: Path, root: Path, layout: LayoutSpec) -> list[float]:
    """Losses of two steps after loading what `saved` wrote after two updates."""
    this = member(rank, world, port, folder, PolicySpec(layout=layout), DECAYED)
    this.load(str(root / "step_2"), 2)
    return train_two(this)
