"""Uses ternary building blocks in a network of one's own: which half of a sequence is louder?

python examples/own_network.py [--quick]
"""

import argparse

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from mlx_mmfree import MLGRU, BitLinear, SwiGLU
from mlx_mmfree.layers import pack_linears

DIMS, LENGTH = 32, 16


class LouderHalf(nn.Module):
    """One MetaFormer block with ternary projections, and a ternary head at the last position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, DIMS)
        self.token_norm, self.channel_norm = nn.RMSNorm(DIMS), nn.RMSNorm(DIMS)
        self.token_mixer = MLGRU(DIMS, linear=BitLinear)
        self.channel_mixer = SwiGLU(DIMS, hidden_dims=64, linear=BitLinear)
        self.head = BitLinear(DIMS, 2)

    def __call__(self, x: mx.array) -> mx.array:
        x = self.embed(x)
        x = x + self.token_mixer(self.token_norm(x))[0]
        x = x + self.channel_mixer(self.channel_norm(x))
        return self.head(x[:, -1])


def batch(size: int) -> tuple[mx.array, mx.array]:
    x = mx.abs(mx.random.normal((size, LENGTH, 1)))
    first, second = mx.split(x[..., 0], 2, axis=1)
    return x, (second.sum(axis=1) > first.sum(axis=1)).astype(mx.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="train for 50 steps instead of 600")
    steps = 50 if parser.parse_args().quick else 600
    mx.random.seed(0)
    model, optimizer = LouderHalf(), optim.Adam(learning_rate=3e-3)

    def loss(model: LouderHalf, x: mx.array, y: mx.array) -> mx.array:
        return nn.losses.cross_entropy(model(x), y, reduction="mean")

    step = nn.value_and_grad(model, loss)
    for number in range(1, steps + 1):
        value, gradient = step(model, *batch(64))
        optimizer.update(model, gradient)
        mx.eval(model.parameters(), optimizer.state, value)
        if number % 50 == 0:
            print(f"step {number}: loss {value.item():.3f}")
    x, y = batch(1000)
    packed = pack_linears(model)
    accuracy = (mx.argmax(packed(x), axis=1) == y).mean().item()
    print(f"accuracy with 2-bit weights: {accuracy:.1%}")


if __name__ == "__main__":
    main()
