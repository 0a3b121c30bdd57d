"""The file that tells where a bundle comes from."""

from __future__ import annotations

import json
from collections.abc import Mapping

from nemo_rl_like.artifacts.hashing import JSON

LINEAGE = "lineage.json"
"""Its name in a bundle."""


def lineage_text(lineage: Mapping[str, JSON]) -> str:
    """`lineage.json` as it is written: stages in their order."""
    return json.dumps(lineage, indent=1, allow_nan=False) + "\n"
