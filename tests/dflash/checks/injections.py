"""The faults that the checks are there to find, each planted in the real code or the real file.

An injection measures a pair twice with one check: as it is, and with the fault. The tests require pass and fail;
``benchmarks/checks_table.py`` prints both values for docs/checks.md.
"""

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from dflash import batch as batch_module
from dflash import checks, drafter, masks
from dflash import target as target_module
from dflash.config import DrafterConfig
from dflash.hidden_states import LoadedTaps
from dflash.metric_replay import last_hidden, soft_labels, write_replay
from dflash.recipes import Recipe
from dflash.report import Check
from dflash.target import Target, TargetLoadError
from tests.dflash.checks.bench import Bench
from tests.dflash.checks.mutate import mutate

PAPER = Recipe(name="paper", loss="ce", gamma=4.0, block_size=8)
KL = Recipe(loss="kl", gamma=4.0, temperature=2.0, block_size=8)
COMPOSITE = Recipe(loss="composite", gamma=10.0, temperature=2.0, kl_weight=0.7, block_size=8)
NOISE = 0.2

Prepare = Callable[[Bench], Bench]
Look = Callable[[Bench], Check]
Spoil = Callable[[pytest.MonkeyPatch, Bench], Bench]


@dataclass(frozen=True)
class Injection:
    """``fault`` is the number in DESIGN §1, "" for what is not among the eight. ``pair`` is the fixture it runs on."""

    fault: str
    check: str
    title: str
    spoil: Spoil
    look: Look
    pair: Literal["dense", "hybrid"] = "dense"
    prepare: Prepare = lambda bench: bench

    def clean(self, bench: Bench) -> Check:
        """The check without the fault."""
        return self.look(self.prepare(bench))

    def spoiled(self, bench: Bench) -> Check:
        """The check with it."""
        with pytest.MonkeyPatch.context() as patch:
            return self.look(self.spoil(patch, replace(self.prepare(bench), memo={})))


def measured(name: str) -> Look:
    """The check ``name`` of a measurement that is made now."""
    return lambda bench: checks.CHECKS[name](bench.evidence())


def loaded_class(bench: Bench) -> Check:
    """``target-class`` of the target's files, loaded again. A refusal by name is a find."""
    try:
        return checks.target_class(LoadedTaps(Target.load(bench.target.path, kernel="torch")).facts)
    except TargetLoadError as error:
        return Check(name="target-class", status="fail", measured="refused", limit="loads", explanation=str(error))


def mutant(owner: Any, name: str, old: str, new: str) -> Spoil:
    """The function ``owner.name`` with another piece of source."""

    def spoil(patch: pytest.MonkeyPatch, bench: Bench) -> Bench:
        mutate(patch, owner, name, old, new)
        return bench

    return spoil


def vision_language_class(patch: pytest.MonkeyPatch, bench: Bench) -> Bench:
    """Load what an Auto class makes of a vision-language checkpoint: the layers lie under another path."""
    text = bench.target.config.to_dict() | {"model_type": "qwen3_5_text"}
    text["rope_parameters"] = text["rope_parameters"] | {"mrope_section": [2, 1, 1]}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4}
    config = Qwen3_5Config(
        text_config=Qwen3_5TextConfig(**text),
        vision_config=vision | {"out_hidden_size": text["hidden_size"], "num_position_embeddings": 16},
    )
    patch.setattr(target_module, "_load_exactly", lambda *loading: Qwen3_5ForConditionalGeneration(config))
    return bench


def nested_layers(patch: pytest.MonkeyPatch, bench: Bench) -> Bench:
    """The causal-LM class, with its decoder one module deeper."""
    load = target_module._load_exactly

    def nested(*loading: Any) -> Any:
        model: Any = load(*loading)
        inner, model.model = model.model, nn.Module()
        model.model.language_model = inner
        model.get_input_embeddings = lambda: inner.embed_tokens
        return model

    patch.setattr(target_module, "_load_exactly", nested)
    return bench


