"""Laws of the YAML reader: YAML 1.2 values, a line for everything, and nothing that hides or explodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_rl_like.spec.problems import SpecProblems
from nemo_rl_like.spec.source import Plain, child, plain
from nemo_rl_like.spec.yaml_reader import MAX_BYTES, read_yaml_file, read_yaml_text

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1.", 1.0),
        (".5", 0.5),
        ("-3", -3),
        ("0x1F", 31),
        ("0o17", 15),
        ("on", "on"),
        ("yes", "yes"),
        ("12:30", "12:30"),
        ("2026-01-01", "2026-01-01"),
        (".inf", ".inf"),
        ("1e999", "1e999"),
        ("true", True),
        ("~", None),
        ("", None),
        ('"1e-6"', "1e-6"),
    ],
)
def test_scalars_follow_the_core_schema_of_yaml_1_2(text: str, value: Plain) -> None:
    found = child(read_yaml_text(f"key: {text}", "f"), "key")
    assert found is not None
    assert plain(found) == value
    assert type(plain(found)) is type(value)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "`a` is given twice, first at f:1"),
        ("a: 1\nb: {c: 1,\n c: 2}\n", 3, "`c` is given twice"),
        ("a: 1\nb: !!python/object/apply:os.system [ls]\n", 2, "tag"),
        ("a: !!str 5\n", 1, "tag"),
        ("a: &x {b: 1}\nc:\n  <<: *x\n", 3, "merge keys"),
        ("a: 1\n? [x]\n: 2\n", 2, "key must be text"),
        ("a: 1\n7: 2\n", 2, "key must be text"),
        ("a: 1\n---\nb: 2\n", 2, "single document"),
        ("a: 1\n\tb: 2\n", 2, "not valid YAML"),
        ("a:\n\tb: 2\n", 2, "indent with spaces"),
        ("a: 1\nb: [1, 2\n", 3, "not valid YAML"),
        ("a: 1\nb: &x [*x]\n", 2, "contains itself"),
        ("a: " + "[" * 200 + "]" * 200, 1, "nested deeper"),
        (BOMB, 5, "aliases expand"),
        ('a: 1\nb: "\\ud800"\n', 2, "half of a surrogate pair"),
        ('a: 1\n"\\udcff": 2\n', 2, "half of a surrogate pair"),
    ],
)
def test_what_is_refused_is_named_with_its_line(text: str, line: int, words: str) -> None:
    with pytest.raises(SpecProblems) as caught:
        read_yaml_text(text, "f")
    (problem,) = caught.value.problems
    assert words in problem.message
    assert (problem.where.source, problem.where.line) == ("f", line)


def test_aliases_that_stay_small_are_written_out() -> None:
    assert plain(read_yaml_text("a: &x {b: 1}\nc: *x\n", "f")) == {"a": {"b": 1}, "c": {"b": 1}}


def test_a_value_stands_at_the_line_of_its_key() -> None:
    root = read_yaml_text("a:\n  b: >\n    text\n  c:\n    - 1\n    - 2\n", "f")
    a = child(root, "a")
    assert a is not None
    b, c = child(a, "b"), child(a, "c")
    assert b is not None and c is not None
    assert (b.where.line, c.where.line) == (2, 4)
    second = child(c, 1)
    assert second is not None and second.where.line == 6


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"a: 1\nb: \xff\n", "f.yaml:2: is not UTF-8"), (b"#" * (MAX_BYTES + 1), "larger than the limit")],
)
def test_files_that_are_no_specs_are_refused(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes(data)
    with pytest.raises(SpecProblems) as caught:
        read_yaml_file(path)
    assert words in str(caught.value)
