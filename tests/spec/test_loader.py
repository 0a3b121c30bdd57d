"""Laws of loading a spec: parents, overrides, references, and errors that name everything needed to mend them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_rl_like.spec.engine import EngineSpec
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.loader import json_schema, load_spec, resolved_yaml, spec_hash
from nemo_rl_like.spec.model import DType
from nemo_rl_like.spec.problems import SpecProblem, SpecProblems
from nemo_rl_like.spec.rl import RlStageSpec
from nemo_rl_like.spec.sft import SftStageSpec

BASE = """\
output: runs/x
seed: 7
model: {init: {layers: 2}, tokenizer: {characters: "0123+="}}
environment: {name: arithmetic}
stages:
  - kind: sft
    data: {environment_demonstrations: true}
  - kind: rl
    steps: 5
    optimizer:
      lr: 1e-6
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def problems(path: Path, *overrides: str) -> tuple[SpecProblem, ...]:
    with pytest.raises(SpecProblems) as caught:
        load_spec(path, overrides)
    return caught.value.problems


def rl(spec: ExperimentSpec) -> RlStageSpec:
    (found,) = [s for s in spec.stages if isinstance(s, RlStageSpec)]
    return found


def test_the_child_wins_over_its_parents_and_the_later_parent_over_the_earlier(base: Path) -> None:
    write(base.with_name("more.yaml"), "seed: 8\nmodel: {init: {layers: 3, heads: 4}}\n")
    child = write(
        base.with_name("child.yaml"), "extends: [base.yaml, more.yaml]\nmodel: {init: {heads: 2, kv_heads: 2}}\n"
    )
    spec = load_spec(child)
    assert spec.model.init is not None
    assert (spec.seed, spec.model.init.layers, spec.model.init.heads) == (8, 3, 2)
    assert rl(spec).steps == 5


def test_parents_are_relative_to_the_file_that_names_them(base: Path) -> None:
    folder = base.parent / "sub"
    folder.mkdir()
    assert load_spec(write(folder / "child.yaml", "extends: ../base.yaml\n")) == load_spec(base)


def test_a_list_in_the_child_replaces_the_parents(base: Path) -> None:
    child = write(base.with_name("child.yaml"), "extends: base.yaml\nstages: [{kind: rl}]\n")
    assert [s.kind for s in load_spec(child).stages] == ["rl"]


def test_parents_in_a_circle_are_refused_with_the_line(base: Path) -> None:
    write(base.with_name("a.yaml"), "seed: 1\nextends: b.yaml\n")
    write(base.with_name("b.yaml"), "extends: a.yaml\n")
    (problem,) = problems(base.with_name("a.yaml"))
    assert "circle" in problem.message
    assert str(problem.where).endswith("b.yaml:1")


def test_a_missing_file_is_named_with_the_nearest_one(base: Path) -> None:
    (problem,) = problems(base.with_name("bsae.yaml"))
    assert "there is no file" in problem.message
    assert problem.suggestion == str(base)
    (problem,) = problems(write(base.with_name("child.yaml"), "seed: 1\nextends: bsae.yaml\n"))
    assert (problem.where.line, problem.suggestion) == (2, str(base))


def test_a_link_to_nothing_and_a_device_are_no_specs(base: Path) -> None:
    for name, target in (("broken.yaml", base.with_name("gone")), ("zero.yaml", Path("/dev/zero"))):
        base.with_name(name).symlink_to(target)
        (problem,) = problems(base.with_name(name))
        assert "a link to nothing, or a device" in problem.message and problem.suggestion is None


def test_an_error_about_a_block_stands_where_its_keys_were_written(base: Path) -> None:
    """Not where the block begins, and not at an override of another of its keys."""
    child = write(base.with_name("child.yaml"), "extends: base.yaml\nlaunch:\n  nodes: 2\n  time_limit_min: 4\n")
    (problem,) = problems(child)
    assert problem.where.line == 4 and "`time_limit_min`" in problem.message
    (problem,) = problems(child, "launch.nodes=1", "launch.time_limit_min=3")
    assert str(problem.where) == "override `launch.time_limit_min=3`"


