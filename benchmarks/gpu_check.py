"""Proves the GPU half on one NVIDIA GPU, without network: `make gpu-check`, or `python benchmarks/gpu_check.py --out FILE`.

Each line is a process of its own with a time limit, so that one that fails or crashes takes no other with it. The JSON is
written again after each line: pass or fail, figures, and why where a line could not run. Float32 and bfloat16 steps and FP8 ones
are compared with the same steps on the CPU (the same weights and batch), which that machine computes first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gpu_check_parts import (
    big_batch,
    big_config,
    compare_runs,
    gap_of_samples,
    largest_metric_difference,
    policy,
    prompts,
    run_steps,
    small_batch,
    small_config,
    write_model,
)
from peer import one_rank, provenance, write_json

from nemo_rl_like.algorithms.policy_gradient import PolicyGradient
from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.checkpoint.layout import ModelIdentity
from nemo_rl_like.checkpoint.writer import CheckpointWriter
from nemo_rl_like.model import runtime
from nemo_rl_like.model.hf_config import ExpertsConfig
from nemo_rl_like.policy.rank import PolicyRank
from nemo_rl_like.spec.engine import EngineSpec
from nemo_rl_like.spec.policy import Fp8Spec, LoraSpec, OffloadSpec, PolicySpec
from nemo_rl_like.tokens.batch import TokenBatch

Figures = dict[str, Any]
ROWS = ("shared_prefix", "packed", "padded")
RECIPES = ("tensorwise", "blockwise")
ADAPTED = PolicySpec(rows="packed", lora=LoraSpec(rank=8))
DENSE_TFLOPS = {"H100": 989.0, "H200": 989.0, "H800": 989.0, "A100": 312.0, "B200": 2250.0}
"""bfloat16 peak without sparsity by the vendor's data sheets; the denominator of MFU, for FP8 too."""
WARMUP, TIMED = 2, 5


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that is proved."""

    run: Callable[[Path], Figures]
    """Gets the scratch folder; the figures have `ok`."""
    what: str
    seconds: int = 120
    """Time limit."""
    on_cpu: bool = False


def main() -> int:
    """Every line, or the one that is asked for; exit 1 if one fails or could not run."""
    options = _options()
    if options.line:
        write_json(options.scratch / f"{options.line}.json", _figures(LINES[options.line], options.scratch))
        return 0
    if not torch.cuda.is_available():
        print("gpu-check needs an NVIDIA GPU; this process sees none", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="nrl-gpu-check-") as scratch:
        return _run_all(options, Path(scratch))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu_check.json"))
    parser.add_argument("--only", nargs="*", choices=list(LINES), help="these lines, and the CPU reference before them")
    parser.add_argument("--minutes", type=float, default=9.0, help="lines that would start later are left out")
    parser.add_argument("--line", choices=list(LINES), help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _run_all(options: argparse.Namespace, scratch: Path) -> int:
    began = time.monotonic()
    names = [name for name in LINES if options.only is None or name in options.only or name == "reference"]
    result: dict[str, Any] = {"measured": {**provenance(0), **_gpu()}, "lines": {}}
    for name in names:
        line = LINES[name]
        left = options.minutes * 60 - (time.monotonic() - began)
        figures = _run_line(name, line, scratch, left) if left > 0 else _failed("no time was left (--minutes)")
        result["lines"][name] = {"what": line.what, **figures}
        result["seconds"] = round(time.monotonic() - began, 1)
        result["ok"] = all(figures["ok"] for figures in result["lines"].values())
        write_json(options.out, result)
        shown = {k: v for k, v in figures.items() if k not in ("ok", "log")}
        print(f"{'ok  ' if figures['ok'] else 'FAIL'} {name}: {json.dumps(shown)}", flush=True)
    return 0 if result["ok"] else 1


def _run_line(name: str, line: Line, scratch: Path, left: float) -> Figures:
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if line.on_cpu else {}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **hidden}
    command = [sys.executable, __file__, "--line", name, "--scratch", str(scratch)]
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=min(line.seconds, left), check=False
        )
    except subprocess.TimeoutExpired as error:
        tail = (error.stderr or b"").decode(errors="replace")[-1500:]
        return _failed(f"did not end in {error.timeout:.0f} s", tail)
    found = scratch / f"{name}.json"
    if not found.exists():
        return _failed(f"exit code {done.returncode}", done.stderr[-3000:])
    figures: Figures = json.loads(found.read_text())
    return {**figures, "seconds": round(time.monotonic() - began, 1)}


def _figures(line: Line, scratch: Path) -> Figures:
    try:
        return line.run(scratch)
    except Exception as error:  # noqa: BLE001 - a line's failure is its result
        return _failed(f"{type(error).__name__}: {error}", traceback.format_exc()[-3000:])


def _failed(why: str, log: str = "") -> Figures:
    return {"ok": False, "why": why[:2000], **({"log": log} if log else {})}


def _gpu() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
    }


# -- steps against the CPU


def reference(scratch: Path) -> Figures:
    """The CPU's float32 steps, which the GPU's are compared with, of the whole model and of adapters."""
    write_model(scratch / "small", small_config(), "float32")
    run = run_steps(scratch / "small", "float32", PolicySpec(rows="padded"), small_batch(), scratch / "cpu")
    torch.save(run, scratch / "reference.pt")
    adapted = run_steps(scratch / "small", "float32", ADAPTED, small_batch(), scratch / "cpu-adapters")
    torch.save(adapted, scratch / "adapters.pt")
    return {"ok": not runtime.on_cuda(), "tokens": small_batch().tokens.numel(), "entropy": run.metrics[0]["entropy"]}


def _against_cpu(scratch: Path, dtype: str, spec: PolicySpec, name: str, reference: str = "reference") -> Figures:
    expected = torch.load(scratch / f"{reference}.pt", weights_only=False)
    run = run_steps(scratch / "small", dtype, spec, small_batch(), scratch / name)
    return compare_runs(run, expected)


def float32_step(rows: Any) -> Callable[[Path], Figures]:
    """Equal to the CPU's within float32 rounding."""

    def run(scratch: Path) -> Figures:
        found = _against_cpu(scratch, "float32", PolicySpec(rows=rows), f"float32-{rows}")
        close = found["max_logprob_diff"] <= 1e-4 and found["gradient_relative_error"] <= 1e-4
        return {"ok": close and found["max_entropy_diff"] <= 1e-3, **found}

    return run


