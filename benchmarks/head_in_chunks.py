"""Peak memory above the weights of everything that goes through a head of 248 320 rows, for 2 000 tokens.

    python benchmarks/head_in_chunks.py [--dtype bfloat16]

Each line is a fresh process on the CPU that counts what its resident set rises by over what it had with the weights in
memory and after a first run of 8 tokens:

- *shortfall*: taps and shortfalls of 4 texts of 500 tokens from a loaded target (:meth:`dflash.target.Target.taps`).
- *blocks*: greedy tokens, ranks and the 512 best of 2 000 drafted slots (:func:`dflash.batch.best_tokens`) through
  :class:`dflash.vocabulary.SlicedVocabulary`, which every drafter borrows.
- *ranks*: the same greedy tokens and ranks a block of the vocabulary at a time, as for a head in host memory.
- *unchunked*: what transformers does for the first of these, all logits at once.

The limit for the first three is 600 MB.
"""

import argparse
import ctypes
import subprocess  # noqa: TID251 - a peak is that of a fresh process
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROWS, TOKENS, WIDTH = 248_320, 2_000, 256
SIZES = {
    "vocab_size": ROWS,
    "hidden_size": WIDTH,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
MB = 1_000_000
LIMIT = 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "TARGET"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(measure(arguments.child[0], Path(arguments.child[1]), arguments.dtype))
        return
    print(
        f"{ROWS} rows × {TOKENS} tokens, {arguments.dtype}: all logits in float32 are {ROWS * TOKENS * 4 / MB:.0f} MB"
    )
    with tempfile.TemporaryDirectory(prefix="head-in-chunks-") as folder:
        write_target(Path(folder))
        for what in MEASURED:
            command = [sys.executable, __file__, "--dtype", arguments.dtype, "--child", what, folder]
            rise = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) / MB
            print(f"{what:10} {rise:6.0f} MB{'' if what == 'unchunked' else f'  (limit {LIMIT})'}")


def write_target(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SIZES)).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def measure(what: str, folder: Path, dtype_name: str) -> int:
    """Bytes that the resident set of this process rises by."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    run: Callable[[int], Any] = MEASURED[what](folder, getattr(torch, dtype_name))
    with torch.no_grad():
        run(8)
        ctypes.CDLL(None).malloc_trim(0)  # what the first run has freed is not there to be used again
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
        run(TOKENS)
    return status("VmHWM") - before


def shortfall(folder: Path, dtype: Any) -> Callable[[int], Any]:
    from dflash.target import Target

    target = Target.load(folder, dtype=dtype)
    touch(target.model.parameters())
    return lambda tokens: target.taps(texts(tokens), (0, 1, 2), shortfall=True)


def unchunked(folder: Path, dtype: Any) -> Callable[[int], Any]:
    from dflash.target import Target

    target = Target.load(folder, dtype=dtype)
    touch(target.model.parameters())

    def run(tokens: int) -> Any:
        ids = texts(tokens)
        output = target.model(input_ids=ids, use_cache=False, output_hidden_states=True)
        logits = output.logits.float()
        return logits.amax(-1)[:, :-1] - logits[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]

    return run


def blocks(folder: Path, dtype: Any) -> Callable[[int], Any]:
    import torch

    from dflash.batch import best_tokens

    vocabulary = sliced(folder, dtype)
    return lambda tokens: best_tokens(
        vocabulary, torch.randn(tokens, WIDTH).to(dtype), torch.arange(tokens) * 100, keep=512
    )


def ranks(folder: Path, dtype: Any) -> Callable[[int], Any]:
    import torch

    vocabulary = sliced(folder, dtype)
    return lambda tokens: vocabulary.best_and_ranks(torch.randn(tokens, WIDTH).to(dtype), torch.arange(tokens) * 100)


def sliced(folder: Path, dtype: Any) -> Any:
    from dflash.vocabulary import SlicedVocabulary

    vocabulary = SlicedVocabulary.open(folder, range(100), dtype=dtype)
    touch([vocabulary.head])
    return vocabulary


def touch(weights: Any) -> None:
    """Have every page in memory."""
    for weight in weights:
        weight.sum()


def texts(tokens: int) -> Any:
    import torch

    return torch.randint(0, ROWS, (4, tokens // 4))


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


MEASURED = {"shortfall": shortfall, "blocks": blocks, "ranks": ranks, "unchunked": unchunked}

if __name__ == "__main__":
    main()
