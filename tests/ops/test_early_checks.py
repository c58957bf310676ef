"""Kernels are checked while weights load: those that the model uses, whatever happens to the checks."""

import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.evaluation.audit.first_token import first_token_texts
from mlx_mmfree.generation import generate_tokens, reader
from mlx_mmfree.hub import load_model, open_checkpoint, save_model
from mlx_mmfree.hub.checkpoint import load as opened_model
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.layers.matrix import parameters
from mlx_mmfree.models import find
from mlx_mmfree.models.parts.architecture import known_model_types
from mlx_mmfree.ops import ternary_matmul, use_backend
from mlx_mmfree.ops.backend import dispatch, launch, self_check
from tests.emulator.emulator import Emulator
from tests.evaluation.audit_models import needs_graphs

# what no emulator stands in for
LAUNCH = launch.launch

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rope_theta": 10000.0,
}
# what a chat has compiled while weights load: a second's work, at about 70 ms a text
TEXTS = {"hgrn_bit": 17, "bitnet": 11}
X, WEIGHT = mx.ones((2, 32)), mx.full((4, 2), 0x55555555, mx.uint32)


@pytest.fixture
def device(emulated: Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    """A device on which nothing was checked, and the thread that checks is waited for."""
    monkeypatch.setattr(self_check, "_checks", {})
    monkeypatch.setattr(opened_model, "on_cpu", lambda: False)
    yield emulated
    wait()


def wait() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("mlx_mmfree"):
            thread.join()


def checkpoint(folder: Path, model_type: str, config: Mapping[str, Any] = SMALL) -> Path:
    mx.random.seed(0)
    module = find(model_type)
    model = pack_linears(module.build(module.config.from_hub(config)))
    mx.eval(model.parameters())
    save_model(folder, model)
    return folder


def rows_of_checks() -> set[int]:
    names = list(self_check.checked_kernels())
    return {int(found[1]) for name in names if (found := re.search(r"rows=(\d+)", name))}


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", ["hgrn_bit", "bitnet"])
def test_a_chat_checks_what_it_uses(
    device: Emulator, model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(tmp_path / "model", model_type)
    device.records.clear()
    model = load_model(folder, dtype=mx.float16)
    wait()
    early = set(self_check.checked_kernels())
    texts = {record.kernel for record in device.records}
    assert len(texts) == TEXTS[model_type]
    traffic = [(*record.loaded.values(), *record.stored.values()) for record in device.records]
    assert sum(map(sum, traffic)) < 5_500_000
    assert rows_of_checks() == {1, 5}
    assert set(self_check.checked_kernels().values()) == {None}
    # of the dtype that the model has when it is loaded
    assert not any("x=float32" in name for name in early)
    # the emulator computes at once, which MLX does not allow while it traces
    monkeypatch.setattr(reader, "compiled", lambda function: function)
    # the last token of the prompt is read alone, and 31 of it in groups of 5
    assert len(list(generate_tokens(model, range(1, 33), max_tokens=3))) == 3
    assert set(self_check.checked_kernels()) == early
    assert {record.kernel for record in device.records} == texts


@needs_graphs
@pytest.mark.metal
@pytest.mark.parametrize("model_type", ["hgrn_bit", "bitnet", "qwen3_5_text"])
def test_a_first_token_waits_for_no_text_but_those_that_are_listed_and_used(
    emulated: Emulator, model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list is that of `mmfree doctor --model`."""
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    config = SMALL if model_type in TEXTS else find(model_type).tiny | heads
    monkeypatch.setattr(opened_model, "on_cpu", lambda: False)
    folder = checkpoint(tmp_path / "model", model_type, config)
    model = load_model(folder, dtype=mx.float16)
    wait()
    opened = opened_model.OpenedModel(open_checkpoint(folder), dtype=mx.float16).without_values()
    with monkeypatch.context() as without_a_gpu:
        without_a_gpu.setattr(launch, "launch", LAUNCH)
        listed = set().union(*first_token_texts(opened, 64))
    # a check is the only use of this one
    checks = {name for name in listed if "half_denormals" in name}
    monkeypatch.setattr(self_check, "kernel_fault", lambda *_, **__: None)
    monkeypatch.setattr(reader, "compiled", lambda function: function)
    emulated.records.clear()
    # the last token of the prompt is read alone
    prompt = [1 + n % 40 for n in range(65)]
    assert len(list(generate_tokens(model, prompt, max_tokens=2))) == 2
    assert {record.kernel for record in emulated.records} == listed - checks


@pytest.mark.sample(1, of="model_type")
@pytest.mark.parametrize("model_type", known_model_types())
@pytest.mark.parametrize("dtype", [None, mx.bfloat16])
def test_the_graphs_of_every_architecture_are_built(
    model_type: str, dtype: mx.Dtype | None, tmp_path: Path
) -> None:
    """Kernels that fail to be built would be checked at their first use alone."""
    folder = checkpoint(tmp_path / "model", model_type, find(model_type).tiny)
    opened = opened_model.OpenedModel(open_checkpoint(folder), dtype=dtype)
    opened._build_graphs()
    built = {name: array.dtype for name, array in parameters(opened.model).items()}
    loaded = parameters(opened.load())
    assert built == {name: array.dtype for name, array in loaded.items()}


@pytest.mark.metal
def test_kernels_that_read_a_cache_are_checked_for_short_texts_and_long_ones(
    emulated: Emulator, tmp_path: Path
) -> None:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    folder = checkpoint(tmp_path / "model", "llama", {**find("llama").tiny, **heads})
    opened = opened_model.OpenedModel(open_checkpoint(folder))
    with self_check.collecting() as checks:
        opened._build_graphs()
    names = [check.args[0] for check in checks]
    assert {"attention_step", "attention_step_parts"} <= set(names)


@pytest.mark.exhaustive
def test_values_do_not_depend_on_the_checks(device: Emulator, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", "hgrn_bit")
    model = load_model(folder)
    wait()
    tokens = mx.array([[3, 1, 2]])
    with use_backend("reference"):
        want = model(tokens)[0]
        mx.eval(want)
    assert mx.allclose(model(tokens)[0], want, rtol=1e-4, atol=1e-4)
    assert {array.dtype for array in (model.embed.weight, model.norm.weight)} == {mx.float32}


@pytest.mark.exhaustive
def test_a_broken_kernel_is_switched_off_while_weights_load(
    device: Emulator, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path / "model", "hgrn_bit")
    device.edit = lambda text: text.replace(
        "fma(sum, 16777216.0f, -totals[r])", "sum * 16777216.0f"
    )
    with pytest.warns(RuntimeWarning, match="bit_linear.*is switched off.*wrong values"):
        model = load_model(folder)
        wait()
    tokens = mx.array([[3, 1, 2]])
    with use_backend("reference"):
        want = model(tokens)[0]
        mx.eval(want)
    # that for a token is off already, and a prompt of three is another variant
    with pytest.warns(RuntimeWarning, match="rows=3, .*is switched off"):
        assert mx.allclose(model(tokens)[0], want, rtol=1e-4, atol=1e-4)


@pytest.mark.exhaustive
def test_a_check_that_fails_breaks_nothing(
    device: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(tmp_path / "model", "hgrn_bit")

    def fail(*arguments: Any) -> Any:
        raise KeyError("no")

    monkeypatch.setattr(self_check, "_difference", fail)
    load_model(folder)
    wait()
    assert self_check.checked_kernels() == {}
    monkeypatch.setattr(opened_model.OpenedModel, "_build_graphs", fail)
    load_model(folder)
    assert self_check.checked_kernels() == {}


def test_the_thread_does_not_outlive_the_program(
    device: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ended:
        def is_alive(self) -> bool:
            return False

    monkeypatch.setattr(self_check.threading, "main_thread", Ended)
    thread = self_check.check_early(lambda: ternary_matmul(X, WEIGHT))
    assert thread is not None
    thread.join()
    assert self_check.checked_kernels() == {}


def test_arrays_of_the_caller_stay_with_it(device: Emulator) -> None:
    # another thread cannot compute them
    lazy = mx.ones((2, 32)) * 2
    thread = self_check.check_early(lambda: ternary_matmul(lazy, WEIGHT))
    assert thread is not None
    thread.join()
    assert set(self_check.checked_kernels().values()) == {None}
    assert mx.array_equal(ternary_matmul(lazy, WEIGHT), mx.zeros((2, 4)))


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_nothing_is_checked_where_another_backend_is_forced(device: Emulator, backend: str) -> None:
    with use_backend(backend):
        assert self_check.check_early(lambda: ternary_matmul(X, WEIGHT)) is None


def test_nothing_is_built_without_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "metal_unavailable", lambda: "no Metal device")
    built: list[None] = []
    assert self_check.check_early(lambda: built.append(None)) is None
    assert not built
