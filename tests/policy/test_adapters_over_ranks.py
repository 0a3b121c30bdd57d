"""One of each kind of adapter over two ranks, told by its own reference; the slow tests of each have more layouts."""

from __future__ import annotations

from pathlib import Path

from nemo_rl_like.spec.policy import LayoutSpec, PolicySpec
from tests.policy import test_bottleneck as bottleneck
from tests.policy import test_lora_families as families
from tests.policy import test_qlora as qlora
from tests.policy.ranks import run_ranks
from tests.policy.test_laws import make_folder
from tests.policy.test_lora_laws import check, each

STAGES = LayoutSpec(pp=2, vpp=2)
PARTS = LayoutSpec(tp=2, sp=True)


def test_adapters_are_their_references_over_two_ranks(tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base")
    houlsby, parallel = (
        bottleneck.make(tmp_path / x.placement, base, x) for x in (bottleneck.HOULSBY, bottleneck.PARALLEL)
    )
    narrow = qlora.make(tmp_path / "qlora", qlora.LORA)
    latent, stacked = (families.make(tmp_path / name, name) for name in ("v3 dora", "gpt_oss experts"))
    found = run_ranks(
        each,
        2,
        tmp_path,
        [
            (houlsby, [PolicySpec(layout=STAGES, adapter=bottleneck.HOULSBY)]),
            (parallel, [PolicySpec(layout=PARTS, adapter=bottleneck.PARALLEL)]),
            (narrow, [PolicySpec(layout=PARTS, lora=qlora.LORA)]),
            *((folders, [PolicySpec(layout=families.SP, lora=lora)]) for folders, lora in (latent, stacked)),
        ],
    )
    for folders, made in zip((houlsby, parallel), found[:2], strict=True):
        bottleneck.check(made, folders)
    for case, made in zip(((qlora.on_dequantised(narrow), qlora.LORA), latent, stacked), found[2:], strict=True):
        check(made, case)
