"""Online preference methods: XPO's and Nash-MD's loss and gradient equal to the oracle; what a block may not combine."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from nemo_rl_like.algorithms.policy_gradient import PolicyGradient
from nemo_rl_like.algorithms.preference import Preference
from nemo_rl_like.algorithms.step import with_advantages
from nemo_rl_like.spec.algorithm import AlgorithmSpec
from nemo_rl_like.spec.loader import load_spec
from nemo_rl_like.spec.online import OnlinePairsSpec
from nemo_rl_like.spec.rl import RlStageSpec

from .oracle import preference as oracle
from .pairs import pair_step
from .passes import made, splits
from .steps import on_batch, random_current, random_step, to_batch

ALPHA, BETA = 0.3, 0.4


@pytest.mark.parametrize("seed", range(3))
def test_xpo_equals_the_oracle_in_value_and_gradient_for_any_split(seed: int) -> None:
    step = pair_step(seed)
    first = torch.unique(step.batch.group_id, return_inverse=True)[1]
    theirs = (step.batch.columns["chosen"] == (first % 2)).float()  # every other pair: the opponent's is the chosen one
    batch = step.batch.with_columns(explored=theirs)
    options = OnlinePairsSpec.model_validate({"losses": [{"kind": "dpo", "beta": BETA}], "exploration": ALPHA})
    leaves = [[torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in side.current] for side in step.sides]
    total = torch.zeros((), dtype=torch.float64)
    for c in range(0, len(step.sides), 2):
        pi = [
            torch.stack([x for x, m in zip(row, side.trained, strict=True) if m]).sum()
            for row, side in zip(leaves[c : c + 2], step.sides[c : c + 2], strict=True)
        ]
        ref = [sum(side.kept(side.reference)) for side in step.sides[c : c + 2]]
        words = {"beta": BETA, "alpha": ALPHA, "reference_is_chosen": (c // 2) % 2 == 1}
        total = total + oracle.xpo(*pi, *ref, 1, 1, words)
    total = total / (len(step.sides) // 2)
    total.backward()
    slope = step.flat([[0.0 if x.grad is None else float(x.grad) for x in row] for row in leaves])
    objective = Preference(options, exploration=options.exploration)
    for parts in splits(objective, batch):
        got, got_slope = made(objective, batch, step.current, parts)
        torch.testing.assert_close(got, total.detach(), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(got_slope, slope, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("compare", ["bradley_terry", "sign"])
def test_nash_md_s_gradient_is_the_oracle_s(compare: str) -> None:
    samples = random_step(5)
    algorithm = AlgorithmSpec.model_validate(
        {
            "opponent": {"kind": "mixture"},
            "shaping": [{"kind": "win_rate", "compare": compare}],
            "advantage": {"kind": "reinforce"},
            "policy_loss": {"kind": "reinforce"},
            "aggregation": {"kind": "sequence_mean_token_sum"},
            "kl": {"coef": 0.3, "estimator": "k1", "place": "reward"},
        }
    )
    batch, places = to_batch(samples)
    current = random_current(5, samples)
    leaves = [[torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in row] for row in current]
    total, count = torch.zeros((), dtype=torch.float64), 0
    for sample, row in zip(samples, leaves, strict=True):
        live = [t for t, tok in enumerate(sample.tokens) if tok.trained]
        if not live:
            continue
        count += 1
        ahead = sample.reward - sample.opponent
        won = (
            float(torch.tensor(ahead).double().sigmoid())
            if compare == "bradley_terry"
            else (ahead > 0) + 0.5 * (ahead == 0)
        )
        ratio = sum(sample.tokens[t].proximal - sample.tokens[t].reference for t in live)
        # The oracle's log-ratio is of the log-probs that sampled: its gradient alone is by the current ones.
        pi = torch.stack([row[t] for t in live]).sum()
        total = total + oracle.nash_md(pi, float(pi.detach()) - ratio, won, 0.3)
    (total / count).backward()
    slope = on_batch(batch, places, [[0.0 if x.grad is None else float(x.grad) for x in row] for row in leaves])
    ready = with_advantages(batch, algorithm, 7)
    objective = PolicyGradient(algorithm, max_new_tokens=7, on_policy=False)
    got = made(objective, ready, on_batch(batch, places, current), [batch.loss_mask.nonzero()[:, 0]])[1]
    torch.testing.assert_close(got, slope, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"pairs": {"losses": [{"kind": "kto"}]}}, ("kto", "use `dpo`")),
        ({"pairs": {"losses": [{"kind": "bco"}]}}, ("bco", "use `dpo`")),
        ({"pairs": {"exploration": 0.1}}, ("`pairs.exploration`", "`opponent: reference`")),
        ({"pairs": {}, "kl": {"coef": 0.1}}, ("`kl`", "leave one of them out")),
        ({"pairs": {}, "advantage": {"kind": "rloo"}}, ("`advantage`", "leave one of them out")),
        ({"pairs": {}, "dynamic_sampling": {}}, ("`dynamic_sampling`",)),
        ({"opponent": {"kind": "reference"}}, ("nothing compares with it", "win_rate")),
        (
            {"opponent": {"kind": "reference"}, "shaping": [{"kind": "scale"}, {"kind": "win_rate"}]},
            ("`shaping`", "put it first"),
        ),
    ],
)
def test_what_does_not_go_together_is_refused(block: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError) as error:
        AlgorithmSpec.model_validate(block)
    assert all(word in str(error.value) for word in words), error.value


def test_a_stage_needs_what_it_compares() -> None:
    with pytest.raises(ValidationError, match="give `opponent: reference`"):
        RlStageSpec.model_validate({"algorithm": {"shaping": [{"kind": "win_rate"}]}})
    with pytest.raises(ValidationError, match="needs at least 2"):
        RlStageSpec.model_validate({"samples_per_prompt": 1, "algorithm": {"pairs": {}}})
    RlStageSpec.model_validate({"samples_per_prompt": 1, "algorithm": {"pairs": {}, "opponent": {"kind": "reference"}}})


def test_presets_choose_who_answers_and_what_is_minimised() -> None:
    spec = lambda name: (
        load_spec("configs/demo.yaml", [f"stages.grpo.algorithm={{preset: {name}}}"]).stages[1].algorithm
    )
    assert spec("online_dpo").pairs is not None and spec("online_dpo").opponent is None
    assert spec("xpo").opponent.kind == "reference" and spec("xpo").pairs.exploration == 1e-5
    nash = spec("nash_md")
    assert nash.opponent.share == 0.125 and nash.shaping[0].kind == "win_rate" and nash.kl.place == "reward"
    assert nash.needs_reference and spec("online_dpo").needs_reference and not AlgorithmSpec().needs_reference