def rewritten_keys(rename: Callable[[str], str | None]) -> Spoil:
    """The target's file with other names, None for a tensor that is left out."""

    def spoil(_: pytest.MonkeyPatch, bench: Bench) -> Bench:
        directory = bench.directory / "renamed"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(bench.target.path, directory)
        weights = load_file(directory / "model.safetensors")
        renamed = {new: tensor for name, tensor in weights.items() if (new := rename(name)) is not None}
        save_file(renamed, directory / "model.safetensors", metadata={"format": "pt"})
        return replace(bench, target=replace(bench.target, path=str(directory)))

    return spoil


def next_layer(patch: pytest.MonkeyPatch, bench: Bench) -> Bench:
    """Hooks sit on the layer behind the one that is asked for."""
    shifted = nn.ModuleList([*bench.target.layers[1:], bench.target.layers[0]])
    patch.setattr(Target, "layers", property(lambda self: shifted))
    return bench


def normed_states(patch: pytest.MonkeyPatch, bench: Bench) -> Bench:
    """Taps go through the target's final norm, as ``hidden_states[-1]`` does."""
    norm, taps = bench.target.model.get_submodule("model.norm"), Target.taps

    def normed(self: Target, *asked: Any, **options: Any) -> Any:
        result = taps(self, *asked, **options)
        parts = result.taps.split(self.hidden_size, dim=-1)
        return replace(result, taps=torch.cat([norm(part) for part in parts], dim=-1))

    patch.setattr(Target, "taps", normed)
    return bench


def eight_bit_gate(patch: pytest.MonkeyPatch, bench: Bench) -> Bench:
    """The decay gate of linear attention is rounded to 8 bits (e4m3) on its way into the chunked kernel."""
    chunked = modeling_qwen3_5.torch_chunk_gated_delta_rule

    def rounded(*tensors: Tensor, g: Tensor, **options: Any) -> Any:
        return chunked(*tensors, g=g.to(torch.float8_e4m3fn).to(g.dtype), **options)

    patch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", rounded)
    return bench


def says(**training: Any) -> Prepare:
    """The checkpoint says this of its training."""
    return lambda bench: bench.with_checkpoint(training=bench.checkpoint.training | training)


def manifest(**entries: Any) -> Prepare:
    """The checkpoint's manifest has these entries."""
    return lambda bench: bench.with_checkpoint(manifest=json.loads(json.dumps(entries)))


def spoiled_by(prepare: Prepare) -> Spoil:
    """A fault that is in the files."""
    return lambda _, bench: prepare(bench)


def with_batch(recipe: Recipe) -> Prepare:
    return lambda bench: bench.with_batch(recipe)


def noisy_labels(recipe: Recipe, layer: int | None) -> Spoil:
    """Noise on the embedding's output, or on a layer's, while the trainer's step takes the target's logits."""

    def spoil(_: pytest.MonkeyPatch, bench: Bench) -> Bench:
        target, batch = bench.target, bench.batch(recipe)
        where = target.model.get_input_embeddings() if layer is None else target.layers[layer]
        with noise_on(where):
            teacher = last_hidden(target, batch.ids)
        path = bench.directory / "noisy.safetensors"
        write_replay(path, replace(batch, soft=soft_labels(target, batch, teacher, vocab_size=target.vocab_size)))
        return bench.with_checkpoint(metric_replay=path)

    return spoil


