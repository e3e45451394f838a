"""A config in YAML says each thing once."""

from pathlib import Path

import pytest
import yaml

from dflash.training.run_config import RunConfig, RunConfigError
from dflash.training.strict_yaml import load


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: 2\na: 3\n", "a stands in line 1 and again in line 3; keep one of them"),
        ("data:\n  files: [a]\n  'files': [b]\n", "files stands in line 2 and again in line 3"),
        ("a: {b: 1, b: 2}\n", "b stands in line 1 and again in line 1"),
    ],
)
def test_a_key_that_stands_twice_is_named_with_both_lines(text: str, said: str) -> None:
    with pytest.raises(yaml.YAMLError, match=said):
        load(text)


@pytest.mark.parametrize(
    "text",
    [
        "a: {b: 1}\nc: {b: 2}\n",
        "a: &a {b: 1, c: 2}\nd: &d {<<: *a, b: 3}\ne: {<<: *d, c: 4}\nf: *d\n",
        "1: a\n'1': b\n",
        "- [a, a]\n",
    ],
)
def test_everything_else_is_read_as_ever(text: str) -> None:
    assert load(text) == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("output: a\noutput: b\n", r"run.yaml: is not YAML \(output stands in line 1 and again in line 2; keep one"),
        ("[" * 3000, r"run.yaml: is not YAML \(it is nested too deeply"),
    ],
)
def test_a_run_is_refused_for_it(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(RunConfigError, match=said):
        RunConfig.read(tmp_path / "run.yaml")
