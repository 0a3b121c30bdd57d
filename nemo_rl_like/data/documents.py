"""Files of documents: rows with a text each, or plain text with blank lines between documents."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.data.datasets import content_sha256, read_lines
from nemo_rl_like.data.row_files import KINDS, ROWS

_BLANK = re.compile(r"\n(?:[^\S\n]*\n)+")


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of some files."""

    source: str
    """The files, for messages to people."""
    texts: tuple[str, ...]
    """At least one, in the order of the files; none is empty."""
    sha256: str
    """Hash of the texts and their order."""


def load_documents(paths: Sequence[str | Path], text_key: str = "text") -> Documents:
    """Read every file, and of a folder every file of rows in the order of names (as NeMo Curator's writers leave them).

    Files of rows (`data/row_files.py`) have `{text_key: ...}` a row; others are text whose documents blank lines part.
    Raises InputError: a file cannot be read or has no document, or a row has no such text; names file and row.
    """
    texts = tuple(text for path in paths for file in _files(Path(path)) for text in _read(file, text_key))
    return Documents(", ".join(map(str, paths)), texts, content_sha256(texts))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.iterdir() if file.name.endswith(ROWS))
    if not found:
        raise InputError(f"{path}: the folder has no file of rows ({KINDS}); name the files themselves")
    return found


def _read(file: Path, text_key: str) -> list[str]:
    texts = _lines(file, text_key) if file.name.endswith(ROWS) else _paragraphs(file)
    kept = [text for text in texts if text.strip()]
    if not kept:
        raise InputError(f"{file}: has no document; it needs at least one that is not blank")
    return kept


def _lines(file: Path, text_key: str) -> Iterator[str]:
    for line in read_lines(file, f'like {{"{text_key}": "..."}}'):
        text = line.value.get(text_key) if isinstance(line.value, dict) else None
        if not isinstance(text, str):
            keys = sorted(line.value) if isinstance(line.value, dict) else type(line.value).__name__
            raise InputError(
                f"{line.where}: has no text in {text_key!r}; it has {keys}. Name the key that holds the text in `text_key`"
            )
        yield text


def _paragraphs(file: Path) -> Iterable[str]:
    if not file.is_file():
        raise InputError(f"{file}: no such file (looked in {Path.cwd()}); give a `.jsonl` file or a text file")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: is not UTF-8 text (byte {error.start}); convert it with `iconv -t utf-8`") from error
    return (part.strip("\n") for part in _BLANK.split(text))