@pytest.mark.parametrize("address", ["", "999.1.1.1", "10.0.0", "10.0.0.1.", "node1", "::1", "10.0.0.1\n"])
def test_addresses_of_hosts_are_ipv4(base: Path, address: str) -> None:
    (problem,) = problems(base, f"launch.addresses.node1={address!r}".replace("\\n", "\n"))
    assert problem.allowed == "an IPv4 address, for example `10.0.0.1`"
    assert load_spec(base, ["launch.addresses.node1=10.0.255.1"]).launch.addresses == {"node1": "10.0.255.1"}


@pytest.mark.parametrize("text", ["extends: 3\n", "extends: [base.yaml, {}]\n", "extends: ''\n"])
def test_extends_takes_only_file_names(base: Path, text: str) -> None:
    (problem,) = problems(write(base.with_name("child.yaml"), text))
    assert problem.path == "extends"


@pytest.mark.parametrize("address", ["rl", "1"])
def test_overrides_address_list_items_by_kind_or_index(base: Path, address: str) -> None:
    assert rl(load_spec(base, [f"stages.{address}.optimizer.lr=3e-5"])).optimizer.lr == 3e-5


def test_overrides_address_list_items_by_name_before_kind(base: Path) -> None:
    write(base, BASE.replace("kind: rl", "kind: rl\n    name: sft2") + "  - {kind: sft, name: rl, data: {path: x}}\n")
    spec = load_spec(base, ["stages.rl.steps=9", "stages.sft2.steps=8"])
    assert [s.steps for s in spec.stages if isinstance(s, SftStageSpec | RlStageSpec)] == [100, 8, 9]


def test_override_values_are_yaml_and_missing_blocks_are_made(base: Path) -> None:
    spec = load_spec(
        base, ["policy.layout.tp=2", "model.init=", "model.path=m", "model.tokenizer=null", "logging={rollouts: false}"]
    )
    assert spec.policy.layout.tp == 2
    assert (spec.model.init, spec.model.path, spec.logging.rollouts) == (None, "m", False)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed", "is not of the form"),
        ("a..b=1", "is not of the form"),
        ("seed.x=1", "not a block"),
        ("stages.dpo.steps=1", "no single list item is called `dpo`"),
        ("stages.2.steps=1", "no single list item"),
        ("seed=[1", "not valid YAML"),
        ("seed=!!int 1", "tag"),
    ],
)
def test_a_bad_override_is_named(base: Path, override: str, words: str) -> None:
    (problem,) = problems(base, override)
    assert words in str(problem)
    assert override in str(problem.where)
    assert problem.where.line is None


def test_an_ill_typed_override_is_named_by_the_override(base: Path) -> None:
    (problem,) = problems(base, "stages.rl.stpes=5")
    assert str(problem).startswith("override `stages.rl.stpes=5`: stages.rl.stpes: unknown key; did you mean `steps`?")


def test_references_take_the_type_of_their_target_and_follow_overrides(base: Path) -> None:
    write(
        base,
        BASE
        + "  - {kind: evaluate, evaluation: {max_new_tokens: '${stages.rl.steps}'}}\nname: s${seed}-${stages.rl.optimizer.lr}\n",
    )
    spec = load_spec(base, ["seed=3", "stages.rl.steps=6"])
    assert spec.name == "s3-1e-06"
    assert spec.stages[2].model_dump()["evaluation"]["max_new_tokens"] == 6


def test_references_may_follow_each_other_and_take_blocks(base: Path) -> None:
    write(
        base,
        BASE
        + "    checkpoint: {every_steps: '${stages.rl.steps}'}\n  - {kind: rl, name: b, checkpoint: '${stages.1.checkpoint}'}\n",
    )
    last = load_spec(base).stages[-1]
    assert isinstance(last, RlStageSpec) and last.checkpoint.every_steps == 5


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("name: ${sed}", "refers to nothing"),
        ("name: ${name}", "circle"),
        ("name: a${engine.kind}\nengine: {kind: '${name}'}", "circle"),
        ("name: a ${model}", "is a block"),
        ("name: ${env:NRL_TEST_VALUE}", "not allowed here"),
        ("cluster: {address: '${env:NRL_TEST_MISSING}'}", "is not set"),
        ("cluster: {address: '${env:NRL_TEST_TOKEN}'}", "looks like a secret"),
    ],
)
def test_a_bad_reference_is_named_with_its_line(
    base: Path, monkeypatch: pytest.MonkeyPatch, line: str, words: str
) -> None:
    monkeypatch.setenv("NRL_TEST_VALUE", "v")
    monkeypatch.setenv("NRL_TEST_TOKEN", "hush")
    found = problems(write(base, BASE + line + "\n"))
    assert any(words in p.message for p in found)
    assert all(p.where.line is not None and p.where.line >= 12 for p in found)
    assert "hush" not in str(found)


