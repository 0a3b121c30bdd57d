"""Whether disk and memory hold what a run surely needs: bytes that are counted, not guessed, so that a refusal is never wrong.

Activations depend on rows that are not known yet; `nrl explain` estimates them, and nothing is refused for them.
"""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from nemo_rl_like.artifacts import control_group
from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.artifacts.files import nearest_existing
from nemo_rl_like.cluster.devices import visible_devices
from nemo_rl_like.model.memory import GRADIENT, ITEMSIZE, STATE
from nemo_rl_like.model.weight_map import WeightMap
from nemo_rl_like.spec.experiment import TRAINING_STAGES, ExperimentSpec, StageSpec, stage_name
from nemo_rl_like.spec.optimizer import AdamWOptimizer, OptimizerSpec, SgdOptimizer
from nemo_rl_like.spec.reward_model import RewardModelStageSpec
from nemo_rl_like.spec.rl import RlStageSpec
from nemo_rl_like.stages.shapes import shape_of
from nemo_rl_like.stages.sharded import shapes_in

GIB = 1 << 30
TRAINED = (*TRAINING_STAGES, RewardModelStageSpec)
_QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
_QUERY_S = 20.0


def check_disk(spec: ExperimentSpec) -> None:
    """The checkpoints that all stages keep at once fit on the output's disk, beside what the run has there already.

    Raises:
        InputError: with the bytes needed, the bytes free, and the largest stage.
    """
    needed = {
        stage_name(stage): checkpoint_bytes(spec.for_stage(stage), stage) * kept_at_once(stage)
        for stage in spec.stages
        if isinstance(stage, TRAINED)
    }
    output = Path(spec.output)
    free = shutil.disk_usage(nearest_existing(output)).free + _size(output)
    if sum(needed.values()) > free:
        largest = max(needed, key=lambda name: needed[name])
        raise InputError(
            f"`output` {output}: checkpoints of this pipeline take {amount(sum(needed.values()))} at once, and its disk has "
            f"{amount(free)} for them; the largest is stage {largest!r} with {amount(needed[largest])}. Set `output` to another "
            f"disk, or lower `stages.{largest}.checkpoint.keep_last` and `keep_best`"
        )


def amount(count: float) -> str:
    """Bytes in words: GiB, or MiB of what is less than a tenth of one."""
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / (1 << 20):.1f} MiB"


def check_memory(spec: ExperimentSpec, stage: StageSpec) -> None:
    """Weights, gradients and optimizer state of the models of a stage fit the memory of this host's devices.

    Raises:
        InputError: with the bytes needed and the bytes there are, for a host that is not part of a larger cluster.
    """
    if spec.cluster.address is not None or not isinstance(stage, TRAINED) or spec.policy.backend != "megatron":
        return
    bytes_of_rank = state_bytes(spec, stage)
    ranks = spec.policy.layout.ranks
    if visible_devices(spec.cluster).kind == "gpu":
        needed, there, what = bytes_of_rank, gpu_memory(), "a rank of it, and the smallest GPU"
    else:
        needed, there, what = bytes_of_rank * ranks, host_memory(), f"its {ranks} rank(s) together, and this host"
    if there is not None and needed > there:
        raise InputError(
            f"stage {stage_name(stage)!r}: weights, gradients and optimizer state take {amount(needed)} on {what} has {amount(there)}; "
            "split the model over more ranks (`nrl layout` tells how), train adapters (`policy.lora`), or use a smaller model"
        )


def checkpoint_bytes(spec: ExperimentSpec, stage: StageSpec) -> int:
    """Least bytes of one checkpoint: weights, and the moments of what is trained."""
    weights = parameters(spec) * ITEMSIZE[spec.model.dtype]
    if not isinstance(stage, TRAINED) or spec.policy.adapted:
        return weights
    return weights + parameters(spec) * STATE * _moments(stage.optimizer)


def kept_at_once(stage: StageSpec) -> int:
    """Most checkpoints of the stage on disk at one time: those that are kept, and the one being written."""
    if not isinstance(stage, TRAINED):
        return 0
    how, steps = stage.checkpoint, stage.steps
    saves = 1 if how.every_steps == 0 else max(1, math.ceil(steps / how.every_steps))
    return min(saves, how.keep_last + how.keep_best + 1)


def state_bytes(spec: ExperimentSpec, stage: StageSpec) -> int:
    """Least bytes on one rank: the trained model's weights, gradients and moments, and weights of frozen models on the same rank.

    Ranks split a model into tp * pp parts (experts further, by ep); moments are split over the data-parallel ranks too.
    """
    layout, item = spec.policy.layout, ITEMSIZE[spec.model.dtype]
    parts = layout.tp * layout.pp * layout.ep
    mine = parameters(spec) / parts
    trained = 0.0 if spec.policy.adapted else mine
    copies = layout.ranks / (layout.tp * layout.pp)
    moments = 0 if spec.policy.offload.optimizer or not isinstance(stage, TRAINED) else _moments(stage.optimizer)
    frozen = 0 if spec.policy.offload.frozen or spec.policy.adapted else _frozen(stage)
    return int(mine * item * (1 + frozen) + trained * GRADIENT + trained * STATE * moments / copies)


def parameters(spec: ExperimentSpec) -> int:
    """Parameters of the spec's model. Raises InputError."""
    return sum(math.prod(shape) for shape in _shapes(spec))


def gpu_memory() -> int | None:
    """Bytes of the smallest GPU that the driver's own tool tells of; None where it does not answer."""
    try:
        told = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_S, check=True).stdout
        return min(int(line) for line in told.split()) << 20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def host_memory() -> int:
    """Bytes of this host's memory, or of this process's control group where that is less."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total = int(fields["MemTotal"].split()[0]) << 10
    limit = control_group.memory_limit()
    return total if limit is None else min(total, limit)


def _shapes(spec: ExperimentSpec) -> Iterator[tuple[int, ...]]:
    if spec.model.path is not None and spec.policy.backend == "fsdp":
        return iter(shapes_in(Path(spec.model.path)).values())
    return iter(WeightMap(shape_of(spec)).hf_shapes().values())


def _moments(optimizer: OptimizerSpec) -> int:
    """Least kinds of state of a parameter."""
    if isinstance(optimizer, AdamWOptimizer):
        return 2
    return int(optimizer.momentum > 0) if isinstance(optimizer, SgdOptimizer) else 1


def _frozen(stage: StageSpec) -> int:
    """References beside the trained model on its ranks; judges and teachers have shapes of their own and are not counted."""
    return int(
        isinstance(stage, RlStageSpec) and stage.models_beside["reference"] and "reference" not in stage.own_ranks
    )


def _size(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) if folder.is_dir() else 0
