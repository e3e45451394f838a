"""One side of ``benchmarks/train.py``: training steps on a batch from a file, in a process of its own.

    python benchmarks/train_worker.py SIDE BATCH --loss ce|kl --steps N

SIDE is ``ours`` or ``speculators``, whose environment has nothing of this project: what only one side has is imported
where it is used. A step is forward, loss, backward, clip and AdamW; the batch, the anchors and all weights are the
file's. Prints one line of JSON.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

LEARNING_RATE = 6e-4
WARM_STEPS = 2
Step = Callable[[], Tensor]
"""Forward and loss: Σ w·m·loss over the batch, with gradient."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=("ours", "speculators"))
    parser.add_argument("batch", type=Path)
    parser.add_argument("--loss", choices=("ce", "kl"), default="ce")
    parser.add_argument("--steps", type=int, default=5)
    given = parser.parse_args()
    side = {"ours": ours, "speculators": speculators}[given.side]
    imports(given.side)
    imported = resident()
    with safe_open(given.batch, framework="pt") as file:
        # copies: what is mapped from the file would count only once it is read
        batch = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  # no mapping
        about = json.loads(file.metadata()["about"])
    step, weights, fc = side(batch, about, given.loss)
    del batch
    loaded = resident()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    seconds: list[float] = []
    first: dict[str, float] = {}
    for _ in range(WARM_STEPS + given.steps):
        started = time.perf_counter()
        loss = step()
        loss.backward()
        if not first:
            assert fc.grad is not None
            first = {"loss": float(loss.detach()), "fc_gradient": float(fc.grad.norm())}
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
    memory = {"peak_mib": mib(peak() - imported), "working_mib": mib(peak() - loaded)}
    print("result " + json.dumps({"seconds": statistics.median(seconds[WARM_STEPS:])} | first | memory))


def imports(side: str) -> None:
    """Whatever the side will import, so that it does not count as the step's memory; torch's optimizers import late."""
    layer = torch.nn.Linear(1, 1)
    layer(torch.ones(1)).sum().backward()
    torch.optim.AdamW(layer.parameters()).step()
    if side == "ours":
        import dflash.training.head_loss
        import dflash.training.objective  # noqa: F401
    else:
        # PyPI's torchvision is built for CUDA; transformers imports it for images, which nothing here has.
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        from speculators.models.dflash import DFlashDraftModel  # noqa: F401


def ours(batch: dict[str, Tensor], about: dict[str, Any], loss: str) -> tuple[Step, list[Tensor], Tensor]:
    from dflash.config import DrafterConfig
    from dflash.drafter import Drafter
    from dflash.recipes import Recipe
    from dflash.training.batch import Features
    from dflash.training.blocks import blocks_at
    from dflash.training.head_loss import head_loss
    from dflash.training.objective import TrainingModel, block_embeddings

    config = DrafterConfig.from_dict(about["config"], source="benchmark")
    drafter = Drafter(config)
    drafter.load_state_dict({name: batch[f"drafter.{name}"] for name in drafter.state_dict()})
    model = TrainingModel(drafter, compute_dtype=torch.float32, attention="dense")
    vocabulary = _Vocabulary(batch["embedding"], batch["head"])
    mask, starts = batch["loss_mask"].bool(), torch.zeros_like(batch["ids"])
    features = Features(batch["ids"], mask, starts, batch["taps"], [[0]], batch["hidden"])
    anchors = batch["anchors"][None]
    recipe = Recipe(loss=loss, block_size=config.block_size, gamma=about["gamma"], temperature=1.0)

    def step() -> Tensor:
        blocks = blocks_at(features, config, anchors)
        embeddings = block_embeddings(vocabulary, blocks, features.ids, config)
        hidden = model(features.taps, blocks, features.starts, embeddings)
        teacher, chunk = features.hidden, about["chunk_tokens"]
        return head_loss(hidden, blocks, recipe, vocabulary, teacher=teacher, chunk_tokens=chunk).numerator

    return step, list(model.parameters()), drafter.fc.weight


class _Vocabulary:
    def __init__(self, embedding: Tensor, head: Tensor) -> None:
        self.embedding, self.head = embedding, head

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding[ids]

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.linear(hidden, self.head)


def speculators(batch: dict[str, Tensor], about: dict[str, Any], loss: str) -> tuple[Step, list[Tensor], Tensor]:
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig, core
    from transformers import Qwen3Config

    raw = about["config"]
    layers = Qwen3Config(**{name: raw[name] for name in about["qwen3"]}, tie_word_embeddings=False)
    layers._attn_implementation = "sdpa"
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=raw["vocab_size"],
        block_size=raw["block_size"],
        aux_hidden_state_layer_ids=[layer + 1 for layer in raw["dflash_config"]["target_layer_ids"]],
        mask_token_id=raw["dflash_config"]["mask_token_id"],
    )
    model = DFlashDraftModel(config)
    state = {name.removeprefix("drafter."): value for name, value in batch.items() if name.startswith("drafter.")}
    state |= {"embed_tokens.weight": batch["embedding"], "lm_head.weight": batch["head"]}
    state |= {"verifier_lm_head.weight": batch["head"], "verifier_norm.weight": torch.ones(raw["hidden_size"])}
    model.load_state_dict(state, strict=True)
    mask = batch["loss_mask"].long()
    ids, taps, last = batch["ids"], batch["taps"], batch["hidden"]
    options = {"loss_config": resolve_loss_config({"ce": "ce", "kl": "kl_div"}[loss], "eager"), "gamma": about["gamma"]}
    chosen = batch["anchors"], torch.ones(len(batch["anchors"]), dtype=torch.bool)
    core.select_anchors = lambda *_: chosen  # both sides train on the same blocks
    anchors = len(chosen[0])
    scored = anchors * (raw["block_size"] - 1)  # every slot: it divides by their number, not by Σ w·m

    def step() -> Tensor:
        documents = torch.zeros_like(ids)
        _, value, _ = model(taps, ids, mask, last, documents, max_anchors=anchors, **options)
        total: Tensor = value * scored
        return total

    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return step, trained, model.fc.weight


def resident() -> int:
    return _status("VmRSS")


def peak() -> int:
    return _status("VmHWM")


def mib(size: int) -> float:
    return size / 2**20


def _status(field: str) -> int:
    """Bytes, as the kernel counts this process's own pages."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


if __name__ == "__main__":
    main()