def adapters(scratch: Path) -> Figures:
    """Steps of adapters are the CPU's, so the layers whose norm is not fused with the product behind it are too."""
    found = _against_cpu(scratch, "float32", ADAPTED, "adapters", "adapters")
    return {"ok": found["max_logprob_diff"] <= 1e-4 and found["gradient_relative_error"] <= 1e-4, **found}


def bf16_step(rows: Any) -> Callable[[Path], Figures]:
    """Equal to the CPU's within bfloat16 rounding (8 bits of mantissa)."""

    def run(scratch: Path) -> Figures:
        found = _against_cpu(scratch, "bfloat16", PolicySpec(rows=rows), f"bf16-{rows}")
        return {"ok": found["mean_logprob_diff"] <= 0.02 and found["gradient_cosine"] >= 0.99, **found}

    return run


def fp8_step(recipe: Any) -> Callable[[Path], Figures]:
    """Equal to the CPU's within FP8 rounding (3 bits of mantissa), and not equal to bfloat16's."""

    def run(scratch: Path) -> Figures:
        found = _against_cpu(
            scratch, "bfloat16", PolicySpec(rows="packed", fp8=Fp8Spec(recipe=recipe)), f"fp8-{recipe}"
        )
        rounded = found["mean_logprob_diff"] > 1e-3
        return {"ok": rounded and found["mean_logprob_diff"] <= 0.1 and found["gradient_cosine"] >= 0.95, **found}

    return run


def fp8_delayed(scratch: Path) -> Figures:
    """As `fp8_step`, with more room: before the first pass no history says how large values are, so its factors are 1."""
    spec = PolicySpec(rows="packed", fp8=Fp8Spec(recipe="delayed"))
    found = _against_cpu(scratch, "bfloat16", spec, "fp8-delayed")
    return {"ok": found["mean_logprob_diff"] <= 0.3 and found["gradient_cosine"] >= 0.8, **found}


