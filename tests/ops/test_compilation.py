"""Steps are compiled without fusing, which needs a C++ compiler, with the CPU extension and without."""

import io
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mmfree.native import loader
from mlx_mmfree.ops.backend import compilation

pytestmark = pytest.mark.skipif(
    mx.default_device() != mx.Device(mx.cpu), reason="steps are compiled on a CPU alone"
)
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="without a C++ compiler nothing is fused"
)
CACHES = (loader._load, compilation._fusion_switch, compilation._can_stop_fusion)


@pytest.fixture(params=["built", "absent"])
def extension(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "absent":
        monkeypatch.setattr(loader, "PACKAGE", "_mlx_mmfree_absent")
    elif reason := loader.unavailable():
        pytest.skip(reason)
    for cached in CACHES:
        cached.cache_clear()
    yield
    monkeypatch.undo()
    for cached in CACHES:
        cached.cache_clear()


def operations(x: mx.array) -> str:
    graph = io.StringIO()
    mx.export_to_dot(graph, x)
    return graph.getvalue()


@pytest.mark.usefixtures("extension")
def test_a_step_is_traced_once_and_not_fused() -> None:
    calls = []

    def step(x: mx.array) -> mx.array:
        calls.append(x.shape)
        return mx.abs(-x) * 2 + 1

    assert compilation.can_compile()
    repeated = compilation.compiled(step)
    assert [repeated(mx.array([float(n)])).item() for n in range(3)] == [1, 3, 5]
    assert calls == [(1,)]
    assert "Compiled" not in operations(repeated(mx.array([3.0])))
    assert repeated(mx.ones((2,))).tolist() == [3, 3] and len(calls) == 2


@needs_compiler
@pytest.mark.usefixtures("extension")
def test_others_fuse_as_before() -> None:
    compilation.compiled(lambda x: x + 1)(mx.ones((1,)))
    fused = mx.compile(lambda x: mx.abs(-x) * 2 + 1)(mx.ones((1,)))
    assert "Compiled" in operations(fused)


@pytest.mark.usefixtures("extension")
def test_what_depends_on_weights_alone_is_computed_once() -> None:
    weight = mx.array([1.0, 4.0])

    def step(x: mx.array) -> mx.array:
        root = mx.sqrt(weight)
        compilation.fold(root, x * 2)
        compilation.fold(root)
        return x * root

    assert operations(step(mx.ones((2,)))).count("Sqrt") == 1
    repeated = compilation.compiled(step)
    repeated(mx.ones((2,)))
    result = repeated(mx.array([5.0, 6.0]))
    assert "Sqrt" not in operations(result) and result.tolist() == [5, 12]


@needs_compiler
@pytest.mark.usefixtures("extension")
def test_on_a_gpu_a_step_is_fused_too(
    monkeypatch: pytest.MonkeyPatch, fused: Callable[[], set[Path]]
) -> None:
    monkeypatch.setattr(compilation, "_CPU", mx.Device(mx.gpu))
    assert compilation.can_compile()
    repeated = compilation.compiled(lambda x: mx.abs(-x) * 2 + 1)
    assert "Compiled" in operations(repeated(mx.ones((1,))))
    assert repeated(mx.array([-3.0])).item() == 7
    # which is where others could put theirs
    assert fused()


@needs_compiler
@pytest.mark.usefixtures("extension")
def test_a_switch_that_does_nothing_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "_fusion_switch", lambda: lambda is_on: None)
    assert not compilation.can_compile()


@pytest.fixture
def disabled() -> Iterator[None]:
    mx.disable_compile()
    yield
    mx.enable_compile()


@needs_compiler
@pytest.mark.usefixtures("extension", "disabled")
def test_compilation_that_a_user_turned_off_stays_off() -> None:
    assert compilation.compiled(lambda x: mx.abs(-x))(mx.array(-1)).item() == 1
    assert not compilation.can_compile()
    assert "Compiled" not in operations(mx.compile(lambda x: mx.abs(-x) + 1)(mx.ones((1,))))


@needs_compiler
@pytest.mark.usefixtures("extension")
def test_fusion_that_somebody_turned_off_stays_off() -> None:
    compilation._fusion_switch()(False)
    compilation.compiled(lambda x: x + 1)(mx.ones((1,)))
    fused = mx.compile(lambda x: mx.abs(-x) * 2 + 1)(mx.ones((1,)))
    compilation._fusion_switch()(True)
    assert "Compiled" not in operations(fused)


@pytest.mark.usefixtures("extension")
@needs_compiler
def test_what_is_traced_again_is_not_fused() -> None:
    """Other trees and dtypes after the first argument are traced too."""

    def step(x: mx.array, others: dict[str, mx.array]) -> mx.array:
        return sum((mx.abs(-other) + 1 for other in others.values()), x)

    repeated = compilation.compiled(step)
    x = mx.array(1.0)
    for others in ({"a": x}, {"a": x.astype(mx.int32)}, {"a": x, "b": x}):
        result = repeated(x, others)
        assert "Compiled" not in operations(result)
        assert result.item() == step(x, others).item()
    # and fusing is on again
    assert compilation._fuses()


def test_an_error_in_the_middle_of_a_trace_leaves_the_random_numbers_as_they_were() -> None:
    def step(x: mx.array) -> mx.array:
        mx.random.normal(x.shape)
        raise KeyError

    mx.random.seed(3)
    with pytest.raises(KeyError):
        compilation.compiled(step, is_random=True)(mx.ones((2,)))
    drawn = mx.random.normal((2,))
    mx.random.seed(3)
    assert mx.array_equal(drawn, mx.random.normal((2,)))
