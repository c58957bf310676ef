"""Speeds that are scaled by depth: each part counts as often as the whole model has it."""

from dataclasses import asdict, replace
from typing import Any

import pytest

from mlx_mmfree.evaluation import scaled
from mlx_mmfree.evaluation.audit.skeleton import full_name, presets, skeleton
from mlx_mmfree.evaluation.benchmark import (
    READ,
    Record,
    head_macs,
    metrics,
    read_weights,
    ternary_macs,
)
from mlx_mmfree.models import Decoder, architectures
from mlx_mmfree.ops.kernel_times import total_bytes

AMOUNTS: dict[str, Any] = {
    "prompt_tokens": [4],
    "positions": [2],
    "decoded_tokens": 1,
    "rounds": 1,
}
OVERHEAD, LOOKUP, LINEAR, FULL = 0.25, 1e-5, 1.0, 3.0


def seconds_of(model: Decoder) -> float:
    """The time that a clock would show if time were a sum over parts."""
    layers = [LINEAR if "qkv_conv" in block.token_mixer else FULL for block in model.blocks]
    return OVERHEAD + LOOKUP * model.vocab_size + sum(layers)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replaces weights and time; lists how many layers were measured at once."""
    measured: list[int] = []

    def measure_loaded(model: Decoder, name: str, before: int, **_: Any) -> dict[str, Any]:
        measured.append(len(model.blocks))
        size, macs = total_bytes(read_weights(model)), ternary_macs(model) + head_macs(model)
        times = [seconds_of(model), 2 * seconds_of(model)]
        record = Record(f"{name}: decode after 2", 1, READ, size, macs, times, times, "tokens")
        return {"records": [asdict(record)], "memory": {}}

    monkeypatch.setattr(scaled, "measure_loaded", measure_loaded)
    monkeypatch.setattr(scaled, "draw_weights", lambda model: None)
    return measured


def test_parts_of_27b_make_the_whole(clock: list[int]) -> None:
    config = presets()[full_name("bonsai-27b")]
    found = scaled.measure_scaled("b", config, **AMOUNTS)["records"]
    # the head, nothing, and one layer of either kind
    assert clock == [0, 0, 1, 1]
    linear, full, head, whole = found
    assert linear["name"] == "b, 1 of 48 linear attention layers: decode after 2"
    assert full["name"] == "b, 1 of 16 full attention layers: decode after 2"
    assert head["name"] == "b, the head: decode after 2"
    assert whole["name"] == (
        "b, scaled from 1 of 48 linear attention layers, 1 of 16 full attention layers and the head: "
        "decode after 2"
    )
    model = skeleton(config)
    assert whole["bytes"] == total_bytes(read_weights(model))
    assert whole["macs"] == ternary_macs(model) + head_macs(model)
    for times in (whole["seconds"], whole["limit_seconds"]):
        assert times == pytest.approx([seconds_of(model), 2 * seconds_of(model)])
    assert linear["seconds"] == pytest.approx([LINEAR, 2 * LINEAR])
    assert full["seconds"] == pytest.approx([FULL, 2 * FULL])


def test_small_layers_are_measured_in_numbers_that_no_cache_holds(clock: list[int]) -> None:
    config = presets()["mmfreelm-370m"]
    whole = scaled.measure_scaled("b", config, **AMOUNTS)["records"][-1]
    model = skeleton(config)
    assert 2 < clock[-1] < len(model.blocks)
    assert clock[-1] * total_bytes(read_weights(model)) > 24 * scaled.COLD_BYTES * 0.8
    assert whole["seconds"] == pytest.approx([seconds_of(model), 2 * seconds_of(model)])


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["qwen3_5", "gemma3_text", "hgrn_bit", "rwkv7", "hybrid"])
def test_models_of_every_kind_are_measured(name: str) -> None:
    config = {"model_type": name, **architectures()[name].tiny}
    found = scaled.measure_scaled("b", config, **AMOUNTS)
    kinds = scaled.kinds_of_layers(skeleton(config))
    # each kind, the head and the whole, for a prompt and in decoding
    assert len(found["records"]) == 2 * (len(kinds) + 2)
    heads = [record for record in found["records"] if ", the head: " in record["name"]]
    assert all(record["seconds"][0] > 0 for record in heads)


def test_short_names_of_published_shapes() -> None:
    assert full_name("bonsai-27b") == "ternary-bonsai-27b"
    assert full_name("Ternary-Bonsai-27B") == "ternary-bonsai-27b"
    # which of several is left to the user
    assert full_name("3b") == "3b"


def test_a_part_that_the_noise_swallows_still_has_a_figure() -> None:
    size, times = 100, [2.0, 2.0]
    slow = Record("b: decode after 2", 1, READ, size, size, times, times, "tokens")
    fast = replace(slow, seconds=[1.0, 3.0], limit_seconds=[1.0, 1.0])
    part = scaled.combined("part", [(1, fast), (-1, slow)])
    assert part.seconds == [1e-9, 1.0] and part.limit_seconds == [1e-9, 1e-9]
    shown = metrics([replace(part, bytes=size)])[0].to_json()
    assert shown["processes"][0]["is_counted"]
