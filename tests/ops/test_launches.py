"""How many of the library's kernels a decoded token launches on Metal."""

from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.layers import pack_linears
from mlx_mmfree.models import find
from mlx_mmfree.ops import use_backend
from tests.emulator.emulator import Emulator
from tests.tolerances import TOLERANCE, relative_error

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
}
# those of a block and those behind the blocks
LAUNCHES = {
    "hgrn_bit": (["bit_linear_3", "mlgru_step", *["bit_linear_1"] * 3], ["bit_linear_1"]),
    "bitnet": (["bit_linear_3", "bit_linear_1", "bit_linear_2", "bit_linear_1"], []),
}


@pytest.mark.metal
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("model_type", LAUNCHES)
def test_launches_of_a_decoded_token(emulated: Emulator, model_type: str, batch: int) -> None:
    mx.random.seed(0)
    module = find(model_type)
    model = pack_linears(module.build(module.config.from_hub(SMALL)))
    prompt = mx.random.randint(0, 64, (batch, 9))
    with use_backend("reference"):
        _, state = model(prompt)
        want, _ = model(prompt[:, -1:], state)
        mx.eval(want, state)
    # all kernels are checked at their first use
    mx.eval(model(prompt[:, -1:], state))
    emulated.records.clear()
    logits, state = model(prompt[:, -1:], state)
    mx.eval(logits, state)
    block, behind = LAUNCHES[model_type]
    assert len(block) <= 6
    names = [record.kernel.removeprefix("custom_kernel_") for record in emulated.records]
    expected = [*block * SMALL["num_hidden_layers"], *behind]
    assert len(names) == len(expected), names
    assert all(name.startswith(kernel) for name, kernel in zip(names, expected, strict=True)), names
    assert relative_error(logits, want) <= TOLERANCE[mx.float32]
