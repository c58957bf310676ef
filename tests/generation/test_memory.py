"""Memory needs and limits, with made-up devices and setters."""

import gc
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree import native
from mlx_mmfree.errors import MMFreeError
from mlx_mmfree.evaluation.audit.skeleton import presets, skeleton
from mlx_mmfree.generation import (
    MemoryNeed,
    check_memory,
    memory_limits,
    memory_need,
    prefill,
    with_key_values,
)
from mlx_mmfree.layers import PackedLinear, pack_linears
from mlx_mmfree.layers.matrix import parameters
from mlx_mmfree.models import Decoder, find, hgrn_bit, llama
from mlx_mmfree.models.parts.ternary_linears import TernaryLinears
from mlx_mmfree.ops.backend.dispatch import use_backend
from mlx_mmfree.platform.device import DeviceInfo
from tests.backends import change_backend

GB = 10**9
MAC = DeviceInfo("Apple M2", "metal", 16 * GB, 11 * GB, None)
SERVER = DeviceInfo("Some CPU", "cpu", 64 * GB, None, 20 * GB)


def need(weights: float, activations: float = 0.0) -> MemoryNeed:
    return MemoryNeed(int(weights * GB), GB // 100, int(activations * GB))


def wide_model() -> Decoder:
    config = hgrn_bit.Config(
        vocab_size=300, hidden_size=256, num_hidden_layers=2, intermediate_size=704
    )
    return pack_linears(hgrn_bit.build(config))


@pytest.mark.parametrize("device", [MAC, SERVER])
def test_what_fits_gives_no_line(device: DeviceInfo) -> None:
    assert check_memory(need(5, 2), device) is None


@pytest.mark.parametrize(
    ("device", "offer"),
    [(MAC, "recommends at most 11 GB"), (SERVER, "has free 20 GB")],
)
def test_what_may_not_fit_is_stated(device: DeviceInfo, offer: str) -> None:
    line = check_memory(need(10, 12), device)
    assert line is not None
    assert "needs 22 GB (weights 10 GB, state 0.01 GB" in line
    assert f"{device.name} {offer}" in line
    assert "\n" not in line


def test_the_machine_itself_is_the_offer_where_no_more_is_known() -> None:
    device = replace(SERVER, available_bytes=None)
    assert check_memory(need(60), device) is None
    assert "has 64 GB" in str(check_memory(need(60, 5), device))


@pytest.mark.parametrize("device", [MAC, SERVER])
def test_weights_beyond_all_memory_are_refused(device: DeviceInfo) -> None:
    with pytest.raises(MMFreeError, match=f"weights need 70 GB but {device.name} has"):
        check_memory(need(70), device)


def test_the_running_device_is_the_default() -> None:
    assert check_memory(MemoryNeed(1, 1, 1)) is None


def test_nothing_is_computed_to_know_the_need() -> None:
    mx.synchronize()
    before = mx.get_active_memory()
    config = hgrn_bit.Config(
        vocab_size=32000, hidden_size=2560, num_hidden_layers=32, intermediate_size=6912
    )
    model = hgrn_bit.build(config)
    found = memory_need(model, 700_000_000)
    assert found.state_bytes == 32 * 2560 * 4
    assert 0.5e9 < found.activations_bytes < 1e9
    assert mx.get_active_memory() - before < 10_000_000


@pytest.mark.exhaustive
@pytest.mark.parametrize("batch_size", [1, 4])
def test_need_is_near_the_measured_peak(batch_size: int) -> None:
    model = wide_model()
    measured = peak_bytes(model, 256, batch_size=batch_size)
    found = memory_need(model, 0, batch_size=batch_size, prefill_step_size=256)
    assert 0.5 * measured < found.state_bytes + found.activations_bytes < 2.5 * measured


def experts(**sizes: int) -> Decoder:
    """One layer of Maple whose experts are packed."""
    maple = find("maple")
    one = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "vocab_size": 300}
    config = maple.config.from_hub({**maple.tiny, **one, **sizes})
    model: Decoder = maple.build(config)
    mixer = model.blocks[0].channel_mixer
    for name in ("gate_proj", "up_proj", "down_proj"):
        rows, inputs = mixer[name].weight.shape
        mixer[name] = PackedLinear(inputs, rows, has_row_scales=True)
    mx.eval(model.parameters())
    return model


