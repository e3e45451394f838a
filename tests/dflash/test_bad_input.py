"""Everything a user can hand to the command that is wrong: one line on stderr, the exit code, nothing half-written."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess  # the command under test is a process
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash import checkpoints, completions, evaluate
from dflash.completion_store import Completion
from dflash.completions import Server
from tests.dflash.pairs import DRAFTER, write_drafter, write_prompts, write_target

GATE = "layers.0.mlp.gate_proj.weight"
PROMPT = b'{"id": "a", "prompt": "w1"}\n'


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("files")
    write_target(directory / "target")
    write_drafter(directory / "drafter")
    write_prompts(directory / "prompts.jsonl")
    return directory


@pytest.fixture
def refused(files, tmp_path, run_dflash):
    """Evaluate into a fresh folder: the error without its prefix, after the exit code and the folder were looked at."""

    def run(*arguments, code=1, checkpoint=files / "drafter", prompts=files / "prompts.jsonl", target=files / "target"):
        folder = tmp_path / "reports"
        folder.mkdir()
        done = run_dflash(
            *("evaluate", "--target", target, "--checkpoint", checkpoint, "--prompts", prompts),
            *("--output", folder / "report", "--max-new-tokens", 4, "--device", "cpu", *arguments),
        )
        assert done.returncode == code, done.err
        assert done.out == ""
        assert list(folder.iterdir()) == []
        [line] = [line for line in done.err.splitlines() if not line.startswith("[")]
        return line.removeprefix("error: ")

    return run


def weights_of(files):
    return load_file(files / "drafter" / "model.safetensors")


def write_checkpoint(kind, path, weights, config=DRAFTER, **extra):
    """The same drafter as a z-lab directory or as an old single file."""
    if kind == "zlab":
        path.mkdir()
        save_file(weights, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(config))
        return path
    state = {f"module.{name}": tensor for name, tensor in weights.items()}
    torch.save({"model_state_dict": state, "optimizer_state_dict": {}, "config": config, **extra}, path)
    return path


def rename(weights):
    weights["layers.0.mlp.gate.weight"] = weights.pop(GATE)


def poison(weights):
    weights[GATE][0, 0] = float("nan")


@pytest.mark.parametrize("kind", ["zlab", "pt"])
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda w: w.pop(GATE), f"missing {GATE}"),
        (lambda w: w.update(extra=torch.ones(2)), "unexpected extra"),
        (lambda w: w.update({"a\nb\x1b[2J": torch.ones(2)}), "unexpected a\\nb\\x1b[2J"),
        (rename, f"layers.0.mlp.gate.weight was found where {GATE} was expected"),
        (lambda w: w.update({GATE: torch.ones(2, 3)}), f"{GATE} has shape [2, 3], the config makes it [48, 32]"),
        (poison, f"NaN or infinite values in {GATE}"),
        (lambda w: w.update({"fc.weight": torch.ones(32, 64)}), "takes 2 taps of 32, but the config names 3 (1, 3, 5)"),
    ],
    ids=["missing", "extra", "unprintable", "renamed", "misshaped", "nan", "one tap too few"],
)
def test_tensors(refused, files, tmp_path, kind, damage, says):
    weights = weights_of(files)
    damage(weights)
    path = write_checkpoint(kind, tmp_path / "drafter", weights)
    error = refused(checkpoint=path)
    assert error.startswith(f"{path}: ")
    assert says in error


@pytest.mark.parametrize("kind", ["zlab", "pt"])
@pytest.mark.parametrize(
    ("top", "nested", "says"),
    [
        ({}, {"target_layer_ids": [1, 3, 8]}, "names layer 8, but the target has layers 0..7"),
        ({}, {"mask_token_id": 64}, "mask_token_id 64 is outside the vocabulary of 64 rows"),
        ({"vocab_size": 99}, {"mask_token_id": 98}, "mask_token_id 98 is outside the target's vocabulary of 64 rows"),
        ({}, {"block_size": 8}, "block_size is 6 but dflash_config.block_size is 8; keep the right one"),
        ({"num_target_layers": 12}, {}, "num_target_layers is 12, the target"),
        ({"block_size": 10**9}, {}, "block_size is 1000000000, over the max_position_embeddings of 512"),
        ({"num_hidden_layers": 10**12, "layer_types": None}, {}, "num_hidden_layers is 1000000000000, a drafter has"),
        ({"rope_theta": float("inf")}, {}, "rope_theta is inf"),
        ({"architectures": 3, "hidden_act": ["silu"]}, {}, "hidden_act is ['silu']"),
    ],
)
def test_configs(refused, files, tmp_path, kind, top, nested, says):
    config = DRAFTER | top | {"dflash_config": DRAFTER["dflash_config"] | nested}
    path = write_checkpoint(kind, tmp_path / "drafter", weights_of(files), config)
    error = refused(checkpoint=path)
    assert str(path) in error
    assert says in error


def test_a_drafter_for_another_hidden_size(refused, tmp_path):
    error = refused(checkpoint=write_drafter(tmp_path / "drafter", hidden_size=64))
    assert "the drafter's hidden_size is 64, the target" in error


def test_a_config_given_beside_another(refused, files, tmp_path):
    (tmp_path / "other.json").write_text(json.dumps(DRAFTER | {"block_size": 8}))
    assert "says block_size 6" in refused("--drafter-config", tmp_path / "other.json")


class RunsCode:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def cut(path, data):
    path.write_bytes(data[:-100])


CHECKPOINT_FILES = {
    "missing": (lambda path, data: None, "does not exist; give a checkpoint"),
    "name too long": (None, "cannot be read (File name too long)"),
    "empty": (lambda path, data: path.touch(), "is empty; was it cut off"),
    "truncated": (cut, "is cut short or still being written"),
    "text": (lambda path, data: path.write_text("weights"), "is neither a torch.save file nor"),
    "json": (lambda path, data: path.write_text("{}"), "is neither a torch.save file nor"),
    "pipe": (lambda path, data: os.mkfifo(path), "is a pipe, a socket or a device"),
    "empty directory": (lambda path, data: path.mkdir(), "has no config.json with a *.safetensors file"),
    "link to itself": (lambda path, data: path.symlink_to(path), "does not exist"),
    "no model": (lambda path, data: torch.save({"a\nb": 1}, path), "holds keys a\\nb, expected model_state_dict"),
    "no tensors": (lambda path, data: torch.save({"model_state_dict": {"a": 1}}, path), "a, which is not a tensor"),
    "list": (lambda path, data: torch.save([1], path), "holds no dictionary"),
    "code": (lambda path, data: torch.save(RunsCode(path.with_name("ran")), path), "its pickle names posix.system"),
}


@pytest.mark.parametrize("case", CHECKPOINT_FILES)
def test_checkpoint_files(refused, files, tmp_path, case):
    make, says = CHECKPOINT_FILES[case]
    path = tmp_path / ("x" * 300 if make is None else "step_4.pt")
    if make is not None:
        data = write_checkpoint("pt", tmp_path / "whole.pt", weights_of(files)).read_bytes()
        make(path, data)
    error = refused(checkpoint=path)
    assert error.startswith(str(path))
    assert says in error
    assert not (tmp_path / "ran").exists()


def header(**changes):
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | changes
    text = json.dumps({"fc.weight": entry}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(4)


SAFETENSORS = {
    "truncated": (lambda whole: whole[:-7], "it is cut short or damaged"),
    "longer": (lambda whole: whole + b"xx", "it is cut short or damaged"),
    "no header": (lambda whole: b"", "is not a safetensors file, or is cut short"),
    "nested without end": (lambda whole: (9999).to_bytes(8, "little") + b"[" * 9999, "header is malformed"),
    "broken numbers": (lambda whole: header(shape=[1.0]), "header is malformed"),
    "broken offsets": (lambda whole: header(data_offsets=[0.0, 4.0]), "header is malformed"),
    "negative shape": (lambda whole: header(shape=[-1, -1]), "header is malformed"),
    "unknown dtype": (lambda whole: header(dtype="F4"), "tensor fc.weight is F4, expected one of F64"),
    "directory": (None, "cannot be read (Is a directory)"),
}


@pytest.mark.parametrize("case", SAFETENSORS)
def test_safetensors_files(refused, files, tmp_path, case):
    damage, says = SAFETENSORS[case]
    shutil.copytree(files / "drafter", tmp_path / "drafter")
    path = tmp_path / "drafter" / "model.safetensors"
    whole = path.read_bytes()
    path.unlink()
    path.mkdir() if damage is None else path.write_bytes(damage(whole))
    error = refused(checkpoint=tmp_path / "drafter")
    assert error.startswith(str(path))
    assert says in error


@pytest.mark.parametrize("content", ["", "[1]", "{", "[" * 100_000, "\0"])
def test_config_files(refused, files, tmp_path, content):
    shutil.copytree(files / "drafter", tmp_path / "drafter")
    (tmp_path / "drafter" / "config.json").write_text(content)
    assert str(tmp_path / "drafter" / "config.json") in refused(checkpoint=tmp_path / "drafter")


@pytest.mark.parametrize("change", ["grows", "vanishes"])
def test_a_checkpoint_that_changes_while_it_is_read(refused, files, tmp_path, monkeypatch, change):
    path = write_checkpoint("pt", tmp_path / "step_4.pt", weights_of(files))
    read = checkpoints.read_tensors

    def meanwhile(opened):
        with path.open("ab") as file:
            file.write(b"more")
        if change == "vanishes":
            path.unlink()
        return read(opened)

    monkeypatch.setattr(checkpoints, "read_tensors", meanwhile)
    says = "it is still being written" if change == "grows" else "cannot be read (No such file or directory)"
    assert says in refused(checkpoint=path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", ": has no prompt"),
        (b"\n \n", ": has no prompt"),
        (b"\xff\xfe", ": is not UTF-8 (byte 0)"),
        (PROMPT + b'{"id": "b", "prompt": ', ":2: is not JSON"),
        (PROMPT + b"[" * 100_000, ":2: is not JSON"),
        (PROMPT + b'{"id": "b"}', ":2: expected an object with id and either prompt"),
        (PROMPT + PROMPT, ":2: id 'a' is already used in line 1"),
        (PROMPT + b'{"id": "b", "prompt": "w1", "x\\ny": 1}', ":2: x\\ny: Extra inputs"),
        (PROMPT + b'{"id": "\\ud800", "prompt": "w1"}', ":2: id: "),
    ],
)
def test_prompt_files(refused, tmp_path, content, says):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    assert refused(prompts=path).startswith(f"{path}{says}")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "{"),
        ("config.json", "[]"),
        ("config.json", '{"model_type": "qwen3", "hidden_size": "x"}'),
        ("config.json", '{"model_type": "llama"}'),
        ("generation_config.json", "{"),
        ("generation_config.json", "[]"),
        ("generation_config.json", '{"eos_token_id": "x"}'),
        ("generation_config.json", '{"eos_token_id": ["x"]}'),
        ("generation_config.json", '{"eos_token_id": {"a": 1}}'),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", None),
        ("tokenizer_config.json", "[]"),
        ("model.safetensors", ""),
        ("model.safetensors", None),
    ],
)
def test_target_files(refused, files, tmp_path, name, content):
    shutil.copytree(files / "target", tmp_path / "target")
    (tmp_path / "target" / name).unlink()
    if content is not None:
        (tmp_path / "target" / name).write_text(content)
    assert refused(target=tmp_path / "target").startswith(f"target {tmp_path}/target")


@pytest.mark.parametrize("url", ["nowhere", "http://", "http://127.0.0.1:port", "http://a b", "http://a..b/"])
def test_server_urls(refused, url):
    assert refused("--server", url).startswith("server ")


def test_a_server_with_another_vocabulary(refused, monkeypatch):
    monkeypatch.setattr(completions, "connect", lambda url: Server(url, "sglang"))
    monkeypatch.setattr(completions, "complete", lambda server, prompts, **settings: [Completion([64])] * len(prompts))
    assert "http://server wrote token 64, the target" in refused("--server", "http://server")


def test_a_prompt_that_leaves_no_room(refused, tmp_path):
    lines = [{"id": "short", "prompt": "w1"}, {"id": "long", "prompt": "w1 " * 509}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = refused(prompts=tmp_path / "prompts.jsonl")
    assert said.startswith("prompt 'long' has 509 tokens and 4 are to be written, the target")


def test_a_cache_inside_the_report(refused, tmp_path):
    said = refused("--cache", tmp_path / "reports" / "report" / "cache", code=2)
    assert said.startswith(f"--cache {tmp_path}/reports/report/cache lies in --output ")


@pytest.mark.parametrize(
    ("name", "find", "put", "says"),
    [
        ("*.jsonl", r'"ids":\[\d+', '"ids":[99', "the cache has token 99, the target"),
        ("facts.json", r'"tensors"', '"x"', "/facts.json is damaged (Field required); remove the file"),
    ],
)
def test_entries_of_a_cache_that_another_hand_changed(run_dflash, refused, files, tmp_path, name, find, put, says):
    done = run_dflash(
        *("evaluate", "--target", files / "target", "--checkpoint", files / "drafter", "--device", "cpu"),
        *("--prompts", files / "prompts.jsonl", "--output", tmp_path / "first", "--max-new-tokens", 4),
        *("--cache", tmp_path / "cache"),
    )
    assert done.returncode == 0, done.err
    [path] = (tmp_path / "cache").rglob(name)
    path.write_text(re.sub(find, put, path.read_text()))
    assert says in refused("--cache", tmp_path / "cache")


def test_completions_of_one_token(refused, files, tmp_path):
    shutil.copytree(files / "target", tmp_path / "target")
    (tmp_path / "target" / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, *range(2, 64)]}))
    assert refused(target=tmp_path / "target").startswith("no completion is longer than one token")


def test_outputs_that_cannot_be_written(refused, files, tmp_path):
    in_use = tmp_path / "in use"
    in_use.mkdir()
    (in_use / "kept").write_text("mine")
    for output in (in_use, files / "prompts.jsonl", files / "prompts.jsonl" / "report", tmp_path / ("x" * 300)):
        assert refused("--output", output).startswith(f"--output {output} ")
        (tmp_path / "reports").rmdir()
    assert (in_use / "kept").read_text() == "mine"


def test_a_disk_that_is_full(refused, monkeypatch):
    """The kernel refuses to let the report grow: the files that a full disk leaves, and the error it gives."""
    measure = evaluate.measure
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def then_limited(*arguments):
        measured = measure(*arguments)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        return measured

    monkeypatch.setattr(evaluate, "measure", then_limited)
    try:
        said = refused()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert said.endswith("could not be written (File too large); nothing was left there")


def test_ctrl_c(files, tmp_path):
    """A real interrupt of a real process, while the target works."""
    code = "import sys; from dflash.cli import main; sys.argv[0] = 'dflash'; main()"
    arguments = [
        *("evaluate", "--target", files / "target", "--checkpoint", files / "drafter"),
        *("--prompts", files / "prompts.jsonl", "--output", tmp_path / "report", "--max-new-tokens", 480),
        *("--ignore-eos", "--device", "cpu"),
    ]
    with subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        while "[2/5]" not in process.stderr.readline():
            assert process.poll() is None
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 130
    assert said.splitlines()[-1].startswith("interrupted: no report was written")
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments", [["evaluate"], ["inspect"], ["nothing"], ["inspect", "a", "b"], ["inspect", "--x"]]
)
def test_wrong_usage(run_dflash, arguments):
    done = run_dflash(*arguments)
    assert done.returncode == 2
    assert done.err.startswith("Usage: ")
    assert "Traceback" not in done.err


def test_inspection_shows_what_a_file_says_without_obeying_it(run_dflash, files, tmp_path):
    weights = weights_of(files) | {"[red]a[/red]\x1b[2J": torch.ones(1)}
    done = run_dflash("inspect", write_checkpoint("pt", tmp_path / "a.pt", weights, kernel="x\x1b]0;y\x07"))
    assert done.returncode == 1
    assert "[red]a[/red]\\x1b[2J" in done.out
    assert "\x1b" not in done.out
