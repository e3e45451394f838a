"""Random pairs on disk, for what needs files of the right form and no trained weights."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM

from dflash.config import DrafterConfig

WORDS = ["<end>", "<mask>", *(f"w{number}" for number in range(62))]
SIZES = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
DRAFTER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "vocab_size": len(WORDS),
    "max_position_embeddings": 512,
    "num_target_layers": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 9,
    "block_size": 6,
    "dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 3, 5]},
}


def write_target(directory: Path, *, hybrid: bool = False) -> Path:
    """A random target with a tokenizer of one token a word, ``w0`` … ``w61``."""
    torch.manual_seed(0)
    hybrid_config, dense_config = Qwen3_5TextConfig(**SIZES, **DELTA_NET), Qwen3Config(**SIZES)
    model = Qwen3_5ForCausalLM(hybrid_config) if hybrid else Qwen3ForCausalLM(dense_config)
    model.save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<mask>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(directory)
    return directory


def write_drafter(directory: Path, *, seed: int = 0, **changes: object) -> Path:
    """A random drafter in z-lab's layout; ``changes`` override the config, ``taps`` its target_layer_ids."""
    directory.mkdir(parents=True)
    raw = json.loads(json.dumps(DRAFTER))
    raw["dflash_config"]["target_layer_ids"] = changes.pop("taps", raw["dflash_config"]["target_layer_ids"])
    raw |= changes
    (directory / "config.json").write_text(json.dumps(raw))
    generator = torch.Generator().manual_seed(seed)
    shapes = DrafterConfig.from_dict(raw, source="test").tensor_shapes()
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else 0.2 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }
    save_file(weights, directory / "model.safetensors")
    return directory


def write_prompts(path: Path, count: int = 4) -> Path:
    """Raw prompts of different lengths."""
    texts = (" ".join(f"w{(7 * place + word) % 62}" for word in range(5 + 3 * place)) for place in range(count))
    path.write_text("".join(json.dumps({"id": f"p{place}", "prompt": text}) + "\n" for place, text in enumerate(texts)))
    return path
