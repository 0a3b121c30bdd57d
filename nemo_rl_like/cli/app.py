"""The commands of `nrl`. Each parses, calls and prints; what it calls is imported when it runs, so that help is instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from nemo_rl_like.launch.node import held
from nemo_rl_like.pipeline.run_folder import Start


class _Commands(TyperGroup):
    """The commands, of which one has two words beside another that has its first."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        both = " ".join(args[:2])
        return super().resolve_command(ctx, [both, *args[2:]] if both in self.commands else args)


app = typer.Typer(
    name="nrl",
    cls=_Commands,
    help="Post-training for language models: one typed spec from data to a served checkpoint.",
    epilog="Exit codes: 0 done, 1 failed, 2 bad spec, input or output folder, 75 stopped by a signal after saving, 130 Ctrl-C.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
environments = typer.Typer(help="Environments: what asks and judges.", no_args_is_help=True, rich_markup_mode=None)
models = typer.Typer(help="Models: fetch and check.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(environments, name="env")
app.add_typer(models, name="model")
tokenizers = typer.Typer(help="Tokenizers: train one.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(tokenizers, name="tokenizer")

pipelines = typer.Typer(
    help="Pipelines: what a run would do, does and did.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(pipelines, name="pipeline")

SpecFile = Annotated[Path, typer.Argument(metavar="SPEC", help="Spec file (YAML).")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, for example stages.rl.steps=5 or model.path=models/x."),
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Output folder of a run.")]
Source = Annotated[
    Path, typer.Argument(metavar="PATH", help="Output folder of a run (its last checkpoint) or a checkpoint folder.")
]
Plain = Annotated[bool, typer.Option("--plain", help="Plain lines: no colours, no progress bar.")]
Until = Annotated[
    str | None, typer.Option("--until", metavar="STAGE", help="Last stage to run; the others are left for later.")
]
JobFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="Output folder of a submitted run, or a submission's own folder.")
]
Wait = Annotated[bool, typer.Option("--wait", help="Until the job has ended; exit with its code.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def demo(
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 1,
    output: Annotated[Path, typer.Option(help="Output folder; a demo that is there is replaced.")] = Path("runs/demo"),
    plain: Plain = False,
) -> None:
    """Train a tiny model to add, end to end: SFT, GRPO, evaluation, export."""
    from nemo_rl_like.cli.commands import run as command

    command.demo(seed, output, plain=plain)


@app.command()
def run(
    spec: SpecFile,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in the output folder, or start it.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the output folder.")] = False,
    until: Until = None,
    plain: Plain = False,
) -> None:
    """Run the pipeline of a spec."""
    from nemo_rl_like.cli.commands import run as command

    if resume and overwrite:
        raise typer.BadParameter("--resume and --overwrite exclude each other")
    start: Start = "resume" if resume else "overwrite" if overwrite else "new"
    command.run(spec, overrides or [], start=start, plain=plain, until=until)


@app.command()
def resume(run_folder: RunFolder, overrides: Overrides = None, plain: Plain = False) -> None:
    """Continue a run from its output folder alone."""
    from nemo_rl_like.cli.commands import run as command

    command.resume(run_folder, overrides or [], plain=plain)


@app.command()
def node(
    spec: SpecFile,
    overrides: Overrides = None,
    join: Annotated[
        str | None,
        typer.Option("--join", metavar="HOST:PORT", help="The first host, as it prints it; without a scheduler only."),
    ] = None,
    until: Until = None,
    exit_code_file: Annotated[
        Path | None,
        typer.Option("--exit-code-file", metavar="FILE", help="Write the exit code there, too.", hidden=True),
    ] = None,
    stop_file: Annotated[
        Path | None,
        typer.Option("--stop-file", metavar="FILE", help="Save and stop once this file is there.", hidden=True),
    ] = None,
) -> None:
    """One host's part of a job: forms the cluster, runs the driver, ends it all. What schedulers start, once on each host."""
    held.hold()
    from nemo_rl_like.cli.commands import job as command

    files = {"exit_code_file": exit_code_file, "stop_file": stop_file}
    raise typer.Exit(command.node(spec, overrides or [], join=join, until=until, **files))


@app.command()
def submit(
    spec: SpecFile,
    overrides: Overrides = None,
    to: Annotated[str, typer.Option("--to", help="local, slurm, kubernetes or container.")] = "local",
    via: Annotated[
        str | None, typer.Option("--via", help="nemo-run: as an Experiment of NeMo-Run, to local or slurm.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the files, let the target check them, start nothing.")
    ] = False,
    wait: Wait = False,
    seeds: Annotated[
        str | None, typer.Option("--seeds", metavar="N,N", help="One run a seed, in OUTPUT-seedN; an array on Slurm.")
    ] = None,
    stages_as_jobs: Annotated[
        bool, typer.Option("--stages-as-jobs", help="One job a stage, each after the success of the one before.")
    ] = False,
    until: Until = None,
) -> None:
    """Start a spec as a job: here, or on a cluster. RUN in the other commands is its output folder."""
    from nemo_rl_like.cli.commands import job as command

    request = command.request_of(
        spec, overrides or [], to, via=via, seeds=seeds, stages_as_jobs=stages_as_jobs, until=until
    )
    if dry_run:
        command.show(request)
        return
    raise typer.Exit(command.start(request, waits=wait))


@app.command()
def status(run_folder: JobFolder, as_json: AsJson = False) -> None:
    """How far a submitted job is, and the stages of its run."""
    from nemo_rl_like.cli.commands import job as command

    command.tell(run_folder, as_json=as_json)


@app.command()
def logs(
    run_folder: JobFolder,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
) -> None:
    """The log of a submitted job."""
    from nemo_rl_like.cli.commands import job as command

    command.logs(run_folder, follow=follow)


@app.command()
def cancel(run_folder: JobFolder) -> None:
    """End a submitted job; its checkpoints stay."""
    from nemo_rl_like.cli.commands import job as command

    command.cancel(run_folder)


@app.command()
def resubmit(run_folder: JobFolder, wait: Wait = False) -> None:
    """Submit once more what was submitted last; the run goes on from its last checkpoint."""
    from nemo_rl_like.cli.commands import job as command

    raise typer.Exit(command.again(run_folder, waits=wait))


@app.command()
def validate(spec: SpecFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Check a spec without starting anything: keys, types, combinations, references between stages."""
    from nemo_rl_like.cli.commands import spec as command

    if not command.validate(spec, overrides or [], as_json=as_json):
        raise typer.Exit(2)


@app.command()
def explain(
    spec: SpecFile,
    overrides: Overrides = None,
    device: Annotated[str, typer.Option(help="Device to plan for: a100, h100, h200, b200.")] = "h100",
    efficiency: Annotated[float, typer.Option(min=0.01, max=1.0, help="Share of its peak that is reached.")] = 0.4,
    every_value: Annotated[bool, typer.Option("--all", help="Show defaults too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Tell what a spec comes to: each value's origin, devices, memory, tokens, time, downloads, warnings."""
    from nemo_rl_like.cli.commands import explain as command

    command.explain(
        spec,
        overrides or [],
        device=device,
        efficiency=efficiency,
        every_value=every_value,
        as_json=as_json,
    )


@app.command()
def doctor(
    spec: Annotated[
        Path | None, typer.Argument(metavar="[SPEC]", help="Spec of the job that this host is to carry.")
    ] = None,
    overrides: Overrides = None,
    shared: Annotated[Path | None, typer.Option(help="Folder that all hosts see; default: the spec's output.")] = None,
    as_json: AsJson = False,
) -> None:
    """Examine this host: drivers, fabric, shared folder, ports, limits, versions; each finding with its fix."""
    from nemo_rl_like.cli.commands import doctor as command

    if not command.doctor(spec, overrides or [], shared, as_json=as_json):
        raise typer.Exit(1)


@app.command()
def schema() -> None:
    """Print the JSON Schema of a spec, for editors."""
    from nemo_rl_like.cli.commands import spec as command

    command.schema()


@app.command()
def algorithms(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Print this algorithm's lines.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the named algorithms, or print the spec lines of one."""
    from nemo_rl_like.cli.commands import spec as command

    command.algorithms(name, as_json=as_json)


@app.command()
def layout(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Hugging Face folder, config.json, or a name, as llama-3.1-8b or deepseek-v3; any other word lists them.",
        ),
    ],
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the policy.")],
    gpu_memory: Annotated[float, typer.Option(min=0.001, help="Memory of one GPU, in GiB.")] = 80.0,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs that share a node.")] = 8,
    micro_batch_tokens: Annotated[int, typer.Option(min=1, help="`policy.micro_batch_tokens`.")] = 16384,
    step_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one update, over all GPUs.")] = 1 << 20,
    recompute: Annotated[
        str,
        typer.Option(
            help="Activations computed again: none, full, full:N (layers of a stage), or of core_attn,mlp,moe; auto: as few layers as fit."
        ),
    ] = "auto",
    offload_optimizer: Annotated[
        bool, typer.Option("--offload-optimizer", help="Optimizer state in host memory (`policy.offload.optimizer`).")
    ] = False,
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor-parallel ranks; default: any.")] = None,
    cp: Annotated[int | None, typer.Option(min=1, help="Context-parallel ranks; default: any.")] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="Pipeline-parallel ranks; default: any.")] = None,
    vpp: Annotated[int | None, typer.Option(min=1, help="Pipeline stages of a rank; default: 1, 2 or 4.")] = None,
    dp: Annotated[int | None, typer.Option(min=1, help="Data-parallel ranks; default: any.")] = None,
    ep: Annotated[int | None, typer.Option(min=1, help="Expert-parallel ranks; default: any.")] = None,
    etp: Annotated[
        int | None, typer.Option(min=1, help="Tensor-parallel ranks of an expert; default: 1 or tp.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan which `policy.layout` fits a number of GPUs; nothing is run."""
    from nemo_rl_like.cli.commands import layout as command

    asked = {"tp": tp, "cp": cp, "pp": pp, "vpp": vpp, "dp": dp, "ep": ep, "etp": etp}
    question = command.question(
        model, gpus, gpu_memory, gpus_per_node, micro_batch_tokens, step_tokens, recompute, offload_optimizer
    )
    if not command.layout(model, question, {k: v for k, v in asked.items() if v is not None}, as_json=as_json):
        raise typer.Exit(2)


@app.command("eval")
def evaluate(
    source: Source,
    split: Annotated[str, typer.Option(help="`validation` or `test`.")] = "test",
    tasks: Annotated[int | None, typer.Option(min=1, help="Number of tasks; default: all.")] = None,
    samples: Annotated[int, typer.Option(min=0, help="Samples a task beside the greedy answer.")] = 0,
    temperature: Annotated[float, typer.Option(min=0.01, help="Temperature of the samples.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest response, in tokens.")] = 256,
    as_json: AsJson = False,
) -> None:
    """Evaluate a checkpoint on the held-out tasks of its own environment."""
    from nemo_rl_like.cli.commands import checkpoint as command

    command.evaluate(source, command.evaluation(split, tasks, samples, temperature, max_new_tokens), as_json=as_json)


@app.command()
def chat(
    source: Source,
    temperature: Annotated[float, typer.Option(min=0.0, help="Temperature; 0 = greedy.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest response, in tokens.")] = 256,
) -> None:
    """Talk to a checkpoint; an empty line or Ctrl-D ends it."""
    from nemo_rl_like.cli.commands import checkpoint as command

    command.chat(source, temperature=temperature, max_new_tokens=max_new_tokens)


@app.command()
def export(
    source: Source,
    target: Annotated[
        Path,
        typer.Argument(metavar="TARGET", help="Folder to write; new or empty. Several --to: one folder a kind in it."),
    ],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Options of the target of --to, for example max_model_len=4096."),
    ] = None,
    to: Annotated[
        list[str] | None,
        typer.Option(
            help="What to write: hf (default), hf-lora, triton-python, triton-vllm, triton-trtllm, nim, nim-lora, hf-quantized, gguf; may be repeated."
        ),
    ] = None,
    parity: Annotated[
        str,
        typer.Option(help="Proof before anything gets its name: full, weights, or auto (full where memory is enough)."),
    ] = "auto",
    shard_gib: Annotated[float, typer.Option(min=0.001, help="Largest safetensors shard, in GiB.")] = 4.0,
    license_name: Annotated[str | None, typer.Option("--license", help="Licence of the model, for its card.")] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Write the adapters alone: as --to hf-lora.")] = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder, or as bundles that Triton and NIM serve."""
    from nemo_rl_like.cli.commands import checkpoint as command

    stage = command.export_stage(
        to or [], options or [], adapter=adapter, parity=parity, shard_gib=shard_gib, license_name=license_name
    )
    command.export(source, target, stage)


@app.command("export check")
def check_export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Bundle, Hugging Face folder or PEFT folder.")],
    as_json: AsJson = False,
) -> None:
    """Check what `nrl export` wrote, or what it could have: layout, hashes, permissions; nothing is started."""
    from nemo_rl_like.cli.commands import checkpoint as command

    if not command.check_export(folder, as_json=as_json):
        raise typer.Exit(2)


@pipelines.command("plan")
def plan_pipeline(spec: SpecFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Tell what `run` would do with each stage and why; nothing is started, loaded or changed."""
    from nemo_rl_like.cli.commands import pipeline as command

    if not command.plan(spec, overrides or [], as_json=as_json):
        raise typer.Exit(2)


@pipelines.command("run")
def run_pipeline(spec: SpecFile, overrides: Overrides = None, plain: Plain = False) -> None:
    """Do what `plan` tells: skip what is done, go on with what is half done, run the rest (`nrl run --resume`)."""
    from nemo_rl_like.cli.commands import run as command

    command.run(spec, overrides or [], start="resume", plain=plain)


@pipelines.command("status")
def pipeline_status(run_folder: RunFolder, as_json: AsJson = False) -> None:
    """Tell how far each stage of a run is, and who works on it."""
    from nemo_rl_like.cli.commands import pipeline as command

    command.status(run_folder, as_json=as_json)


@pipelines.command("why")
def why_stage(
    spec: SpecFile,
    stage: Annotated[str, typer.Argument(metavar="STAGE", help="Name of the stage.")],
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Tell why a stage would be run, resumed or skipped: everything that differs from its last run."""
    from nemo_rl_like.cli.commands import pipeline as command

    command.why(spec, stage, overrides or [], as_json=as_json)


@pipelines.command("lineage")
def pipeline_lineage(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="An export, a run, or a folder of a stage.")],
) -> None:
    """Print where a result comes from, back to data hashes, spec, commit and metrics, as JSON."""
    from nemo_rl_like.cli.commands import pipeline as command

    command.lineage(path)


@environments.command("list")
def list_environments(as_json: AsJson = False) -> None:
    """List the registered environments."""
    from nemo_rl_like.cli.commands import environment as command

    command.list_environments(as_json=as_json)


@models.command("fetch")
def fetch_model(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Model to fetch: smollm2-135m.")],
    to: Annotated[Path | None, typer.Option("--to", help="Folder to write; default: models/NAME.")] = None,
) -> None:
    """Fetch a small pretrained model as a Hugging Face folder (float32)."""
    from nemo_rl_like.cli.commands import model as command

    command.fetch(name, to)


@models.command("check")
def check_model(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Hugging Face folder.")],
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline-parallel stages.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert-parallel ranks.")] = 1,
    adapter: Annotated[
        Path | None, typer.Option(help="PEFT folder whose adapters are merged into it; compared with PEFT's own.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the Megatron model built from a folder with Hugging Face's, and its round trip."""
    from nemo_rl_like.cli.commands import model as command

    if not command.check(folder, tp, pp, ep, adapter, as_json=as_json):
        raise typer.Exit(1)


@models.command("merge")
def merge_model(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="Hugging Face folder.")],
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="PEFT folder of LoRA adapters over it.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="Folder to write; new or empty.")],
    shard_gib: Annotated[float, typer.Option(help="Largest weight file, in GiB.")] = 4.0,
) -> None:
    """Write a base with adapters merged into it as one Hugging Face folder, a shard of it in memory at a time."""
    from nemo_rl_like.cli.commands import model as command

    command.merge(base, adapter, target, shard_gib)


@tokenizers.command("train")
def train_tokenizer(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILES",
            help='Text: rows with a {"text": ...} each (.jsonl, .jsonl.gz, .json, .parquet), folders of such, or plain text.',
        ),
    ],
    size: Annotated[int, typer.Option(help="Tokens of the vocabulary, 259 or more.")],
    out: Annotated[Path, typer.Option(help="Folder to write; new or empty.")],
) -> None:
    """Train a byte-level BPE tokenizer; name its folder in `model.tokenizer.path`."""
    from nemo_rl_like.cli.commands import tokenizer as command

    command.train(files, size, out)
