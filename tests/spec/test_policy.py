"""What a policy block refuses by itself."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from nemo_rl_like.spec.policy import LayoutSpec, PolicySpec


@pytest.mark.parametrize(
    ("layout", "named"),
    [
        ({"sp": True}, "`sp` shares sequences .* `tp` is 1; leave it out, or raise `tp`"),
        ({"vpp": 2}, "`vpp` gives .* several stages, and `pp` is 1; leave it out, or raise `pp`"),
        ({"tp": 2, "ep": 3}, r"`ep` \* `etp` is 3 \* 2, which does not divide .* \(1 \* 1 \* 2\)"),
    ],
)
def test_a_layout_that_contradicts_itself_names_the_field_and_the_way_out(
    layout: dict[str, object], named: str
) -> None:
    with pytest.raises(ValidationError, match=named):
        LayoutSpec.model_validate(layout)


def test_stages_lie_on_ranks_in_turn() -> None:
    layout = LayoutSpec(tp=2, pp=2, vpp=3, dp=2, sp=True)
    assert (layout.stages, layout.ranks) == (6, 8)


@pytest.mark.parametrize(
    "given",
    [
        {"recompute": {}},
        {"recompute": {"kind": "full", "layers": 2}},
        {"recompute": {"kind": "selective"}},
        {"fp8": {}},
        {"fp8": {"recipe": "delayed", "margin": 1}},
        {"adapter": {"kind": "bottleneck", "width": 8}},
        {"lora": {"base": {"kind": "nf4"}}},
    ],
)
def test_a_block_may_be_written_out_with_every_default(given: dict[str, object]) -> None:
    """As a run's folder has it, from which it is resumed."""
    policy = PolicySpec.model_validate(given)
    assert PolicySpec.model_validate(policy.model_dump()) == policy