def fp8_parameters(recipe: Any) -> Callable[[Path], Figures]:
    """Weights kept in FP8 take less memory, and the steps are those of weights rounded for each product."""

    def run(scratch: Path) -> Figures:
        runs, gib = [], []
        for kept in (False, True):
            spec = PolicySpec(rows="packed", fp8=Fp8Spec(recipe=recipe, parameters=kept))
            torch.cuda.empty_cache()
            runs.append(
                run_steps(scratch / "small", "bfloat16", spec, small_batch(), scratch / f"kept-{recipe}-{kept}")
            )
            rank = policy(scratch / f"weights-{kept}", "bfloat16", spec, config=big_config(layers=4))
            gib.append(round(torch.cuda.memory_allocated() / 2**30, 3))
            del rank
        found = compare_runs(runs[1], runs[0])
        close = found["mean_logprob_diff"] <= 0.02 and found["gradient_cosine"] >= 0.99
        return {"ok": close and gib[1] < gib[0], "weights_gib": gib, **found}

    return run


def fp8_experts(scratch: Path) -> Figures:
    """A model with experts in FP8 against itself in bfloat16."""
    experts = ExpertsConfig(count=8, per_token=2, width=256, normalize=True)
    write_model(scratch / "mixture", replace(small_config(), family="qwen3_moe", experts=experts), "bfloat16")
    specs = [PolicySpec(rows="packed", fp8=fp8) for fp8 in (Fp8Spec(), None)]
    ours, theirs = (
        run_steps(scratch / "mixture", "bfloat16", spec, small_batch(), scratch / f"mixture-{i}")
        for i, spec in enumerate(specs)
    )
    found = compare_runs(ours, theirs)
    rounded = found["mean_logprob_diff"] > 1e-3
    return {"ok": rounded and found["mean_logprob_diff"] <= 0.1 and found["gradient_cosine"] >= 0.9, **found}


def refusals(scratch: Path) -> Figures:
    """FP8 in float32, and a recipe that this GPU lacks, are refused with the reason."""
    told = {}
    for name, dtype, recipe in (("float32", "float32", "tensorwise"), ("mxfp8", "bfloat16", "mxfp8")):
        try:
            policy(scratch / "small", dtype, PolicySpec(fp8=Fp8Spec(recipe=recipe)))  # type: ignore[arg-type]
            told[name] = ""
        except InputError as error:
            told[name] = str(error)
    blackwell = torch.cuda.get_device_capability() >= (10, 0)
    return {"ok": bool(told["float32"]) and bool(told["mxfp8"]) != blackwell, **told}


