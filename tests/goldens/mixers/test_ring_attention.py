"""Attention of a sequence in parts: in as many processes as the file had, and step by step."""

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mmfree.ops.ring_attention import Statistics
from mlx_mmfree.token_mixers import RingAttention
from tests.goldens.mixers.files import GoldenFile, assert_close, golden
from tests.goldens.mixers.passing import apart, passing, side_by_side
from tests.token_mixers.ring import Arrays, run_group


@pytest.mark.exhaustive
@golden("ring_attention__multi_process")
def test_several_processes(file: GoldenFile, tmp_path: Path) -> None:
    inputs = {name: file.inputs[name] for name in "qkv"}
    shape = inputs["q"].shape
    heads, head_dim = shape[2:]
    widths = dict.fromkeys(("query_proj", "key_proj", "value_proj"), heads * head_dim)
    dims = sum(widths.values())
    mixer = passing(RingAttention(dims, num_heads=heads, head_dim=head_dim), widths, dims // 3)
    x = side_by_side(*inputs.values())
    arrays: Arrays = {"x": x, "cotangent": mx.ones(x.shape)}
    for name in (*widths, "output_proj"):
        arrays[f"parameters.{name}.weight"] = mixer[name].weight
    options = {"num_heads": heads, "head_dim": head_dim}
    found, _ = run_group(
        tmp_path,
        file.hyper["world_size"],
        {
            "causal": (options, arrays),
            "full": (options | {"is_causal": False}, arrays),
            # hidden keys, but queries that are no padding
            "key_mask": ({"is_causal": False}, inputs | {"valid": file.inputs["key_mask"]}),
        },
    )
    for name in ("causal", "full"):
        assert_close(apart(found[name]["y"], shape), file.out[name])
    assert_close(found["key_mask"]["y"], file.out["key_mask"])


@golden("ring_attention__step_statistics")
def test_steps(file: GoldenFile) -> None:
    size, length = file.hyper["world_size"], file.hyper["shard"]
    q, k, v = (mx.split(file.inputs[name], size, axis=2) for name in "qkv")
    for name in ("full", "causal"):
        found = [Statistics.none(part, v[0].shape[-1]) for part in q]
        for step in range(size):
            for rank in range(size):
                source = (rank - step) % size
                position = mx.arange(length)
                seen = mx.array(True)
                if name == "causal":
                    seen = source * length + position <= (rank * length + position)[:, None]
                found[rank] = found[rank].with_keys(q[rank], k[source], v[source], seen)
            for letter, field in (("m", "largest"), ("l", "total"), ("o", "values")):
                parts = [getattr(each, field) for each in found]
                want = file.aux[f"{name}_{letter}"][step]
                assert_close(mx.concatenate(parts, axis=2), want)
        assert_close(mx.concatenate([each.result for each in found], axis=2), file.out[name])
