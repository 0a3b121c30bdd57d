"""One GRPO step of this project against TRL's GRPOTrainer: one process, the same prompts, one step of each in turn.

`python benchmarks/grpo_step.py --model models/smollm2-135m --out benchmarks/results/grpo_step.json`

Both make exactly `--new-tokens` tokens (the end token is ignored), with beta 0, one update, AdamW at the same settings and the same
threads. Ours is what a run with the embedded engine does in a step: `RolloutService.collect`, `with_advantages`,
`PolicyRank.train_step` (with the gap check), `EmbeddedEngine.update_weights`; a run adds Ray's calls. Rows of zero advantage add
exactly 0 to loss and gradient and are left out of our forward pass, so two rewards are timed: `distinct`, under which every
row trains, and `first_integer`, the task's own, as it comes. The gradient is compared on one rollout of each.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peer import Meter, Question, medians, one_rank, provenance, questions, trl_trainer, write_json, write_prompts
from rewards import distinct, first_integer
from safetensors import safe_open
from transformers import TrainerCallback

from nemo_rl_like.algorithms.step import with_advantages
from nemo_rl_like.generation.embedded import EmbeddedEngine
from nemo_rl_like.policy.gap import GapLimit
from nemo_rl_like.policy.rank import PolicyRank
from nemo_rl_like.rollout.collected import CollectPlan
from nemo_rl_like.rollout.service import RolloutService
from nemo_rl_like.spec.engine import EngineSpec
from nemo_rl_like.spec.environment import EnvironmentSpec
from nemo_rl_like.spec.optimizer import AdamWOptimizer
from nemo_rl_like.spec.policy import PolicySpec
from nemo_rl_like.spec.rl import RlStageSpec
from nemo_rl_like.spec.stage import SamplingSpec
from nemo_rl_like.tokens.batch import TokenBatch
from nemo_rl_like.training.step_services import objective_of

REWARDS = {"distinct": distinct, "first_integer": first_integer}
BETA1 = 0.9
TARGET = 3.0
LIMIT = 1e-4


def main() -> int:
    """Time both, compare gradients, write the JSON; exit 1 if the speed or the gradient misses its target."""
    options = _options()
    torch.set_num_threads(options.threads)
    asked = questions(options.prompts * (options.warmup + options.steps))
    with tempfile.TemporaryDirectory() as name:
        result = Benchmark(options, asked, Path(name)).run()
    write_json(options.out, result)
    print(f"distinct rewards: {result['speedup']['distinct']}x TRL; as it comes: {result['speedup']['first_integer']}x")
    return 0 if all(result["claims"].values()) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/grpo_step.json"))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-6)
    return parser.parse_args()


class Ours:
    """The policy rank, its embedded engine, and one rollout service a reward: what the workers of a run hold."""

    def __init__(self, options: argparse.Namespace, asked: Sequence[Question], scratch: Path) -> None:
        self._options = options
        self.meter = Meter()
        self.stage = RlStageSpec(
            prompts_per_step=options.prompts,
            samples_per_prompt=options.samples,
            sampling=SamplingSpec(max_new_tokens=options.new_tokens, ignore_stop=True),
            optimizer=AdamWOptimizer(lr=options.lr),
        )
        self._objective = objective_of(self.stage)
        self._version = 0
        self._context = one_rank(options.threads)
        self.rank = self.policy()
        self.rank.start_training(self.stage.optimizer, 1000)
        self.engine = EmbeddedEngine(self._context, model_handle=self.rank.model, engine=EngineSpec())
        write_prompts(scratch / "prompts.jsonl", asked)
        self._services = {name: self._service(name, scratch) for name in REWARDS}
        self._watch()

    def policy(self) -> PolicyRank:
        """A policy with the model's weights, as a run starts it by default."""
        return PolicyRank(self._context, folder=str(self._options.model), policy=PolicySpec(), dtype="float32")

    def _service(self, reward: str, scratch: Path) -> RolloutService:
        environment = EnvironmentSpec(
            reward=f"{Path(__file__).with_name('rewards.py').resolve()}:{reward}",
            prompts=str(scratch / "prompts.jsonl"),
            config={"validation_fraction": 0.0, "test_fraction": 0.0},
        )
        return RolloutService(
            None,
            environment_json=environment.model_dump_json(),
            tokenizer_folder=str(self._options.model),
            run_seed=1,
            max_context=self.rank.model.shape.max_positions,
        )

    def _watch(self) -> None:
        self.meter.watch(self.engine, "generate", "generate")
        self.meter.watch(self.engine._decoder, "prefill", "prefill")
        self.meter.watch(self.rank, "_walk", "forward_backward")
        self.meter.watch(self.rank.backend.optimizer, "step", "optimizer")
        self.meter.watch(self.engine, "update_weights", "sync")

    def rollout(self, reward: str, step: int) -> TokenBatch:
        """The step's prompts, sampled and graded, with advantages."""
        first = step * self._options.prompts
        tasks = [f"row-{first + i + 1}" for i in range(self._options.prompts)]
        plan = CollectPlan(step, tuple(tasks), self._options.samples, self._version, self.stage.sampling)
        batch, _ = self._services[reward].collect(plan, self.engine)
        return with_advantages(batch, self.stage.algorithm, self._options.new_tokens)

    def step(self, reward: str, step: int) -> dict[str, float]:
        """One step; seconds by part, and the rows that were trained."""
        self.meter.take()
        with self.meter.part("step"):
            batch = self.rollout(reward, step)
            metrics = self.rank.train_step(batch, None, self._objective, 1.0, GapLimit(1e-3, self._version))
            self._version += 1
            self.engine.update_weights(self._version, None)
        parts = self.meter.take()
        parts["decode"] = parts.pop("generate") - parts["prefill"]
        named = sum(parts[name] for name in ("prefill", "decode", "forward_backward", "optimizer", "sync"))
        parts |= {"log_probs": 0.0, "rest": parts["step"] - named, "trained_rows": metrics["trained_rows"]}
        return parts

    def gradient(self, batch: TokenBatch, scratch: Path) -> dict[str, torch.Tensor]:
        """The gradient of this batch by Hugging Face name, at the model's first weights.

        Adam's first moment after one step without clipping is (1 - beta1) times the gradient.
        """
        fresh = self.policy()
        fresh.start_training(AdamWOptimizer(lr=self._options.lr, clip_grad=0.0, betas=(BETA1, 0.999)), 10)
        fresh.train_step(batch, None, self._objective)
        for section in ("weights", "optimizer"):
            (scratch / section).mkdir(parents=True)
        fresh.save(str(scratch))
        return _first_moments(scratch / "optimizer", 1 / (1 - BETA1))

    def close(self) -> None:
        """End the environment processes."""
        for service in self._services.values():
            service.close()