def families(scratch: Path) -> Figures:
    """Random tiny models of each family against transformers, by `nrl model check` on the GPU; Gemma's are refused there."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from nemo_rl_like.model.check import check_folder
    from nemo_rl_like.model.families import FAMILIES
    from nemo_rl_like.model.hf_experts import ExpertsConfig

    out: Figures = {}
    for family in (name for name, traits in FAMILIES.items() if not traits.post_norms):
        torch.manual_seed(1)
        experts = ExpertsConfig(8, per_token=2, width=256, normalize=True) if FAMILIES[family].experts else None
        shape = replace(small_config(), family=family, experts=experts).to_hf_dict()
        kept = {k: v for k, v in shape.items() if k not in ("architectures", "torch_dtype", "dtype", "rope_theta")}
        config = AutoConfig.for_model(**kept)
        AutoModelForCausalLM.from_config(config).to(torch.float32).save_pretrained(scratch / family)
        report = check_folder(scratch / family)
        out[family] = {
            "max_logit_diff": report.max_logit_diff,
            "round_trip_equal": report.round_trip_equal,
            "ok": report.ok,
        }
    return {"ok": all(found["ok"] for found in out.values()), **out}


def checkpoint(name: str, spec: PolicySpec) -> Callable[[Path], Figures]:
    """Saved on the GPU and loaded into a fresh rank, the next step is the same (bfloat16, so with master weights)."""

    def run(scratch: Path) -> Figures:
        batch, objective = small_batch(), PolicyGradient(on_policy=True)
        first = policy(scratch / "small", "bfloat16", spec, train=True)
        for _ in range(3):
            first.train_step(batch, None, objective, 0.8)
        with CheckpointWriter(scratch / name, 3, ModelIdentity("small", "small")) as writer:
            saved = writer.begin()
            writer.commit({}, first.save(str(saved)))
        kept = [first.train_step(batch, None, objective, 0.8) for _ in range(2)]
        second = policy(scratch / "small", "bfloat16", spec, train=True)
        second.load(str(scratch / name / "step_3"), 3)
        again = [second.train_step(batch, None, objective, 0.8) for _ in range(2)]
        apart = largest_metric_difference(kept, again)
        return {"ok": apart <= 1e-5, "max_metric_diff": apart}

    return run


def offload(scratch: Path) -> Figures:
    """With the optimizer in host memory the device holds less, and the steps are the same but for rounding (other kernels)."""
    batch, objective, runs, gib = small_batch(), PolicyGradient(on_policy=True), [], []
    for on_host in (False, True):
        spec = PolicySpec(offload=OffloadSpec(optimizer=on_host))
        torch.cuda.empty_cache()
        rank = policy(scratch / "small", "bfloat16", spec, train=True)
        runs.append([rank.train_step(batch, None, objective, 0.8) for _ in range(3)])
        gib.append(round(torch.cuda.memory_allocated() / 2**30, 4))
        del rank
    apart = largest_metric_difference(*runs)
    return {"ok": apart <= 1e-2 and gib[1] < gib[0], "max_metric_diff": apart, "gib": gib}


# -- the engine


def engine(dtype: Any, limit: float) -> Callable[[Path], Figures]:
    """The embedded engine's log-probs are the trainer's, on tokens it sampled itself."""

    def run(scratch: Path) -> Figures:
        from nemo_rl_like.generation.embedded import EmbeddedEngine
        from nemo_rl_like.generation.types import Sampling

        write_model(scratch / "medium", big_config(layers=8, hidden=1024), dtype)
        rank = policy(scratch / "medium", dtype, PolicySpec())
        made = EmbeddedEngine(one_rank(1), model_handle=rank.model, engine=EngineSpec())
        sampling = Sampling(temperature=1.0, max_new_tokens=128, ignore_stop=True)
        asked = prompts(32, 8)
        made.generate(asked, sampling)
        runtime.synchronize()
        began = time.perf_counter()
        completions = made.generate(asked, sampling)
        runtime.synchronize()
        seconds = time.perf_counter() - began
        again = made.generate(asked, sampling)
        p99, largest = gap_of_samples(rank, asked, completions)
        tokens = sum(len(c.ids) for group in completions for c in group)
        same = [c.ids for g in completions for c in g] == [c.ids for g in again for c in g]
        return {
            "ok": p99 <= limit, "gap_p99": p99, "gap_max": largest, "tokens_per_second": round(tokens / seconds),
            "rows": 256, "same_seeds_same_tokens": same,
        }  # fmt: skip

    return run


def vllm_fp8(scratch: Path) -> Figures:
    """vLLM quantises what it is sent, at each sync again: its log-probs follow the trainer's as weights change."""
    if find_spec("vllm") is None:
        return _failed("not run: vllm is not installed")
    from nemo_rl_like.generation.types import Sampling
    from nemo_rl_like.generation.vllm import VllmEngine

    write_model(scratch / "rolled", big_config(layers=8, hidden=1024), "bfloat16")
    rank = policy(scratch / "rolled", "bfloat16", PolicySpec())
    spec = EngineSpec(kind="vllm", quantization="fp8_per_tensor", kv_cache_gib=2.0)
    made = VllmEngine(one_rank(1), model_folder=str(scratch / "rolled"), dtype="bfloat16", engine=spec)
    try:
        gaps = []
        for version in (1, 2):
            with torch.no_grad():
                for weight in rank.model.parameters():
                    weight.mul_(1.25 if weight.dim() > 1 else 1.0)
            made.update_weights(version, rank.publish(version))
            asked = prompts(32, 8)
            sampled = made.generate(asked, Sampling(temperature=1.0, max_new_tokens=64, ignore_stop=True))
            gaps.append(gap_of_samples(rank, asked, sampled)[0])
    finally:
        made.close()
    return {"ok": max(gaps) <= 0.5 and min(gaps) > 1e-3, "gap_p99": gaps}


