"""Run the demo with its two controls for several seeds and write every result to one JSON file.

`python benchmarks/demo_seeds.py 1 2 3 --out benchmarks/results/demo_seeds.json` adds each seed's result as it ends (a seed that is
there with the same spec is run again and replaced). The claims that are checked for each seed stand in `claims`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from nemo_rl_like.observe.metrics import read_series
from nemo_rl_like.spec.loader import load_spec, spec_hash

SPEC = Path("configs/demo_controls.yaml")
STAGES = ("sft", "grpo", "shuffled", "sft_continued")


def main() -> int:
    """Run each seed; exit 1 if a claim fails."""
    parser = argparse.ArgumentParser()
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/demo_seeds.json"))
    parser.add_argument("--runs", type=Path, default=Path("runs/demo_seeds"))
    options = parser.parse_args()
    ok = True
    for seed in options.seeds:
        result = one_seed(seed, options.runs / str(seed))
        print(json.dumps(result, indent=1), flush=True)
        ok &= all(result["claims"].values())
        found = json.loads(options.out.read_text()) if options.out.exists() else []
        kept = [r for r in found if (r["seed"], r["spec_hash"]) != (seed, result["spec_hash"])]
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps([*kept, result], indent=1) + "\n")
    return 0 if ok else 1


def one_seed(seed: int, output: Path) -> dict:
    """Run the spec for one seed and judge it."""
    began = time.monotonic()
    overrides = [f"seed={seed}", f"output={output}"]
    nrl = str(Path(sys.executable).with_name("nrl"))
    subprocess.run([nrl, "run", str(SPEC), *overrides, "--overwrite", "--plain"], check=True, stdout=subprocess.DEVNULL)
    report = json.loads((output / "report.json").read_text())
    recomputed = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("recompute_accuracy.py")), str(output)],
        capture_output=True,
        text=True,
    )
    accuracy = report["heldout_accuracy"]
    gain = {name: accuracy[name] - accuracy["sft"] for name in STAGES[1:]}
    validation = dict(read_series(output / "sft" / "metrics.jsonl", "validation/loss"))
    last = max(validation)
    plateau = 1 - validation[last] / validation[last * 4 // 5]
    wall = report["wall_seconds"]
    return {
        "seed": seed,
        "spec_hash": spec_hash(load_spec(SPEC, [f"seed={seed}"])),
        "commit": commit(),
        "heldout_accuracy": accuracy,
        "gain": gain,
        "sft_validation_fall_over_last_fifth": plateau,
        "recomputed_with_transformers": json.loads(recomputed.stdout),
        "wall_seconds": {**wall, "measured": round(time.monotonic() - began, 1)},
        "load_average": os.getloadavg(),
        "claims": {
            "grpo gains at least 15 points": gain["grpo"] >= 0.15,
            "shuffled rewards gain less than 3 points": gain["shuffled"] < 0.03,
            "continued sft took at least grpo's wall time": wall["sft_continued"] >= wall["grpo"],
            "continued sft gains less than half of grpo's": gain["sft_continued"] < gain["grpo"] / 2,
            "sft had reached its plateau (fall below 1 %)": plateau < 0.01,
            "transformers agrees exactly": recomputed.returncode == 0,
        },
    }


def commit() -> str:
    """The commit that was run, marked if the tree had changes."""
    text = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True)
    return text.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