@contextmanager
def noise_on(module: nn.Module) -> Iterator[None]:
    """Gaussian noise of a fifth of the output's size."""
    generator = torch.Generator().manual_seed(0)

    def add(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        noise = torch.randn(output.shape, generator=generator).to(output)
        return output + NOISE * output.float().square().mean().sqrt().to(output) * noise

    handle = module.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


def four_taps_of_five(patch: pytest.MonkeyPatch, bench: Bench) -> Bench:
    """The last tap is missing in config and fc alike, so that every shape fits (here two of three)."""
    raw = json.loads(json.dumps(bench.checkpoint.raw_config))
    raw["dflash_config"]["target_layer_ids"].pop()
    config = DrafterConfig.from_dict(raw, source="spoiled")
    fc = bench.checkpoint.weights["fc.weight"][:, : config.tap_width].contiguous()
    weights = bench.checkpoint.weights | {"fc.weight": fc}
    return bench.with_checkpoint(raw_config=raw, config=config, weights=weights)


def narrow_fc(patch: pytest.MonkeyPatch, bench: Bench) -> Bench:
    """fc takes fewer columns than the config's taps give."""
    short = bench.checkpoint.weights["fc.weight"][:, : 2 * bench.checkpoint.config.hidden_size]
    return bench.with_checkpoint(weights=bench.checkpoint.weights | {"fc.weight": short})


def short_positions(_: pytest.MonkeyPatch, bench: Bench) -> Bench:
    config = bench.checkpoint.config.model_copy(update={"max_position_embeddings": 32})
    return bench.with_checkpoint(config=config)


def other_completions(_: pytest.MonkeyPatch, bench: Bench) -> Bench:
    """A server wrote the completions with weights a third of their own spread away, as another fine-tune's are."""
    prompts = [tokens[:length] for tokens, length in bench.written]
    count = max(len(tokens) - length for tokens, length in bench.written)
    model = copy.deepcopy(bench.target.model)
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data += 0.3 * weight.float().std().to(weight) * torch.randn(weight.shape, generator=generator)
    own = replace(bench.target, model=model).generate_greedy(prompts, count, ignore_eos=True)
    written = [([*prompt, *rest], len(prompt)) for prompt, rest in zip(prompts, own, strict=True)]
    return replace(bench, written=written, changes={"completions_by": "http://127.0.0.1:30000"})


def anchor_again(_: pytest.MonkeyPatch, bench: Bench) -> Bench:
    """Slot 1 drafts the anchor once more, as a drafter does whose labels began at the anchor in training."""
    evidence = bench.evidence()
    tokens = {text.id: text.tokens for text in evidence.texts}
    spoiled = [
        replace(one, drafted=(tokens[one.prompt][one.anchor], *one.drafted[1:])) for one in evidence.random_rounds
    ]
    return replace(bench, changes={"random_rounds": spoiled})


def other_prompts(_: pytest.MonkeyPatch, bench: Bench) -> Bench:
    """A server saw another prompt than these, as it does with another chat template or thinking mode."""
    prompts = [tokens[:length] for tokens, length in bench.written]
    count = max(len(tokens) - length for tokens, length in bench.written)
    own = bench.target.generate_greedy([*prompts[1:], prompts[0]], count, ignore_eos=True)
    written = [([*prompt, *rest], len(prompt)) for prompt, rest in zip(prompts, own, strict=True)]
    return replace(bench, written=written, changes={"completions_by": "http://127.0.0.1:30000"})


def strip_first(name: str) -> str:
    return name.removeprefix("model.") if name.startswith("lm_head") else f"language_{name}"


PLUS_ONE = ("positions = at[..., None] +", "positions = at[..., None] + 1 +")
MINUS_ONE = ("positions = at[..., None] +", "positions = at[..., None] - 1 +")
KEYS_AND_VALUES = "queries, keys, values, attn_mask=mask"
TILES = "(1, queries.shape[1] // keys.shape[1], 1, 1)"
TILED = f"queries, keys.repeat{TILES}, values.repeat{TILES}, attn_mask=mask"
WITH_ANCHOR = ("key < anchor", "key <= anchor")

LAYER_RULES = [{"causal": False, "window": None}] * 2
OTHER_RULES = [{"causal": True, "window": 64}, {"causal": False, "window": None}]

IN_THE_PATH = {
    "context with the anchor": (masks, "block_mask_mod", *WITH_ANCHOR),
    "block ids one late": (batch_module.Batch, "hidden", *PLUS_ONE),
    "block ids one early": (batch_module.Batch, "hidden", *MINUS_ONE),
    "K/V heads tiled": (drafter, "attend", KEYS_AND_VALUES, TILED),
}
"""Faults of the measuring code itself, as :func:`mutate` takes them."""


def in_the_path(fault: str, check: str, title: str, prepare: Prepare = lambda bench: bench) -> Injection:
    return Injection(fault, check, title, mutant(*IN_THE_PATH[title]), measured(check), prepare=prepare)


INJECTIONS = (
    Injection("1", "target-class", "vision-language class", vision_language_class, loaded_class, "hybrid"),
    Injection("1", "target-class", "causal-LM class, layers one module deeper", nested_layers, loaded_class, "hybrid"),
    Injection(
        "1", "target-class", "keys without the prefix", rewritten_keys(strip_first), loaded_class, "hybrid"
    ),
    Injection(
        "1",
        "target-class",
        "one weight missing",
        rewritten_keys(lambda name: None if name.endswith("layers.3.mlp.up_proj.weight") else name),
        loaded_class,
        "hybrid",
    ),
    Injection("", "tap-source", "hooks on the next layer", next_layer, measured("tap-source")),
    Injection(
        "", "tap-statistics", "taps through the final norm", normed_states, measured("tap-statistics"),
        prepare=Bench.with_probe,
    ),
    Injection(
        "4", "hidden-state-fingerprint", "decay gate rounded to 8 bits", eight_bit_gate,
        measured("hidden-state-fingerprint"), "hybrid", Bench.with_probe,
    ),
    Injection(
        "4", "kernel", "trained with fla, measured with torch", spoiled_by(says(kernel="fla")), measured("kernel"),
        "hybrid", says(kernel="torch"),
    ),
    Injection(
        "", "reference-agreement", "other weights wrote the completions", other_completions,
        measured("reference-agreement"),
    ),
    Injection(
        "", "reference-agreement", "the server saw another prompt", other_prompts, measured("reference-agreement")
    ),
    Injection("7", "taps-as-reference", "a tap missing, config and fc alike", four_taps_of_five,
              measured("taps-as-reference")),
    Injection("7", "fc-shape", "a tap missing in fc alone", narrow_fc, lambda bench: checks.fc_shape(bench.checkpoint)),
    Injection(
        "", "causality", "trained causal with a window",
        spoiled_by(manifest(recipe=PAPER.model_dump() | {"layer_rules": OTHER_RULES})), measured("causality"),
        prepare=manifest(recipe=PAPER.model_dump() | {"layer_rules": LAYER_RULES}),
    ),
    Injection("", "max-position", "32 positions", short_positions, measured("max-position")),
    Injection("", "slot-profile", "slot 1 drafts the anchor again", anchor_again, measured("slot-profile")),
    in_the_path("2", "context-strictly-before-anchor", "context with the anchor"),
    in_the_path("3", "position-ids", "block ids one late"),
    in_the_path("3", "position-ids", "block ids one early"),
    in_the_path("5", "gqa", "K/V heads tiled"),
    in_the_path("2", "independent-forward", "context with the anchor"),
    in_the_path("3", "independent-forward", "block ids one late"),
    in_the_path("5", "independent-forward", "K/V heads tiled"),
    Injection(
        "8", "recipe", "70 % KL at T=2 + 30 % CE, γ=10",
        spoiled_by(manifest(recipe=COMPOSITE.model_dump(exclude_none=True))), measured("recipe"),
        prepare=manifest(recipe=PAPER.model_dump(exclude_none=True)),
    ),
    Injection("6", "clean-targets", "noise on embeddings, KL", noisy_labels(KL, None), measured("clean-targets"),
              prepare=with_batch(KL)),
    Injection("6", "clean-targets", "noise on embeddings, composite", noisy_labels(COMPOSITE, None),
              measured("clean-targets"), prepare=with_batch(COMPOSITE)),
    Injection("6", "clean-targets", "noise on states, KL", noisy_labels(KL, 1), measured("clean-targets"),
              prepare=with_batch(KL)),
    Injection("6", "clean-targets", "noise on states, composite", noisy_labels(COMPOSITE, 1), measured("clean-targets"),
              prepare=with_batch(COMPOSITE)),
    in_the_path("", "training-metric-replay", "K/V heads tiled", with_batch(PAPER)),
    in_the_path("", "training-metric-replay", "context with the anchor", with_batch(PAPER)),
)  # fmt: skip
"""Faults of a pair's files and of the measuring code, and the check that names each."""
