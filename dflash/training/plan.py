"""What a run is going to do, worked out from its config before anything is computed. Imports no torch."""

from collections.abc import Iterator
from math import prod

from pydantic import BaseModel, ConfigDict
from rich.table import Table
from rich.text import Text

from dflash.config import DrafterConfig
from dflash.recipes import Recipe, describe
from dflash.training.run_config import RunConfig

_GIB = 1 << 30
_WIDTH = {"float32": 4, "bfloat16": 2}


class MemoryEstimate(BaseModel):
    """Bytes on the device of one rank, by what they are for; an estimate, within about a third of what is measured.

    ``target`` are its weights, or its embedding and head alone where the taps come from files. ``optimizer`` are
    float32 masters, gradients and AdamW's two moments; ``weights`` the casts that a pass computes with.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: int
    optimizer: int
    weights: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """All of it, in bytes."""
        return self.target + self.optimizer + self.weights + self.activations + self.logits


class Plan(BaseModel):
    """The run in figures; ``tokens_per_step`` and ``slots_per_step`` are over all ranks, and at most so many."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str
    target_class: str
    kernel: str
    target_dtype: str
    drafter_parameters: int
    drafter_dtype: str
    taps: tuple[int, ...]
    block_size: int
    recipe: str
    gamma: float | None
    noise: float
    samples: int
    steps: int
    rows_per_step: int
    ranks: int
    accumulate: int
    tokens_per_step: int
    anchors_per_row: int
    slots_per_step: int
    features: str
    attention: str
    strategy: str
    learning_rate: float
    memory: MemoryEstimate

    def rows(self) -> Iterator[tuple[str, str]]:
        """Name and value of each line, as a person reads them."""
        memory = self.memory
        parts = ", ".join(f"{name} {_gib(getattr(memory, name))}" for name in type(memory).model_fields)
        yield "target", f"{self.target} ({self.target_class}, {self.target_dtype}, kernel {self.kernel})"
        yield "taps", ",".join(map(str, self.taps))
        yield "drafter", f"{self.drafter_parameters:,} parameters, computing in {self.drafter_dtype}"
        yield "objective", self.recipe + (f", noise {self.noise:g} on fc's input" if self.noise else "")
        yield "γ", "none" if self.gamma is None else f"{self.gamma:g}"
        yield "data", f"{self.samples:,} samples, features {self.features}"
        yield (
            "step",
            f"{self.rows_per_step} rows ({self.ranks} ranks × {self.accumulate} accumulated), up to "
            f"{self.tokens_per_step:,} tokens and {self.slots_per_step:,} slots, {self.anchors_per_row} anchors a row",
        )
        yield "steps", f"{self.steps:,}, learning rate {self.learning_rate:g}"
        yield "attention", f"{self.attention}, {self.strategy} over {self.ranks} ranks"
        yield "memory", f"about {_gib(memory.total)} a rank: {parts}"

    def to_table(self) -> Table:
        """For the terminal."""
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in self.rows():
            table.add_row(Text(name), Text(value))
        return table


def plan(
    config: RunConfig,
    drafter: DrafterConfig,
    recipe: Recipe,
    *,
    target_class: str,
    kernel: str,
    samples: int,
    steps: int,
    ranks: int,
    attention: str,
    target_bytes: int,
    vocab_size: int,
) -> Plan:
    """The plan of ``config`` for a ``drafter`` and its ``recipe``.

    ``target_bytes`` are those of the target's weights that lie on the device: all of them for online features.
    """
    optimizer, objective = config.optimizer, config.objective
    rows_per_step = optimizer.rows * optimizer.accumulate * ranks
    return Plan(
        target=config.target.path,
        target_class=target_class,
        kernel=kernel,
        target_dtype=config.target.dtype,
        drafter_parameters=parameters(drafter),
        drafter_dtype=config.drafter.dtype,
        taps=tuple(drafter.target_layer_ids),
        block_size=drafter.block_size,
        recipe=describe(recipe),
        gamma=recipe.gamma,
        noise=objective.noise,
        samples=samples,
        steps=steps,
        rows_per_step=rows_per_step,
        ranks=ranks,
        accumulate=optimizer.accumulate,
        tokens_per_step=rows_per_step * config.data.max_length,
        anchors_per_row=objective.num_anchors,
        slots_per_step=rows_per_step * objective.num_anchors * (drafter.block_size - 1),
        features=config.features.mode + (", packed" if config.features.packing else ""),
        attention=attention,
        strategy=config.parallel.strategy,
        learning_rate=optimizer.learning_rate,
        memory=memory(config, drafter, ranks=ranks, attention=attention, target_bytes=target_bytes, rows=vocab_size),
    )


def parameters(drafter: DrafterConfig) -> int:
    """How many numbers are trained."""
    return sum(prod(shape) for shape in drafter.tensor_shapes().values())


def memory(
    config: RunConfig, drafter: DrafterConfig, *, ranks: int, attention: str, target_bytes: int, rows: int
) -> MemoryEstimate:
    """Peak of one rank; ``rows`` of the target's head. Activations are what the drafter's backward pass needs again."""
    count, width = parameters(drafter), _WIDTH[config.drafter.dtype]
    shards = ranks if config.parallel.strategy == "fsdp" else 1
    tokens = config.optimizer.rows * config.data.max_length
    queries = config.optimizer.rows * config.objective.num_anchors * drafter.block_size
    hidden, inner = drafter.hidden_size, drafter.intermediate_size
    heads = drafter.num_attention_heads * drafter.head_dim
    keys = 2 * drafter.num_key_value_heads * drafter.head_dim  # keys and values
    # the taps as they come, and as they are cast or made noisy; fused and normed once
    context = tokens * (2 * drafter.tap_width + 4 * hidden)
    # of each layer: the block stream before and after its norms, queries, the MLP's inside, and keys and values
    # projected, normed, rotated and joined with the context's
    block = queries * (8 * hidden + 4 * heads + 4 * inner)
    joined = (tokens + queries) * 4 * keys
    scores = 0
    if attention == "dense":
        scores = 2 * drafter.num_attention_heads * queries * (tokens + queries) // config.optimizer.rows
    activations = width * (context + drafter.num_hidden_layers * (block + joined)) + 4 * scores
    chunk = min(config.objective.chunk_tokens, queries)
    return MemoryEstimate(
        target=target_bytes,
        optimizer=16 * count // shards,
        weights=0 if width == 4 else 2 * width * count,
        activations=activations,
        logits=3 * 4 * chunk * rows,
    )


def _gib(count: int) -> str:
    return f"{count / _GIB:.2f} GiB"
