"""Which texts are secrets: names of variables that say so, and values of known shapes."""

from __future__ import annotations

import re

_WORDS = r"TOKEN(?!IZ)|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE|JWT"
_SECRET = re.compile(_WORDS, re.IGNORECASE)
_NOT_SECRET = frozenset({"RAY_AUTH_TOKEN_PATH"})  # a path, not a value
_VALUE = re.compile(
    r"\b(hf_|gh[pousr]_|github_pat_|glpat-|nvapi-|sk-|xox[abprs]-)[A-Za-z0-9_-]{20,}"  # Hugging Face, GitHub, GitLab, NVIDIA, OpenAI, Slack
    r"|\bAKIA[0-9A-Z]{16}\b|\beyJ[A-Za-z0-9_-]{10,}\.eyJ|-----BEGIN [A-Z ]*PRIVATE KEY"  # AWS, JSON web tokens, PEM
    r"|://[^/\s:@]*:[^/\s@]+@"  # an address with a password in it
)
_GIVEN = re.compile(rf"^\s*secrets\b|({_WORDS})\w*[\"']?\s*[:=]\s*(?!-?[\d.]+\s*([,}}\]]|$))\S", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Whether a variable's name says that its value is a secret."""
    return name not in _NOT_SECRET and _SECRET.search(name) is not None


def is_secret_value(text: str) -> bool:
    """Whether a text has the shape of a well-known kind of token, or is an address with a password in it."""
    return _VALUE.search(text) is not None


def may_hold_secret(override: str) -> bool:
    """Whether a line that sets something (`a.b=value`, `{b: value}`) could give a secret away if it was repeated."""
    return _GIVEN.search(override) is not None or is_secret_value(override)