# -- weight sync


def cuda_ipc(scratch: Path) -> Figures:
    """Another process maps the weights: its checksums are the sender's, and a byte flipped in transit is named."""
    from gpu_check_parts import Receiver

    from nemo_rl_like.weights.cuda_ipc import CudaIpcSender
    from nemo_rl_like.weights.errors import WeightSyncError
    from nemo_rl_like.weights.manifest import compare

    write_model(scratch / "sent", big_config(layers=4), "bfloat16")
    rank = policy(scratch / "sent", "bfloat16", PolicySpec())
    weights = {name: tensor for name, tensor in rank.backend.store.weights() if tensor is not None}
    with Receiver() as receiver:
        sender = CudaIpcSender()
        receiver.read(sender.publish(1, {"warm": weights["model.norm.weight"]}.items()))
        runtime.synchronize()
        began = time.perf_counter()
        handle = sender.publish(2, weights.items())
        published = time.perf_counter() - began
        received, seconds = receiver.read(handle)
        compare(handle.manifest, received)
        bucket, start = handle.places[len(weights) // 2]
        sender._buckets[bucket][start] ^= 1
        runtime.synchronize()
        try:
            compare(handle.manifest, receiver.read(handle)[0])
            told = ""
        except WeightSyncError as error:
            told = str(error)
    flipped = handle.manifest.entries[len(weights) // 2].name
    gib = handle.manifest.nbytes / 2**30
    return {
        "ok": flipped in told, "gib": round(gib, 2), "publish_seconds": round(published, 4),
        "read_seconds": round(seconds, 4), "read_gib_per_second": round(gib / seconds, 1), "flipped_byte": told,
    }  # fmt: skip


# -- speed


def speed(fp8: str | None) -> Callable[[Path], Figures]:
    """Training tokens a second of a Llama with 8 layers of 4096 channels, 32,768 tokens a step in rows of 4,096."""

    def run(scratch: Path) -> Figures:
        spec = PolicySpec(
            rows="packed", micro_batch_tokens=16384, logprob_chunk_tokens=4096,
            fp8=None if fp8 is None else Fp8Spec(recipe=fp8),  # type: ignore[arg-type]
        )  # fmt: skip
        config = big_config(layers=8)
        rank = policy(scratch / "big", "bfloat16", spec, config=config, train=True)
        batch = big_batch(config, rows=8, length=4096)
        torch.cuda.reset_peak_memory_stats()
        seconds = _step_seconds(rank, batch)
        return {"ok": True, **_rates(config, batch.tokens.numel(), 4096, seconds), "peak_gib": _peak(), "fp8": fp8}

    return run


def _step_seconds(rank: PolicyRank, batch: TokenBatch) -> float:
    """Median over a few steps after the first ones."""
    objective = PolicyGradient(on_policy=True)
    seconds = []
    for _ in range(WARMUP + TIMED):
        runtime.synchronize()
        began = time.perf_counter()
        rank.train_step(batch, None, objective)
        runtime.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[WARMUP:])


def _rates(config: Any, tokens: int, length: int, seconds: float) -> Figures:
    """Tokens a second, and the model's own arithmetic a second: 6 flops a weight and token, and causal attention."""
    qkv = config.hidden_size * (config.heads + 2 * config.kv_heads) * config.head_dim
    layer = (
        qkv + config.heads * config.head_dim * config.hidden_size + 3 * config.hidden_size * config.intermediate_size
    )
    matrices = config.layers * layer + config.vocab_size * config.hidden_size
    flops = 6 * matrices + 6 * config.layers * config.heads * config.head_dim * length
    achieved = flops * tokens / seconds / 1e12
    peak = next((v for k, v in DENSE_TFLOPS.items() if k in torch.cuda.get_device_name()), None)
    return {
        "step_seconds": round(seconds, 4),
        "tokens_per_second": round(tokens / seconds),
        "model_tflops_per_second": round(achieved, 1),
        "mfu": round(achieved / peak, 3) if peak else None,
        "matrix_parameters": matrices,
    }


def shared_prefix_speed(scratch: Path) -> Figures:
    """A GRPO step with 8 prompts of 1,024 tokens, 8 samples of 512 each: prompts computed once, against packed rows."""
    config = big_config(layers=4)
    batch = big_batch(config, rows=64, length=1536, prompt=1024, samples=8)
    found: dict[str, float] = {}
    for rows in ("packed", "shared_prefix"):
        spec = PolicySpec(rows=rows, micro_batch_tokens=24576, logprob_chunk_tokens=4096)  # type: ignore[arg-type]
        rank = policy(scratch / "big4", "bfloat16", spec, config=config, train=True)
        found[f"{rows}_seconds"] = round(_step_seconds(rank, batch), 4)
        del rank
        torch.cuda.empty_cache()
    ratio = found["packed_seconds"] / found["shared_prefix_seconds"]
    return {"ok": ratio >= 1.0, "packed_over_shared_prefix": round(ratio, 2), **found}


def fp8_gain(scratch: Path) -> Figures:
    """FP8 against bfloat16 tokens a second, from the lines above."""
    found = {
        name: json.loads((scratch / f"speed_{name}.json").read_text()).get("tokens_per_second")
        for name in ("bf16", *(f"fp8_{recipe}" for recipe in RECIPES))
    }
    base = found.pop("bf16")
    ratios = {name: round(value / base, 3) for name, value in found.items() if value and base}
    return {"ok": any(ratio > 1.0 for ratio in ratios.values()), **ratios}


def _peak() -> float:
    return round(torch.cuda.max_memory_allocated() / 2**30, 2)


LINES: dict[str, Line] = {
    "reference": Line(reference, "three GRPO steps on the CPU, float32", on_cpu=True),
    **{f"float32_{r}": Line(float32_step(r), f"the same steps on the GPU in float32, {r} rows") for r in ROWS},
    **{f"bf16_{r}": Line(bf16_step(r), f"the same steps in bfloat16, {r} rows") for r in ROWS},
    **{f"fp8_{r}": Line(fp8_step(r), f"the same steps in FP8, recipe {r}") for r in RECIPES},
    "fp8_delayed": Line(fp8_delayed, "the same steps in FP8, recipe delayed"),
    **{f"fp8_parameters_{r}": Line(fp8_parameters(r), f"weights kept in FP8, recipe {r}") for r in RECIPES},
    "fp8_experts": Line(fp8_experts, "a model with experts in FP8"),
    "adapters": Line(adapters, "steps of low-rank adapters in float32"),
    "refusals": Line(refusals, "what this GPU cannot do is refused with the reason"),
    "families": Line(families, "logits of every family, experts among them, against transformers"),
    "checkpoint": Line(checkpoint("saved", PolicySpec()), "save, load, and the next steps are the same"),
    **{
        f"checkpoint_fp8_{name}": Line(checkpoint(f"saved-{name}", PolicySpec(fp8=fp8)), f"the same in FP8, {name}")
        for name, fp8 in {"delayed": Fp8Spec(recipe="delayed"), "parameters": Fp8Spec(parameters=True)}.items()
    },
    "offload": Line(offload, "the optimizer in host memory"),
    "engine_float32": Line(engine("float32", 1e-3), "sampling log-probs against the trainer's, float32"),
    "engine_bf16": Line(engine("bfloat16", 0.3), "sampling log-probs against the trainer's, bfloat16"),
    "vllm_fp8": Line(vllm_fp8, "vLLM in FP8, quantised at each weight sync", 240),
    "cuda_ipc": Line(cuda_ipc, "weights to another process through GPU memory"),
    "speed_bf16": Line(speed(None), "training speed, bfloat16"),
    **{f"speed_fp8_{r}": Line(speed(r), f"training speed, FP8 {r}") for r in RECIPES},
    "fp8_gain": Line(fp8_gain, "FP8 against bfloat16"),
    "shared_prefix_speed": Line(shared_prefix_speed, "a prompt computed once for its samples"),
}


if __name__ == "__main__":
    raise SystemExit(main())
