"""How many of the library's kernels a decoded token and a short prompt launch on Metal."""

from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.generation.reader import fixed_state
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.models import find
from mlx_mmfree.ops import use_backend
from mlx_mmfree.ops.backend import compilation, launch, self_check
from tests.emulator.emulator import Emulator
from tests.graph import stand_in
from tests.tolerances import TOLERANCE, relative_error

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
# of a block
LAUNCHES = {
    "hgrn_bit": ["bit_linear_3", "mlgru_step", *["bit_linear_1"] * 3],
    "bitnet": ["bit_linear_3", "bit_linear_1", "bit_linear_2", "bit_linear_1"],
}
PROMPT_LAUNCHES = LAUNCHES | {
    "hgrn_bit": ["bit_linear_3", "mlgru_scan", "gated_rms_norm", *["bit_linear_1"] * 3],
}
# these come after the blocks
HEADS = {"hgrn_bit": ["bit_linear_1"], "bitnet": []}


def for_many_rows(kernels: list[str]) -> list[str]:
    """The launches for more rows than one kernel projects, of those for fewer."""
    found = []
    for name in kernels:
        is_product = name.startswith("bit_linear")
        tiles = name.replace("bit_linear", "bit_linear_tiles")
        found += ["bit_linear_codes", tiles] if is_product else [name]
    return found


def small_model(model_type: str, **sizes: int) -> Any:
    mx.random.seed(0)
    module = find(model_type)
    # a rotation must say its base
    config = SMALL | sizes | ({} if model_type == "hgrn_bit" else {"rope_theta": 500000.0})
    return pack_linears(module.build(module.config.from_hub(config)))


def assert_launches(emulated: Emulator, block: list[str], head: list[str]) -> None:
    names = [record.kernel.removeprefix("custom_kernel_") for record in emulated.records]
    expected = [*block * SMALL["num_hidden_layers"], *head]
    assert len(names) == len(expected), names
    assert all(name.startswith(kernel) for name, kernel in zip(names, expected, strict=True)), names


@pytest.mark.sample(2)
@pytest.mark.metal
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("model_type", LAUNCHES)
def test_launches_of_a_decoded_token(emulated: Emulator, model_type: str, batch: int) -> None:
    model = small_model(model_type)
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
    assert len(LAUNCHES[model_type]) <= 6
    assert_launches(emulated, LAUNCHES[model_type], HEADS[model_type])
    assert relative_error(logits, want) <= TOLERANCE[mx.float32]


@pytest.mark.exhaustive
@pytest.mark.metal
@pytest.mark.parametrize("tokens", [9, 48, 49])
@pytest.mark.parametrize("model_type", LAUNCHES)
def test_launches_of_a_prompt(emulated: Emulator, model_type: str, tokens: int) -> None:
    model = small_model(model_type)
    prompt = mx.random.randint(0, 64, (1, tokens))
    with use_backend("reference"):
        want, _ = model(prompt)
        mx.eval(want)
    mx.eval(model(prompt))
    emulated.records.clear()
    logits, _ = model(prompt)
    mx.eval(logits)
    launches = PROMPT_LAUNCHES[model_type], HEADS[model_type]
    assert_launches(emulated, *(map(for_many_rows, launches) if tokens > 48 else launches))
    assert relative_error(logits, want) <= TOLERANCE[mx.float32]


@pytest.mark.metal
@pytest.mark.parametrize("model_type", HEADS)
def test_kernels_are_checked_while_the_step_is_traced(
    emulated: Emulator, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulator computes the checks; what depends on the traced token has no values to compute."""
    model = small_model(model_type)
    with use_backend("reference"):
        _, state = model(mx.zeros((1, 9), mx.int32))
        mx.eval(state)
    state, _ = fixed_state(model, state)
    self_check.check_again()
    monkeypatch.setattr(compilation, "_CPU", mx.Device(mx.gpu))
    traced = []

    def launch_or_trace(kernel: Any, **call: Any) -> list[mx.array]:
        try:
            mx.eval(call["inputs"])
        except ValueError:
            traced.append(kernel)
            return stand_in(call["output_shapes"], call["output_dtypes"], *call["inputs"])
        return emulated.launch(kernel, **call)

    monkeypatch.setattr(launch, "launch", launch_or_trace)
    step = compilation.compiled(model.hidden)
    step(mx.zeros((1, 1), mx.int32), state)
    layers = SMALL["num_hidden_layers"]
    assert len(traced) == layers * len(LAUNCHES[model_type])
    assert emulated.records
    assert set(self_check.checked_kernels().values()) == {None}