class Benchmark(TrainerCallback):
    """TRL drives; before each of its steps ours makes the same one."""

    def __init__(self, options: argparse.Namespace, asked: Sequence[Question], scratch: Path) -> None:
        self._options, self._scratch = options, scratch
        self._ours = Ours(options, asked, scratch)
        self._meter = Meter()
        self._done = 0
        self._rows: dict[str, list[dict[str, float]]] = {"distinct": [], "first_integer": [], "trl": []}
        self._trl = self._trainer(asked)

    def _trainer(self, asked: Sequence[Question]) -> Any:
        options = self._options
        settings = {
            "per_device_train_batch_size": options.prompts * options.samples,
            "num_generations": options.samples,
            "max_completion_length": options.new_tokens,
            "max_steps": options.warmup + options.steps,
            "learning_rate": options.lr,
            "generation_kwargs": {"eos_token_id": None},
        }
        trainer = trl_trainer(options.model, asked, distinct, [self], self._scratch, settings)
        trainer.eos_token_ids = [-1]  # no token ends a completion, so none is masked
        self._meter.watch(trainer, "_generate_single_turn", "generate")
        self._meter.watch(trainer, "compute_loss", "forward")
        self._meter.watch(trainer.accelerator, "backward", "backward")
        return trainer

    def run(self) -> dict[str, Any]:
        """The whole benchmark."""
        try:
            gradient = {reward: self._compare(reward) for reward in REWARDS}
            self._trl.train()
        finally:
            self._ours.close()
        return self._result(gradient)

    # -- times

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Our steps on the prompts that TRL's next one has, then start its clock."""
        for reward in REWARDS:
            self._rows[reward].append(self._ours.step(reward, self._done))
        self._meter.take()
        self._began = time.perf_counter()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Start the optimizer's clock."""
        self._optimizer_began = time.perf_counter()

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Stop it."""
        self._meter.seconds["optimizer"] += time.perf_counter() - self._optimizer_began

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Stop the step's clock."""
        step = time.perf_counter() - self._began
        parts = self._meter.take()
        rest = step - sum(parts.values())
        self._rows["trl"].append({"step": step, **parts, "rest": rest})
        self._done += 1
        print({name: round(rows[-1]["step"], 2) for name, rows in self._rows.items()}, flush=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """TRL must have made exactly the tokens that were asked for."""
        made = (logs or {}).get("completions/mean_length")
        if made is not None and made != self._options.new_tokens:
            raise RuntimeError(f"TRL made {made} tokens a completion, must be {self._options.new_tokens}")

    # -- gradients

    def _compare(self, reward: str) -> dict[str, float]:
        """How far our gradient is from TRL's on one rollout, at the same weights."""
        batch = self._ours.rollout(reward, 0)
        ours = self._ours.gradient(batch, self._scratch / f"gradient-{reward}")
        theirs = self._trl_gradient(batch)
        gc.collect()
        apart = {name: float((ours[name] - value).norm()) for name, value in theirs.items()}
        norms = {name: float(value.norm()) for name, value in theirs.items()}
        total = sum(n**2 for n in norms.values()) ** 0.5
        return {
            "rows_with_advantage": int((_row_advantages(batch) != 0).sum()),
            "norm_trl": total,
            "relative_error": sum(a**2 for a in apart.values()) ** 0.5 / total if total else float(any(apart.values())),
            "worst_tensor_relative_error": max((apart[n] / norms[n] for n in norms if norms[n]), default=0.0),
        }

    def _trl_gradient(self, batch: TokenBatch) -> dict[str, torch.Tensor]:
        """TRL's own loss and backward on this batch, at the model's first weights.

        transformers gives the pad token's row of the input embedding no gradient. SmolLM2's pad token is its end of turn,
        which stands in every prompt, so that its gradient lacks a true part; for the comparison it is switched on.
        """
        trainer, model = self._trl, self._trl.model
        embedding = model.get_input_embeddings()
        padding_idx, embedding.padding_idx = embedding.padding_idx, None
        model.train()
        model.zero_grad()
        trainer.current_gradient_accumulation_steps = 1
        trainer.compute_loss(model, _trl_inputs(batch)).backward()
        out = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        embedding.padding_idx = padding_idx
        self._meter.take()
        for values in trainer._metrics.values():
            values.clear()
        return out

    # -- report

    def _result(self, gradient: dict[str, dict[str, float]]) -> dict[str, Any]:
        warm = self._options.warmup
        found = {name: medians(rows[warm:]) for name, rows in self._rows.items()}
        speedup = {name: round(found["trl"]["step"] / found[name]["step"], 2) for name in REWARDS}
        errors = [g[k] for g in gradient.values() for k in ("relative_error", "worst_tensor_relative_error")]
        options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(self._options).items() if k != "out"}
        return {
            "what": "seconds of one GRPO step, medians; ours under two rewards, TRL under `distinct`",
            "options": options,
            "speedup": speedup,
            "median_seconds": found,
            "steps": {k: [{n: round(v, 3) for n, v in row.items()} for row in r] for k, r in self._rows.items()},
            "gradient_against_trl": gradient,
            "claims": {
                f"every row trained: at least {TARGET:g}x TRL": speedup["distinct"] >= TARGET,
                f"gradients differ by at most {LIMIT:g}": max(errors) <= LIMIT,
            },
            "measured": provenance(self._options.threads),
        }


