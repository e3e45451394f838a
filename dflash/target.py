"""The target: loaded as its causal-LM class with every weight accounted for, tapped by hooks, decoded greedily."""

import json
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3_5ForCausalLM,
    Qwen3ForCausalLM,
)

from dflash.errors import DFlashError
from dflash.head import blocks_of, scan
from dflash.kernels import Kernel, kernel_for

# Auto classes decide by files and versions; a vision-language class nests the layers under another path, so taps by
# path would be silently wrong. A Qwen3.5 vision-language checkpoint is loaded as its text model alone.
CAUSAL_LM: dict[str, type[PreTrainedModel]] = {
    "qwen3": Qwen3ForCausalLM,
    "qwen3_5": Qwen3_5ForCausalLM,
    "qwen3_5_text": Qwen3_5ForCausalLM,
}
_ROWS_AT_ONCE = 32


class TargetLoadError(DFlashError):
    """The target is not there, is of an unknown architecture, or its weights do not fit its class exactly."""


class TargetMismatchError(DFlashError):
    """The drafter was made for another target."""


@dataclass(frozen=True)
class TapResult:
    """``taps`` [B, S, K·H] in the target's dtype, in the order of the asked-for layers.

    ``shortfall`` [B, S] float32: the best logit after each position less that of the row's next token, 0 where that is
    as good as any; the last column is 0. None if it was not asked for.
    """

    taps: Tensor
    shortfall: Tensor | None