def test_environment_variables_stand_in_paths_and_addresses(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NRL_TEST_VALUE", "/scratch")
    write(base, BASE.replace("output: runs/x", "output: ${env:NRL_TEST_VALUE}/runs"))
    assert load_spec(base).output == "/scratch/runs"


def test_an_escaped_reference_stays_text(base: Path) -> None:
    assert load_spec(base, ["name=$${seed}"]).name == "${seed}"


def test_exploding_references_are_refused(base: Path) -> None:
    doubling = "".join(
        f"  k{i}: '${{environment.config.k{i - 1}}}${{environment.config.k{i - 1}}}'\n" for i in range(1, 40)
    )
    config = BASE.replace("environment: {name: arithmetic}", "environment:\n name: x\n config:\n  k0: x\n" + doubling)
    (problem,) = problems(write(base, config))
    assert "expand to more than" in problem.message


def test_all_problems_come_in_one_error_each_with_file_line_path_help_and_what_is_allowed(base: Path) -> None:
    text = (
        BASE.replace("seed: 7", "sead: 7")
        .replace("steps: 5", "steps: five")
        .replace("lr: 1e-6", "lr: -1\n      beta: 2")
    )
    found = problems(write(base, text))
    assert [(p.where.line, p.path) for p in found] == [
        (2, "sead"),
        (9, "stages.rl.steps"),
        (11, "stages.rl.optimizer.lr"),
        (12, "stages.rl.optimizer.beta"),
    ]
    assert [p.suggestion for p in found] == ["seed", None, None, "betas"]
    assert found[1].message == "is 'five': must be a whole number"
    assert found[1].allowed == "a whole number > 0"
    assert found[1].help == "Rollout batches."
    assert all(str(base) == p.where.source for p in found)


def test_a_wrong_choice_names_the_choices_and_the_nearest(base: Path) -> None:
    (problem,) = problems(base, "stages.rl.algorithm.advantage=grp")
    assert problem.suggestion == "grpo"
    assert problem.allowed is not None and problem.allowed.startswith("one of batch_std, dr_grpo, gae, ")


def test_a_choice_may_be_written_as_a_text_or_as_a_block_of_the_usual_kind(base: Path) -> None:
    short = load_spec(base, ["stages.rl.algorithm.advantage=rloo", "stages.rl.algorithm.policy_loss.high=0.28"])
    long = load_spec(
        base,
        ["stages.rl.algorithm.advantage={kind: rloo}", "stages.rl.algorithm.policy_loss={kind: clip, high: 0.28}"],
    )
    assert short == long
    assert load_spec(base, ["stages.rl.algorithm.correction=[tis]"]) == load_spec(
        base, ["stages.rl.algorithm.correction=[{kind: tis}]"]
    )


def test_a_key_on_the_wrong_level_is_sent_to_the_right_one(base: Path) -> None:
    found = problems(base, "stages.rl.lr=1", "stages.rl.layers=3", "stages.rl.seed=3")
    assert {p.path: p.suggestion for p in found} == {
        "stages.rl.lr": "optimizer.lr",
        "stages.rl.layers": None,
        "stages.rl.seed": "seed at the top level",
    }


def test_an_unknown_or_missing_kind_names_the_kinds(base: Path) -> None:
    write(base, BASE + "  - {kind: sfft}\n  - {steps: 3}\n  - {knid: rl}\n")
    found = problems(base)
    assert [(p.where.line, p.suggestion) for p in found] == [(12, "sft"), (13, None), (14, "kind")]
    kinds = "distill, evaluate, export, preference, pretrain, reward_model, rl, sample, sft, teacher_logits"
    assert found[0].allowed == f"one of {kinds}"


def test_types_are_not_bent(base: Path) -> None:
    found = problems(base, "seed='7'", "stages.rl.steps=5.0", "model.init.tie_embeddings=1", "name=3")
    assert {p.path for p in found} == {"seed", "stages.rl.steps", "model.init.tie_embeddings", "name"}


@pytest.mark.parametrize(
    ("override", "message", "allowed"),
    [
        ("launch.slurm.partition=a b", "is 'a b': not of the form", "one word, without blanks, quotes"),
        ("launch.kubernetes.namespace=Mine", "is 'Mine': not of the form", "lower-case letters, digits and `-`"),
        ("launch.mounts=[{source: data, target: /d}]", "is 'data': not of the form", "an absolute path"),
        ("launch.environment.A-B=x", "the name 'A-B' is not of the form", "letters, digits and `_`, not a digit first"),
        ("launch.environment.A=1", "is 1: must be text; put it in quotes", "text"),
    ],
)
def test_forms_are_told_in_words(base: Path, override: str, message: str, allowed: str) -> None:
    (problem,) = problems(base, override)
    assert message in problem.message and allowed in str(problem.allowed)
    assert "pattern" not in str(problem) and "^" not in str(problem)


def test_every_pattern_of_the_spec_is_told_in_words() -> None:
    def walk(value: object) -> list[object]:
        if isinstance(value, list):
            return [found for item in value for found in walk(item)]
        if not isinstance(value, dict):
            return []
        mine = [value["pattern"]] if "pattern" in value and "$comment" not in value else []
        return mine + [found for item in value.values() for found in walk(item)]

    assert walk(ExperimentSpec.model_json_schema()) == []


def test_combinations_of_fields_are_checked_with_their_block(base: Path) -> None:
    (problem,) = problems(base, "stages.rl.samples_per_prompt=1")
    assert problem.path == "stages.rl"
    assert "needs at least 2" in problem.message
    assert str(problem.where) == "override `stages.rl.samples_per_prompt=1`"


@pytest.mark.parametrize("key", ["api_key", "hub_password", "access_token", "SECRET", "hf_token", "token"])
def test_secrets_in_plain_text_are_refused_and_not_repeated(base: Path, key: str) -> None:
    (problem,) = problems(base, f"environment.config={{deep: [{{{key}: hush}}]}}")
    assert "looks like a secret" in problem.message
    assert problem.path == f"environment.config.deep.0.{key}"
    assert "hush" not in str(problem)


PASTED = "hf_" + "aB3" * 12


@pytest.mark.parametrize(
    "place",
    [
        "name",
        "secrets.HUB.env",
        "environment.config.any",
        "launch.environment.ANY",
        "launch.slurm.comment",
        "model.path",
    ],
)
@pytest.mark.parametrize(
    "value", [PASTED, "sk-proj-" + "x_-9" * 8, "nvapi-" + "x" * 40, "http://me:hush@proxy:3128", "AKIA" + "Q" * 16]
)
def test_a_pasted_secret_is_refused_wherever_it_stands_and_not_repeated(base: Path, place: str, value: str) -> None:
    assert not [text for text in map(str, problems(base, f"{place}={value}")) if value in text or "hush" in text]
    block, _, key = place.rpartition(".")
    lines = "".join(f"{name}:\n{'  ' * i}" for i, name in enumerate(block.split("."), 1)) if block else ""
    child = write(base.with_name("child.yaml"), f"extends: base.yaml\n{lines}{key}: '{value}'\n")
    assert not [text for text in map(str, problems(child)) if value in text or "hush" in text]


@pytest.mark.parametrize(
    "overrides",
    [
        ("secrets.HUB=hush",),
        ("secrets=hush",),
        ("secrets.HUB.env=hush-hush",),
        ("secrets={HUB: {env: hush-hush}}",),
        ("secrets.HUB=hush", "secrets.HUB.env=NAME"),
        ("launch.environment.HF_TOKEN=hush",),
        ("launch.environment={OPENAI_API_KEY: hush}",),
        ("hf_token=hush",),
        ("secrets.HUB={env: hush",),
    ],
)
def test_what_stands_where_a_secret_may_is_not_repeated(base: Path, overrides: tuple[str, ...]) -> None:
    assert not [text for text in map(str, problems(base, *overrides)) if "hush" in text]


def test_tokens_of_a_model_are_no_secrets(base: Path) -> None:
    config = "environment.config={stop_token: <end>, max_tokens: 5, tokens: a}"
    (problem,) = problems(base, config, "stages.rl.sampling.max_new_tokens=-5")
    assert "max_new_tokens=-5" in str(problem)


def test_a_secret_is_the_name_of_a_variable(base: Path) -> None:
    assert load_spec(base, ["secrets.HUB.env=HUB_TOKEN"]).secrets["HUB"].env == "HUB_TOKEN"
    (problem,) = problems(base, "secrets.HUB=hf_abc")
    assert problem.path == "secrets.HUB"


@pytest.mark.parametrize("text", ["", "# nothing\n", "[]\n", "just text\n"])
def test_a_file_without_a_mapping_or_keys_is_an_error(base: Path, text: str) -> None:
    assert problems(write(base, text))


def test_the_hash_is_of_the_experiment_and_not_of_where_it_goes(base: Path) -> None:
    spec = load_spec(base)
    assert spec_hash(spec) == spec_hash(load_spec(base, ["output=elsewhere"]))
    assert spec_hash(spec) != spec_hash(load_spec(base, ["seed=8"]))
    assert spec_hash(spec) == spec_hash(load_spec(base, ["policy.layout.tp=1"]))


def test_the_resolved_spec_loads_to_an_equal_spec(base: Path) -> None:
    spec = load_spec(base, ["name=1e-6x $${seed}"])
    assert load_spec(write(base.with_name("resolved.yaml"), resolved_yaml(spec))) == spec


def test_the_json_schema_refuses_unknown_keys_and_knows_extends() -> None:
    schema = json_schema()
    assert schema["additionalProperties"] is False
    assert isinstance(schema["properties"], dict) and "extends" in schema["properties"]
    assert json.loads(json.dumps(schema)) == schema


@pytest.mark.parametrize(
    ("model", "engine", "limit"),
    [("float32", None, 1e-3), ("float32", "bfloat16", 0.3), ("bfloat16", None, 0.3), ("bfloat16", "float32", 0.3)],
)
def test_the_log_prob_gap_that_is_allowed_goes_with_the_precision(model: DType, engine: DType, limit: float) -> None:
    assert EngineSpec(dtype=engine).gap_limit(model) == limit
    assert EngineSpec(dtype=engine, max_gap_p99=0.05).gap_limit(model) == 0.05


SETTINGS = """
output: x
model: {init: {}, tokenizer: {characters: "01"}}
policy: {threads_per_rank: 1, layout: {tp: 2}}
stages:
  - kind: pretrain
    data: {paths: [x]}
  - kind: pretrain
    name: other
    data: {paths: [x]}
    settings:
      policy: {layout: {pp: 2}, adapter: null}
      model: {path: y}
"""


def test_a_stages_settings_are_lines_over_the_experiments_blocks(tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(SETTINGS)
    spec = load_spec(file)
    first, other = (spec.for_stage(stage) for stage in spec.stages)
    assert first.policy == spec.policy
    assert (other.policy.threads_per_rank, other.policy.layout.tp, other.policy.layout.pp) == (1, 2, 2)
    assert (other.model.path, other.model.init) == ("y", None)
    file.write_text(resolved_yaml(spec))
    assert load_spec(file) == spec


def test_a_stages_settings_are_held_to_the_experiments_rules(tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(SETTINGS.replace("adapter: null", "fp8: {}"))
    with pytest.raises(SpecProblems, match=r"stage 'other' with its `settings`: .*fp8"):
        load_spec(file)
    file.write_text(SETTINGS.replace("adapter: null", "adaptor: null"))
    with pytest.raises(SpecProblems, match=r"settings\.policy\.adaptor.*did you mean `adapter`"):
        load_spec(file)
