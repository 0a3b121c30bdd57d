"""Train, validation and test by content: what counts as the same question never lands on two sides."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from nemo_rl_like.artifacts.errors import SpecError

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Splits(Generic[T]):
    """Three lists that share no content."""

    train: tuple[T, ...]
    validation: tuple[T, ...]
    test: tuple[T, ...]

    def named(self, split: str) -> tuple[T, ...]:
        """The list of that name. Raises SpecError for an unknown one."""
        if split == "train":
            return self.train
        if split == "validation":
            return self.validation
        if split == "test":
            return self.test
        raise SpecError(f"split is {split!r}, must be one of {', '.join(SPLITS)}")


def content_hash(*parts: str | int) -> int:
    """64-bit BLAKE2b of the parts, the same on every machine and Python."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def split_by_content(
    items: Sequence[T],
    key: Callable[[T], str],
    *,
    validation: int,
    test: int,
    seed: int,
    train: int | None = None,
) -> Splits[T]:
    """Split items so that all items of one `key` stay on one side.

    Groups of equal key are ordered by a hash of (seed, key); test is filled first, then validation, then train. A group that
    no longer fits is passed on whole. So an item's side depends on the set of keys and the seed, never on the items' order.

    Args:
        items: what to split; their order is kept inside each side of the result's groups.
        key: canonical content, for example the sorted operands of a sum.
        validation, test, train: number of items; `train=None` takes all that is left.
        seed: of the order of the groups.

    Raises:
        SpecError: there are fewer items than asked for, or train would be empty, or whole groups cannot make a size exactly.
    """
    asked = validation + test + (1 if train is None else train)
    if len(items) < asked:
        raise SpecError(
            f"the splits ask for {asked} distinct tasks or more (train {train if train is not None else 'rest, at least 1'}, "
            f"validation {validation}, test {test}), but there are {len(items)}; make the splits smaller or the task space larger"
        )
    groups: dict[str, list[T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    rest = sorted(groups, key=lambda k: (content_hash(seed, k), k))
    test_keys, rest = _fill("test", rest, groups, test)
    validation_keys, rest = _fill("validation", rest, groups, validation)
    train_keys, _ = (rest, []) if train is None else _fill("train", rest, groups, train)
    return Splits(
        train=_flatten(train_keys, groups),
        validation=_flatten(validation_keys, groups),
        test=_flatten(test_keys, groups),
    )


def _fill(name: str, keys: list[str], groups: dict[str, list[T]], size: int) -> tuple[list[str], list[str]]:
    taken: list[str] = []
    left: list[str] = []
    count = 0
    for key in keys:
        if count + len(groups[key]) <= size:
            taken.append(key)
            count += len(groups[key])
        else:
            left.append(key)
    if count != size:
        raise SpecError(
            f"the {name} split asks for {size} tasks, but tasks that belong together (a+b and b+a, repeated questions) "
            f"make {count} or more than {size}; ask for {count}"
        )
    return taken, left


def _flatten(keys: list[str], groups: dict[str, list[T]]) -> tuple[T, ...]:
    return tuple(item for key in keys for item in groups[key])