def test_experts_that_a_position_is_not_given_take_nothing() -> None:
    few, many = (
        experts(hidden_size=64, moe_intermediate_size=32, num_experts=count) for count in (8, 64)
    )
    needs = [memory_need(model, 0, prefill_step_size=32) for model in (few, many)]
    assert needs[0].activations_bytes == needs[1].activations_bytes


@pytest.mark.slow
def test_the_need_of_a_layer_of_the_published_mixture_is_within_a_tenth() -> None:
    sizes = {"hidden_size": 2048, "moe_intermediate_size": 512, "num_experts": 256}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128}
    model = experts(**sizes, **heads, num_experts_per_tok=8)
    weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    measured = weights + peak_bytes(model, 64)
    found = memory_need(model, weights, prefill_step_size=64, context_length=64)
    assert abs(found.total_bytes / measured - 1) <= 0.1


def ternary_transformer() -> Decoder:
    linears = TernaryLinears()
    return pack_linears(llama.build(llama.Config(300, 256, 2, 704, 4, 1, 64, linears=linears)))


def peak_bytes(model: Decoder, length: int, read: int = 0, batch_size: int = 1) -> int:
    """The most memory of a chunk after `read` tokens."""
    mx.eval(model.parameters())
    before = mx.zeros((batch_size, read), mx.int32)
    tokens = mx.zeros((batch_size, length), mx.int32)
    peaks = []
    for _ in range(2):
        state = prefill(model, before, model.init_state(batch_size))
        mx.eval(tokens, state)
        gc.collect()
        mx.synchronize()
        mx.clear_cache()
        active = mx.get_active_memory()
        mx.reset_peak_memory()
        # memory is taken when work is queued and given back when it is done: the most is taken where
        # the queue fills up while something slow runs, however busy the machine is
        mx.async_eval(mx.broadcast_to(mx.ones((1,)), (2**25,)).sum())
        prefill(model, tokens, state, step_size=length)
        peaks.append(mx.get_peak_memory() - active)
    return max(peaks)


@pytest.mark.exhaustive
@pytest.mark.parametrize("build", [wide_model, ternary_transformer])
def test_unpacked_copies_of_the_reference_are_counted(build: Callable[[], Decoder]) -> None:
    model = build()
    with use_backend("reference"):
        measured = peak_bytes(model, 4)
        found = memory_need(model, 0, prefill_step_size=4, context_length=4)
    assert 0.6 * measured < found.state_bytes + found.activations_bytes < 1.7 * measured


def unpacked_bytes(model: Decoder) -> int:
    """The memory that a backend that unpacks matrices takes beyond one that does not."""
    needs = []
    for backend in ("chunked", "reference"):
        with use_backend(backend):
            needs.append(memory_need(model, 0, prefill_step_size=4).activations_bytes)
    return needs[1] - needs[0]


def test_matrices_that_share_an_input_are_counted_together() -> None:
    model = wide_model()
    assert unpacked_bytes(model) == 1.5 * 4 * 256 * (704 + 704)
    # the four square matrices of MLGRU are fewer numbers than gate and up
    for block in model.blocks:
        block.channel_mixer = block.token_mixer
    assert unpacked_bytes(model) == 1.5 * 4 * 256 * (4 * 256)


