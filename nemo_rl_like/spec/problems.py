"""What is wrong with a spec: each problem with its place, its path and the way out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from nemo_rl_like.artifacts.errors import SpecError
from nemo_rl_like.spec.source import Position


@dataclass(frozen=True, slots=True)
class SpecProblem:
    """One problem."""

    where: Position
    """File and line, or the override."""
    path: str
    """Dotted path of the key; empty for the file as a whole."""
    message: str
    """What is wrong."""
    suggestion: str | None = None
    """Nearest valid key or value."""
    allowed: str | None = None
    """What the key takes, or which keys there are."""
    help: str | None = None
    """The field's help text."""

    def __str__(self) -> str:
        head = f"{self.where}: {self.path}: {self.message}" if self.path else f"{self.where}: {self.message}"
        lines = [head + (f"; did you mean `{self.suggestion}`?" if self.suggestion else "")]
        if self.help:
            lines.append(f"    help: {self.help}")
        if self.allowed:
            lines.append(f"    allowed: {self.allowed}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, str | int | None]:
        """A flat JSON object: file, line, path, message, suggestion, allowed, help."""
        fields = {k: v for k, v in asdict(self).items() if k != "where"}
        return {"file": self.where.source, "line": self.where.line, **fields}


class SpecProblems(SpecError):
    """All problems of one spec, in one error."""

    def __init__(self, problems: Sequence[SpecProblem], of: str = "the spec") -> None:
        """`of`: what they are in, in words."""
        self.problems = tuple(problems)
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''} in {of}"
        super().__init__("\n".join([count, *(f"  {p}".replace("\n", "\n  ") for p in self.problems)]))
