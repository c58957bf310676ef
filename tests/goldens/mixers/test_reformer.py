"""Attention within buckets of a hash, in both public conventions, with the rotations of the files."""

import mlx.core as mx
import mlx.nn as nn

from mlx_mmfree.layers import ChannelMixer
from mlx_mmfree.layers.context import Context
from mlx_mmfree.layers.mixer import TokenMixer
from mlx_mmfree.models.parts.reversible import ReversibleBlock, ReversibleSequence
from mlx_mmfree.token_mixers import Reformer
from tests.goldens.mixers.files import GoldenFile, assert_close, fill, golden
from tests.goldens.mixers.passing import passing


def _check(mixer: Reformer, file: GoldenFile, x: mx.array) -> None:
    rotations, want = file.weights["rotations"], file.out["y"]
    y, _ = mixer(x, rotations=rotations)
    assert_close(y[..., : want.shape[-1]], want)
    buckets = mixer.buckets(x, rotations)
    count = next(file.hyper[name] for name in ("n_buckets", "num_buckets") if name in file.hyper)
    offsets = mx.arange(buckets.shape[2])[:, None] * count
    assert mx.array_equal(
        (buckets + offsets).reshape(file.out["buckets"].shape), file.out["buckets"]
    )


@golden("reformer__lsh_causal", "reformer__lsh_noncausal")
def test_reformer_pytorch(file: GoldenFile) -> None:
    hyper, (qk, v) = file.hyper, (file.inputs[name] for name in ("qk", "v"))
    dims = qk.shape[-1]
    mixer = Reformer(
        2 * dims,
        chunk_size=hyper["bucket_size"],
        num_rounds=hyper["n_hashes"],
        num_buckets=hyper["n_buckets"],
        convention="reformer_pytorch",
        num_heads=1,
        head_dim=dims,
        is_causal=hyper["causal"],
    )
    passing(mixer, {"query_key_proj": dims, "value_proj": dims}, dims)
    _check(mixer, file, mx.concatenate([qk, v], axis=-1))


@golden("reformer__hf_lsh_layer_causal", "reformer__hf_lsh_layer_noncausal")
def test_transformers(file: GoldenFile) -> None:
    hyper = file.hyper
    mixer = Reformer(
        hyper["hidden"],
        chunk_size=hyper["chunk_length"],
        num_rounds=hyper["num_hashes"],
        num_buckets=hyper["num_buckets"],
        num_heads=hyper["heads"],
        head_dim=hyper["head_dim"],
        is_causal=hyper["causal"],
    )
    fill(mixer, file.weights, {"query_key_proj": "query_key", "value_proj": "value"})
    width = hyper["heads"] * hyper["head_dim"]
    mixer.output_proj = nn.Linear(width, width, bias=False)
    mixer.output_proj.weight = mx.eye(width)
    _check(mixer, file, file.inputs["x"])


class _Tokens(TokenMixer):
    """The map of the file in place of a token mixer."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.linear = linear

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> tuple[()]:
        return ()

    def mix(self, x: mx.array, state: object, context: Context) -> tuple[mx.array, object]:
        return mx.tanh(self.linear(x)), ()


class _Channels(ChannelMixer):
    """The map of the file in place of a channel mixer."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.linear = linear

    def mix(self, x: mx.array) -> mx.array:
        return mx.tanh(self.linear(x))


@golden("reformer__reversible_residual")
def test_reversible_residual(file: GoldenFile) -> None:
    dims, count = file.hyper["dim"], file.hyper["blocks"]
    blocks = []
    for n in range(count):
        linears = {name: nn.Linear(dims, dims) for name in "fg"}
        fill(linears, file.weights, {name: f"blocks.{n}.{name}.net.f.0" for name in linears})
        parts = _Tokens(linears["f"]), _Channels(linears["g"])
        blocks.append(ReversibleBlock(dims, *parts, norm=None))
    assert_close(ReversibleSequence(blocks)(file.inputs["x"]), file.out["y"])