@pytest.mark.exhaustive
@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize(("length", "read"), [(256, 0), (64, 1024)])
def test_attention_to_long_texts_is_counted(
    length: int, read: int, has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kernel:
        change_backend(monkeypatch, "attention", "native", unsupported=lambda *_: "it is left out")
    elif reason := native.unavailable():
        pytest.skip(reason)
    model = ternary_transformer()
    measured = peak_bytes(model, length, read)
    found = memory_need(model, 0, prefill_step_size=length, context_length=length + read)
    short = memory_need(model, 0, prefill_step_size=length)
    assert 0.5 * measured < found.state_bytes + found.activations_bytes < 2.5 * measured
    is_longer = read > 0 and not has_kernel
    assert (found.activations_bytes > short.activations_bytes) == is_longer
    limited = with_key_values(model, max_kv_size=64)
    need = memory_need(limited, 0, prefill_step_size=length, context_length=length + read)
    assert (need.activations_bytes < found.activations_bytes) == is_longer


class Limit:
    """Stands for one of MLX's limits."""

    def __init__(self, value: int):
        self.value = value
        self.seen: list[int] = []

    def __call__(self, value: int) -> int:
        old, self.value = self.value, value
        self.seen.append(value)
        return old


@pytest.fixture
def limits() -> dict[str, Limit]:
    return {"set_wired": Limit(1), "set_cache": Limit(2), "set_memory": Limit(3)}


def values(limits: dict[str, Limit]) -> list[int]:
    return [limit.value for limit in limits.values()]


def test_limits_are_the_model_plus_the_margin(limits: dict[str, Limit]) -> None:
    with memory_limits(3 * GB, margin_bytes=2 * GB, device=MAC, **limits):
        assert values(limits) == [5 * GB, 5 * GB, 3]
    assert values(limits) == [1, 2, 3]
    assert limits["set_memory"].seen == []


def test_wired_limit_stays_within_the_recommendation(limits: dict[str, Limit]) -> None:
    with memory_limits(10 * GB, device=MAC, **limits):
        assert limits["set_wired"].value == MAC.working_set_bytes


def test_limits_can_be_given(limits: dict[str, Limit]) -> None:
    given = {"wired_bytes": 0, "cache_bytes": 7, "memory_bytes": 9}
    with memory_limits(GB, device=MAC, **given, **limits):
        assert values(limits) == [0, 7, 9]
    assert values(limits) == [1, 2, 3]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_limits_are_restored_after_an_error(
    limits: dict[str, Limit], error: type[BaseException]
) -> None:
    with pytest.raises(error), memory_limits(GB, memory_bytes=9, device=SERVER, **limits):
        raise error
    assert values(limits) == [1, 2, 3]


def test_limits_are_restored_if_one_cannot_be_set(limits: dict[str, Limit]) -> None:
    def refuse(size: int) -> int:
        raise ValueError("above the system's limit")

    setters: dict[str, Callable[[int], int]] = {**limits, "set_wired": refuse}
    with pytest.raises(ValueError, match="above"), memory_limits(GB, device=MAC, **setters):
        pass
    assert values(limits) == [1, 2, 3]


def test_mlx_itself_is_restored() -> None:
    before = mx.set_cache_limit(123_456_789)
    with memory_limits(GB, margin_bytes=0):
        assert mx.set_cache_limit(GB) == GB
    assert mx.set_cache_limit(before) == 123_456_789


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"margin_bytes": -1}, "'margin_bytes' must not be negative"),
        ({"memory_bytes": -1}, "'memory_bytes' must not be negative"),
        ({"wired_bytes": 12 * GB}, "'wired_bytes' must be at most 11000000000"),
    ],
)
def test_bad_sizes_are_refused(
    given: dict[str, int], message: str, limits: dict[str, Limit]
) -> None:
    with pytest.raises(ValueError, match=message), memory_limits(GB, device=MAC, **given, **limits):
        pass
    assert values(limits) == [1, 2, 3]


def test_ternary_bonsai_27b_fits_a_mac_of_16_gb() -> None:
    model = skeleton(presets()["ternary-bonsai-27b"])
    weights = sum(array.nbytes for array in parameters(model).values())
    assert 7.5e9 < weights < 7.6e9
    need = memory_need(model, weights, prefill_step_size=512, context_length=8192)
    assert need.total_bytes < 11 * GB
    # of each token in a full layer, keys and values; of a linear layer, a state of constant size
    token = 16 * 2 * 4 * 256 * 2
    constant = 48 * (48 * 128 * 128 * 4 + 3 * 10240 * 2)
    shorter = memory_need(model, weights, prefill_step_size=512, context_length=4096)
    # capacity grows in steps, and positions take a little
    grown = need.state_bytes - shorter.state_bytes
    assert grown == pytest.approx(4096 * token, rel=0.01)
    assert need.state_bytes == pytest.approx(8192 * token + constant, rel=0.01)