def _first_moments(folder: Path, scale: float) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():
                if key.startswith("exp_avg/"):
                    out[key.removeprefix("exp_avg/")] = tensors.get_tensor(key) * scale
    return out


def _row_advantages(batch: TokenBatch) -> torch.Tensor:
    """float32 [B] advantage of each row."""
    last = batch.cu_seqlens[1:] - 1
    return batch.extras["advantages"][last]


def _trl_inputs(batch: TokenBatch) -> dict[str, torch.Tensor]:
    """The batch as TRL's loss takes it: prompts padded on the left, completions of one length."""
    cuts, prompts = batch.cu_seqlens.tolist(), batch.prompt_lens.tolist()
    width = max(prompts)
    ids = torch.zeros(batch.rows, width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (start, length) in enumerate(zip(cuts, prompts, strict=False)):
        ids[row, width - length :] = batch.tokens[start : start + length]
        mask[row, width - length :] = 1
    completions = torch.stack([batch.tokens[a + n : b] for a, b, n in zip(cuts, cuts[1:], prompts, strict=False)])
    return {
        "prompt_ids": ids,
        "prompt_mask": mask,
        "completion_ids": completions,
        "completion_mask": torch.ones_like(completions),
        "advantages": _row_advantages(batch),
        "num_items_in_batch": torch.tensor(completions.numel()),
    }


if __name__ == "__main__":
    raise SystemExit(main())
