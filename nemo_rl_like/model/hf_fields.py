"""Reads a Hugging Face `config.json` field by field; what is not as expected is an InputError that names the file and the field."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_rl_like.artifacts.errors import InputError


class HfFields:
    """The fields of one config, `source` being where it is, for messages."""

    def __init__(self, raw: Mapping[str, object], source: str) -> None:
        self._raw, self._source = raw, source

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer; `default` where it is absent or null."""
        value = self._raw.get(name)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(name, f"is {value!r}; expected a positive integer")
        return value

    def number(self, name: str, default: float) -> float:
        """A number; `default` where it is absent or null."""
        value = self._raw.get(name)
        return default if value is None else self._number(name, value)

    def positive(self, name: str, default: float | None) -> float | None:
        """A positive number, or None where the config says null; `default` where it is absent."""
        value = self._raw.get(name, default)
        if value is None:
            return None
        number = self._number(name, value)
        if number <= 0:
            raise self.error(name, f"is {value!r}; expected a positive number or null")
        return number

    def token_ids(self, name: str) -> tuple[int, ...]:
        """A token id, a list of them, or none."""
        value = self._raw.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) for i in ids):
            raise self.error(name, f"is {value!r}; expected a token id or a list of token ids")
        return tuple(ids)

    def token_id(self, name: str) -> int | None:
        """The first token id."""
        ids = self.token_ids(name)
        return ids[0] if ids else None

    def error(self, name: str, what: str) -> InputError:
        """What is wrong with a field."""
        return InputError(f"{self._source}: {name} {what}")

    def _number(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, f"is {value!r}; expected a number")
        return float(value)
