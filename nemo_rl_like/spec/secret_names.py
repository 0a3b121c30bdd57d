"""Which names of variables say that their value is a secret."""

from __future__ import annotations

import re

_SECRET = re.compile(r"TOKEN(?!IZ)|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE|JWT", re.IGNORECASE)
_NOT_SECRET = frozenset({"RAY_AUTH_TOKEN_PATH"})  # a path, not a value


def is_secret(name: str) -> bool:
    """Whether a variable's name says that its value is a secret."""
    return name not in _NOT_SECRET and _SECRET.search(name) is not None
