"""Rows of a data file: JSON lines, plain or gzipped, a JSON list, or Parquet."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.data.messages import JSON

ROWS = (".jsonl", ".jsonl.gz", ".json", ".parquet")
"""How the names of such files end."""
KINDS = ".jsonl, .jsonl.gz, .json (a list) or .parquet"


@dataclass(frozen=True, slots=True)
class Line:
    """One row of a data file."""

    value: JSON
    """What it says."""
    number: int
    """Line or row number, from 1."""
    where: str
    """`file:number`, for messages to people."""


def rows_of(file: Path) -> Iterator[Line]:
    """Every row that is not blank, in order.

    Raises:
        InputError: the file is not text or not JSON (names file and line), or Parquet cannot be read here.
    """
    if file.suffix == ".parquet":
        yield from _parquet(file)
    elif file.suffix == ".json":
        yield from _list(file)
    else:
        yield from _lines(file)


def _lines(file: Path) -> Iterator[Line]:
    for number, text in enumerate(_text(file).splitlines(), 1):
        if not text.strip():
            continue
        where = f"{file}:{number}"
        try:
            yield Line(json.loads(text), number, where)
        except json.JSONDecodeError as error:
            raise InputError(f"{where}: is not valid JSON: {error.msg} at column {error.colno}") from error


def _text(file: Path) -> str:
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        return raw.decode("utf-8")
    except (gzip.BadGzipFile, EOFError) as error:
        raise InputError(f"{file}: is no whole gzip file ({error}); copy it again") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: is not UTF-8 text (byte {error.start}); convert it with `iconv -t utf-8`") from error


def _list(file: Path) -> Iterator[Line]:
    try:
        rows = json.loads(_text(file))
    except json.JSONDecodeError as error:
        raise InputError(
            f"{file}:{error.lineno}: is not valid JSON: {error.msg}; JSON lines are named .jsonl"
        ) from error
    if not isinstance(rows, list):
        raise InputError(
            f"{file}: holds one {type(rows).__name__}, must hold a list of rows; JSON lines are named .jsonl"
        )
    for number, row in enumerate(rows, 1):
        yield Line(row, number, f"{file}:{number}")


def _parquet(file: Path) -> Iterator[Line]:
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError as error:
        raise InputError(
            f"{file}: reading Parquet needs pyarrow; `pip install pyarrow`, or convert the file to .jsonl"
        ) from error
    try:
        rows = parquet.read_table(file).to_pylist()
    except (ArrowException, OSError) as error:
        raise InputError(f"{file}: is no readable Parquet file: {error}") from error
    for number, row in enumerate(rows, 1):
        yield Line(_without_fill(row), number, f"{file}:{number}")


def _without_fill(value: JSON) -> JSON:
    """A row without the nulls that columnar files fill in where rows of one column have different keys."""
    if isinstance(value, Mapping):
        return {key: _without_fill(below) for key, below in value.items() if below is not None}
    if isinstance(value, list):
        return [_without_fill(item) for item in value]
    return value