@dataclass(frozen=True)
class Target:
    """A frozen causal LM. ``kernel`` is "none" for a target without linear attention."""

    path: str
    config: PreTrainedConfig
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    kernel: Kernel | Literal["none"]
    tensors: int
    """Number of weight tensors of the loaded class."""

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        kernel: Literal["auto", "fla", "torch"] = "auto",
    ) -> Self:
        """Load a local directory or a hub name; :class:`TargetLoadError` names each weight at fault."""
        name = str(path)
        config = text_config(name)
        chosen = kernel_for(config, kernel, device=device, source=name)
        model = _load_exactly(name, config, dtype)
        model.requires_grad_(False).train(False).to(device)
        return cls(name, config, model, load_tokenizer(name), chosen, len(model.state_dict()))

    @property
    def class_name(self) -> str:
        return type(self.model).__name__

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding; more than the tokenizer has tokens."""
        return self._embedding.num_embeddings

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        return self._embedding.weight.device

    @property
    def layers(self) -> nn.ModuleList:
        """The blocks of the text model, at the same path in every supported class."""
        layers: nn.ModuleList = self.model.get_submodule("model.layers")  # type: ignore[assignment]
        return layers

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """What ends a completion: the generation config's word, else the model config's; may be empty."""
        return end_tokens(self.config, self.model.generation_config)

    @property
    def _embedding(self) -> nn.Embedding:
        embedding: nn.Embedding = self.model.get_input_embeddings()  # type: ignore[assignment]
        return embedding

    def spoiled_weight(self) -> str | None:
        """The name of the first weight that holds NaN or infinity, None where all are finite."""
        weights = self.model.state_dict().items()
        return next((name for name, weight in weights if not bool(weight.isfinite().all())), None)

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [..., H] of ``ids`` [...]."""
        embeddings: Tensor = self._embedding(ids)
        return embeddings

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of normed hidden states [..., H] through the target's head."""
        logits: Tensor = self.model.get_submodule("lm_head")(hidden)
        return logits

    @torch.no_grad()  # not inference mode: a drafter is trained on these tensors
    def taps(self, ids: Tensor, layer_ids: Sequence[int], *, shortfall: bool = False) -> TapResult:
        """Outputs of the blocks ``layer_ids`` for ``ids`` [B, S] in one pass; id L is ``hidden_states[L + 1]``.

        Shorter rows are padded on the right with any token: attention, convolution and delta rule are all causal, so
        no state before the padding can depend on it, and no mask is needed. Logits exist for a few positions and tokens
        at a time.
        """
        require_rows(ids, self.vocab_size, path=self.path)
        ids = ids.to(self.device)
        width = self.hidden_size
        taps = torch.empty(*ids.shape, len(layer_ids) * width, dtype=self.dtype, device=self.device)
        with self.tapped(layer_ids, lambda i, output: taps[..., i * width : (i + 1) * width].copy_(output)):
            hidden = self.model.get_submodule("model")(input_ids=ids, use_cache=False).last_hidden_state
        if not shortfall:
            return TapResult(taps, None)
        following = torch.cat((ids[:, 1:], torch.zeros_like(ids[:, :1])), dim=1)
        head = self.model.get_submodule("lm_head").get_parameter("weight")
        found = scan(hidden.flatten(0, 1), following.flatten(), blocks_of(head))
        missed = (found.best - found.wanted).view(ids.shape)
        missed[:, -1] = 0
        return TapResult(taps, missed)

    @contextmanager
    def tapped(self, layer_ids: Sequence[int], keep: Callable[[int, Tensor], Any]) -> Iterator[None]:
        """While open, ``keep(place, output [B, S, H])`` gets what each of the blocks ``layer_ids`` puts out."""
        require_layers(layer_ids, self.num_layers, path=self.path)
        handles = [
            self.layers[layer].register_forward_hook(lambda _module, _inputs, output, i=i: keep(i, output))
            for i, layer in enumerate(layer_ids)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.inference_mode()
    def generate_greedy(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        ignore_eos: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> list[list[int]]:
        """Greedy completions of non-empty ``prompts``, each ending with its end token or after ``max_new_tokens``.

        ``progress`` is called with the number of tokens just added over all rows.
        """
        end = frozenset() if ignore_eos else self.eos_token_ids
        by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        completions: list[list[int]] = [[] for _ in prompts]
        for start in range(0, len(by_length), _ROWS_AT_ONCE):
            rows = by_length[start : start + _ROWS_AT_ONCE]
            generated = self._generate([prompts[i] for i in rows], max_new_tokens, end, progress)
            for row, tokens in zip(rows, generated, strict=True):
                completions[row] = tokens
        return completions

    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        end: frozenset[int],
        progress: Callable[[int], None] | None,
    ) -> list[list[int]]:
        """Rows padded on the left: with the mask, a delta net's state is still zero when the first real token comes."""
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        ids, mask = ids.to(self.device), mask.to(self.device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        cache = DynamicCache(config=self.config)
        completions: list[list[int]] = [[] for _ in prompts]
        open_rows = set(range(len(prompts)))
        for _ in range(max_new_tokens):
            output = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                cache=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            ids = output.logits[:, -1:].argmax(-1)
            for row in sorted(open_rows):
                completions[row].append(int(ids[row, 0]))
            if progress is not None:
                progress(len(open_rows))
            open_rows -= {row for row in open_rows if completions[row][-1] in end}
            if not open_rows:
                break
            mask = torch.cat((mask, mask.new_ones(len(prompts), 1)), dim=1)
            positions = positions[:, -1:] + 1
        return completions


def require_layers(layer_ids: Sequence[int], num_layers: int, *, path: str) -> None:
    """:class:`TargetMismatchError` unless each of ``layer_ids`` is a layer before the last."""
    for layer in layer_ids:
        if not 0 <= layer < num_layers - 1:
            raise TargetMismatchError(
                f"tap {layer} is not a layer before the last of {path}, whose layers are 0..{num_layers - 1}; what the "
                f"last one puts out is normed in one engine and raw in another"
            )


def require_rows(ids: Tensor, rows: int, *, path: str) -> None:
    """:class:`TargetMismatchError` for a token among ``ids`` that the embedding of ``rows`` rows has none for."""
    strange = ids[(ids < 0) | (ids >= rows)]
    if len(strange):
        raise TargetMismatchError(
            f"token {int(strange[0])} is in a text, and the target {path} has {rows} rows; is the tokenizer another "
            f"model's?"
        )


def end_tokens(config: PreTrainedConfig, generation: GenerationConfig | None) -> frozenset[int]:
    """What ends a completion: the generation config's word, else the model config's; may be empty."""
    ids = generation.eos_token_id if generation is not None else None
    ids = config.eos_token_id if ids is None else ids
    every = [ids] if isinstance(ids, int) else ids or []
    if not isinstance(every, list) or not all(isinstance(token, int) for token in every):
        raise TargetLoadError(
            f"target {config.name_or_path} has eos_token_id {ids!r}, expected a token id or a list of them; correct "
            f"generation_config.json or config.json"
        )
    return frozenset(every)


def text_config(path: str) -> PreTrainedConfig:
    """The config of the text model, out of a vision-language one where that is what ``path`` holds."""
    if (Path(path).is_absolute() or path.startswith(".")) and not Path(path).is_dir():
        raise TargetLoadError(f"target {path} is not a directory; give a directory with config.json and safetensors")
    try:
        config = AutoConfig.from_pretrained(path)
    except Exception as error:  # a malformed file can raise anything from inside transformers
        raise TargetLoadError(f"target {path} has no config that transformers can read: {_first_line(error)}") from None
    if config.model_type not in CAUSAL_LM:
        raise TargetLoadError(
            f"target {path} has model_type {config.model_type}, expected one of {', '.join(sorted(CAUSAL_LM))}"
        )
    _require_json(Path(path) / "generation_config.json", path)
    text: PreTrainedConfig = config.get_text_config()
    for quantized in (getattr(config, "quantization_config", None), getattr(text, "quantization_config", None)):
        if quantized is not None:
            method = quantized.get("quant_method") if isinstance(quantized, dict) else None
            raise TargetLoadError(
                f"target {path} is quantized (quantization_config in its config.json, quant_method {method}); its "
                f"hidden states are not those a drafter is trained on: give the checkpoint in bfloat16"
            )
    if config.tie_word_embeddings:
        text.tie_word_embeddings = True
    return text


def _require_json(file: Path, path: str) -> None:
    """transformers leaves a file that it cannot read out without a word, and with it what ends a text."""
    try:
        said = json.loads(file.read_bytes()) if file.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise TargetLoadError(f"target {path} has a {file.name} that cannot be read: {_first_line(error)}") from None
    if not isinstance(said, dict):
        raise TargetLoadError(f"target {path} has a {file.name} that is no JSON object; copy it again or remove it")


def _load_exactly(path: str, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model with no weight missing, left over or misshaped, the vision tower and the MTP head apart."""
    model_class = CAUSAL_LM[config.model_type]
    try:
        with _report_left_to_us():
            loaded: Any = model_class.from_pretrained(
                path, config=config, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
            )
    except Exception as error:  # safetensors, hub and transformers share no base class
        raise TargetLoadError(
            f"target {path} could not be loaded as {model_class.__name__}: {_first_line(error)}"
        ) from error
    model: PreTrainedModel = loaded[0]
    info: dict[str, Any] = loaded[1]
    problem = misfit(
        path,
        model_class.__name__,
        missing=info["missing_keys"],
        unexpected=info["unexpected_keys"],
        misshaped=[f"{name} {list(found)} for {list(expected)}" for name, found, expected in info["mismatched_keys"]],
    )
    if problem:
        raise TargetLoadError(problem)
    return model


def misfit(
    path: str, class_name: str, *, missing: Collection[str], unexpected: Collection[str], misshaped: Collection[str]
) -> str | None:
    """What is wrong with the weights at ``path``, each by name; None if nothing is."""
    kinds = (("missing", missing), ("unexpected", unexpected), ("misshaped", misshaped))
    problems = [f"{kind} {_some(sorted(names))}" for kind, names in kinds if names]
    if not problems:
        return None
    return (
        f"target {path} does not fit {class_name}: {'; '.join(problems)}; the directory is incomplete or "
        f"holds another model than its config.json says: copy it again, whole, or give the directory of the model that "
        f"is meant"
    )


@contextmanager
def _report_left_to_us() -> Iterator[None]:
    """transformers prints a table of the weights at fault and goes on; here they are an error."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The target's tokenizer. Raises :class:`TargetLoadError`."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(path))
    except Exception as error:  # a malformed file can raise anything from inside transformers
        raise TargetLoadError(
            f"target {path} has no tokenizer that transformers can read: {_first_line(error)}; give a directory with "
            f"config.json, safetensors and tokenizer.json"
        ) from None
    return tokenizer


def _some(names: Sequence[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _first_line(error: BaseException) -> str:
    return next((line.strip(" :.") for line in str(error).splitlines() if line.strip()), type(error).__name__)
