"""The plan of a run: what it says before a GPU is touched."""

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from dflash.config import DrafterConfig
from dflash.training.plan import Plan, memory, parameters, plan
from dflash.training.run_config import RunConfig

BIG: dict[str, Any] = {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e7,
    "vocab_size": 248_320,
    "max_position_embeddings": 262_144,
    "num_target_layers": 64,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "sliding_window": 2048,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 248_070, "target_layer_ids": [1, 16, 31, 46, 61]},
}
DRAFTER = DrafterConfig.from_dict(BIG, source="test")


def config(**sections: Any) -> RunConfig:
    raw: dict[str, Any] = {
        "output": "runs/big",
        "target": {"path": "Qwen3.6-27B"},
        "drafter": {"config": "config.json"},
        "data": {"files": ["data.jsonl"], "max_length": 3072},
        "optimizer": {"num_epochs": 6, "rows": 2, "accumulate": 4},
    }
    return RunConfig.from_dict(raw | sections, source="test")


def planned(run: RunConfig) -> Plan:
    return plan(
        run,
        DRAFTER,
        run.objective.recipe(16),
        target_class="Qwen3_5ForCausalLM",
        kernel="fla",
        samples=800_000,
        steps=75_000,
        ranks=8,
        attention="flex",
        target_bytes=54 << 30,
        vocab_size=248_320,
    )


def test_the_plan_says_everything_that_decides_a_run() -> None:
    shown = StringIO()
    Console(width=200, file=shown).print(planned(config()).to_table())
    text = shown.getvalue()
    for said in (
        "Qwen3_5ForCausalLM",
        "bfloat16",
        "kernel fla",
        "1,16,31,46,61",
        "1,730,213,120 parameters",
        "loss ce, gamma 7, block_size 16",
        "800,000 samples",
        "64 rows (8 ranks × 4 accumulated)",
        "up to 196,608 tokens",
        "512 anchors a row",
        "75,000",
        "flex, ddp over 8 ranks",
        "GiB a rank",
    ):
        assert said in text, said


def test_parameters_are_those_of_the_checkpoint() -> None:
    attention = 5120 * 128 * (2 * 32 + 2 * 8) + 2 * 128
    layer = attention + 3 * 5120 * 17408 + 2 * 5120
    assert parameters(DRAFTER) == 5 * layer + 5120 * 5 * 5120 + 2 * 5120 == planned(config()).drafter_parameters


def test_slots_count_no_anchor() -> None:
    assert planned(config()).slots_per_step == 64 * 512 * 15


def test_memory_is_what_each_part_is_known_to_take() -> None:
    found = planned(config()).memory
    assert found.target == 54 << 30
    assert found.optimizer == 16 * parameters(DRAFTER)  # float32 masters, gradients and two moments
    assert found.weights == 4 * parameters(DRAFTER)  # a bfloat16 copy and its gradient
    assert found.logits == 3 * 4 * 2048 * 248_320  # of one chunk, never of all slots
    assert found.total == sum(getattr(found, name) for name in type(found).model_fields)


def test_shards_and_float32_and_masks_change_the_estimate() -> None:
    def of(attention: str = "flex", **sections: Any) -> Any:
        return memory(config(**sections), DRAFTER, ranks=8, attention=attention, target_bytes=0, rows=248_320)

    assert of(parallel={"strategy": "fsdp"}).optimizer == of().optimizer // 8
    exact = of(drafter={"config": "config.json", "dtype": "float32"})
    assert exact.weights == 0
    assert exact.activations == 2 * of().activations
    queries, keys = 512 * 16, 3072 + 512 * 16
    assert of("dense").activations - of().activations == 4 * 2 * 2 * 32 * queries * keys  # scores in float32, 2 rows
    few = of(objective={"num_anchors": 16})
    assert few.logits == 3 * 4 * (2 * 16 * 16) * 248_320


@pytest.mark.parametrize(
    ("objective", "said", "gamma"),
    [
        ({"loss": "composite", "noise": 0.5}, "noise 0.5 on fc's input", "10"),
        ({"loss": "dpace"}, "loss dpace", "none"),
    ],
)
def test_what_is_not_the_papers_recipe_is_said(objective: dict[str, Any], said: str, gamma: str) -> None:
    rows = dict(planned(config(objective=objective)).rows())
    assert said in rows["objective"]
    assert rows["γ"] == gamma
