"""τ as vLLM counts it: generate with a drafter and read the engine's own counters. Imports vllm, torch-side only.

Runs with the interpreter of the peers' environment (``make peers``), started by export_in_engines.py; reads token ids
from a JSON file and prints one line of JSON, so that nothing of this project is needed there.
"""

import argparse
import json
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, help="none: plain decoding")
    parser.add_argument("--drafts", type=int, help="B-1")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON: a list of lists of token ids")
    parser.add_argument("--max-new-tokens", type=int, required=True)
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()

    from vllm import LLM, SamplingParams

    speculative = None
    if given.drafter is not None:
        speculative = {"method": "dflash", "model": str(given.drafter), "num_speculative_tokens": given.drafts}
    engine = LLM(
        model=str(given.target),
        dtype=given.dtype,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=1,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=speculative,
    )
    prompts = [{"prompt_token_ids": ids} for ids in json.loads(given.prompts.read_text())]
    sampling = SamplingParams(temperature=0, max_tokens=given.max_new_tokens, ignore_eos=True, detokenize=False)
    tokens = [list(one.outputs[0].token_ids) for one in engine.generate(prompts, sampling, use_tqdm=False)]
    counted = {
        metric.name.removeprefix("vllm:spec_decode_"): metric.value
        for metric in engine.get_metrics()
        if metric.name.startswith("vllm:spec_decode_num_") and hasattr(metric, "value")
    }
    print("result " + json.dumps({"tokens": tokens, "counted": counted}))


if __name__ == "__main__":
    main()
