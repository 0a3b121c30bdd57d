"""The fields of a spec behind a refusal of sbatch, which speaks of its own options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nemo_rl_like.spec.launch import LaunchSpec

_FIELDS = (
    ("account/partition", ("slurm.account", "slurm.partition"), "`sacctmgr show assoc user=$USER` lists yours"),
    ("partition", ("slurm.partition", "generation.partition"), "`sinfo` lists the partitions"),
    ("qos", ("slurm.qos",), "`sacctmgr show qos` lists them"),
    ("reservation", ("slurm.reservation",), "`scontrol show reservation` lists them"),
    ("feature", ("slurm.constraint", "generation.constraint"), "`sinfo -o '%n %f'` lists what hosts have"),
    ("time limit", ("time_limit_min",), "`sinfo -o '%P %l'` lists the limits"),
    ("(gres)", ("slurm.gres_type", "generation.gres_type", "devices_per_node"), "`sinfo -o '%n %G'` lists the GPUs"),
    ("invalid node name", ("slurm.exclude",), "`sinfo -N` lists the hosts"),
    ("memory", ("memory_gib_per_node", "generation.memory_gib_per_node"), "`sinfo -o '%n %m'` lists the hosts' MiB"),
    (
        "node configuration",
        (
            "nodes",
            "devices_per_node",
            "cpus_per_node",
            "memory_gib_per_node",
            "slurm.partition",
            "generation.nodes",
            "generation.devices_per_node",
            "generation.partition",
        ),
        "`sinfo -o '%P %D %c %m %G'` lists hosts, cores, MiB and GPUs",
    ),
)
_NO_CLUSTER = (
    "establish a configuration source",
    "unable to contact slurm controller",
    "unable to process configuration",
)


def fix(words: str, launch: LaunchSpec) -> str:
    """What to look at after sbatch said `words`: the fields that were set, and the command that lists what there is; empty when they say nothing known."""
    low = words.lower()
    if any(part in low for part in _NO_CLUSTER):
        return "\nfix: submit from a host of the cluster, with its slurmctld up; SLURM_CONF names its slurm.conf"
    for part, paths, command in _FIELDS:
        if part in low:
            given = list(_given(paths, launch)) or [f"`launch.{paths[0]}`, which is not set"]
            return f"\nfix: look at {', '.join(given)}; {command}"
    return ""


def _given(paths: Sequence[str], launch: LaunchSpec) -> Iterator[str]:
    values = launch.model_dump()
    for path in paths:
        block, _, key = path.rpartition(".")
        value = ((values[block] or {}) if block else values).get(key)
        if value is not None:
            yield f"`launch.{path}` ({value})"
