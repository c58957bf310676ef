"""Ours or MLX's is chosen by timing, once for a class of tasks. A clock of the tests tells the times."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.errors import UsageError
from mlx_mmfree.ops import Projection, bit_linear, pack_ternary, ternary_matmul
from mlx_mmfree.ops.backend import choice, dispatch, launch, self_check, stored_results
from mlx_mmfree.ops.ternary_matmul.metal import own_way, way_of_product
from tests.emulator.emulator import Emulator
from tests.graph import stand_in
from tests.ops.kernel_checks import check_code_sums, check_fused_codes, check_fused_sums
from tests.ops.test_launches import small_model
from tests.tolerances import TOLERANCE, relative_error

X = mx.ones((2,))
WAYS = ("first", "second")


class Clock:
    """Each reading comes later by what the way takes that was run last.

    Attributes:
        costs: The seconds that each way takes; others take one.
        runs: The names of the ways, in the order in which they ran.
    """

    def __init__(self) -> None:
        self.costs: dict[str, float] = {}
        self.runs: list[str] = []
        self.now = 0.0

    def run(self, name: str) -> mx.array:
        self.runs.append(name)
        return X

    def __call__(self) -> float:
        self.now += self.costs.get(self.runs[-1], 1.0)
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Clock]:
    """Time as the test wants it, and a folder in which choices are stored."""
    monkeypatch.setenv("MLX_MMFREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(choice.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(stored_results, "_sections", {})
    monkeypatch.setattr(choice, "_chosen", {})
    made = Clock()
    monkeypatch.setattr(choice, "_clock", made)
    yield made


def choose(
    clock: Clock, x: mx.array = X, rows: int = 1, run: Any = None, must_agree: bool = True
) -> str:
    task = {"rows": rows}
    return choice.choose("product", WAYS, run or clock.run, x, task, must_agree=must_agree)


def start_process() -> None:
    choice._chosen.clear()
    stored_results._sections.clear()


def test_the_faster_is_chosen_once(clock: Clock) -> None:
    clock.costs = {"first": 3.0, "second": 1.0}
    assert choose(clock) == "second"
    assert set(clock.runs) == set(WAYS)
    clock.runs.clear()
    assert choose(clock) == "second"
    start_process()
    assert choose(clock) == "second"
    assert not clock.runs
    stored = {"chosen": "second", "seconds": clock.costs}
    assert choice.stored_choices() == {"product(rows=1)": stored}


def test_each_class_is_timed(clock: Clock) -> None:
    clock.costs = {"second": 0.5}
    assert choose(clock) == "second"
    clock.costs = {"first": 0.5}
    assert choose(clock, rows=2) == "first"
    assert choose(clock) == "second"


def test_what_is_hardly_faster_is_not_chosen(clock: Clock) -> None:
    clock.costs = {"second": 0.97}
    assert choose(clock) == "first"


def test_short_runs_are_repeated(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "BUDGET", 1.0)
    clock.costs = {"first": 0.25, "second": 2.0}
    assert choose(clock) == "first"
    # the results are compared; then by turns one is timed, and as many as fit
    assert clock.runs == ["first", "second"] + (["first"] * (1 + 4) + ["second"]) * choice.ROUNDS
    [found] = choice.stored_choices().values()
    assert found["seconds"] == {"first": 0.25 / 4, "second": 2.0}


def way_for(clock: Clock, rows: int, mlx_is_exact: bool = True) -> str:
    shape = (rows, 64, 64)
    return way_of_product(
        *("product", clock.run, lambda way: None, X, shape, {}),
        mlx_is_exact=mlx_is_exact,
        must_agree=True,
    )


@pytest.mark.parametrize("name", choice.NAMES)
def test_nothing_is_timed_where_one_is_forced(
    clock: Clock, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_MMFREE_PRODUCT", name)
    want = "groups" if name == choice.DEFAULT else name
    assert way_for(clock, 20) == want
    assert way_for(clock, 20, mlx_is_exact=False) == ("groups" if name == "mlx" else want)
    with choice.use("mlx"):
        assert way_for(clock, 1) == "mlx"
    with choice.use("of the CPU"):
        assert way_for(clock, 100) == "tiles"
    assert not clock.runs
    assert choice.stored_choices() == {}


def test_an_unknown_name_is_the_users_mistake(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_MMFREE_PRODUCT", "fastest")
    with pytest.raises(UsageError, match=r"must be one of default, groups, .* or unset it"):
        way_for(clock, 20)


@pytest.mark.parametrize(("rows", "mlx_is_exact"), [(8, True), (9, False), (512, False)])
def test_nothing_is_timed_where_ours_computes(clock: Clock, rows: int, mlx_is_exact: bool) -> None:
    assert way_for(clock, rows, mlx_is_exact) == ("groups" if rows < 10 else "tiles")
    assert not clock.runs


@pytest.mark.parametrize(
    ("chip", "few", "many"),
    [
        ("Apple M4 Max", "groups", "tiles"),
        ("Apple M5", "groups", "mlx"),
        ("Apple M10 Pro", "groups", "mlx"),
        ("cpu", "groups", "tiles"),
    ],
)
def test_the_default_follows_the_chip(
    chip: str, few: str, many: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_results, "device_name", lambda: chip)
    with choice.untimed():
        assert (way_for(clock, 48), way_for(clock, 49)) == (few, many)
        assert way_for(clock, 49, mlx_is_exact=False) == "tiles"
    # hardly faster
    clock.costs = {"mlx": 0.97, "tiles": 0.98}
    assert way_for(clock, 49) == many


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("transform", [mx.compile, mx.vmap])
def test_nothing_is_timed_while_a_function_is_traced(clock: Clock, transform: Any) -> None:
    clock.costs = {"second": 0.5}
    found = []
    transform(lambda x: found.append(choose(clock, x)) or x)(X)
    assert set(found) == {"first"}
    assert not clock.runs
    assert choose(clock) == "second"
    found.clear()
    transform(lambda x: found.append(choose(clock, x)) or x + 1)(X)
    assert set(found) == {"second"}


def test_nothing_is_timed_while_texts_are_recorded(clock: Clock) -> None:
    with launch.recording():
        assert way_for(clock, 100) == "tiles"
    assert not clock.runs


@pytest.mark.parametrize("failure", [RuntimeError, ValueError, MemoryError])
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("runs", [0, 2])
def test_beside_what_fails_the_default_computes(
    clock: Clock, failure: type[Exception], name: str, runs: int
) -> None:
    def run(way: str) -> mx.array:
        if way == name and clock.runs.count(name) == runs:
            raise failure("no")
        return clock.run(way)

    clock.costs = {"second": 0.1}
    assert choose(clock, run=run) == "first"
    # the next process tries again
    assert choice.stored_choices() == {}


def test_results_that_differ_are_left_out(clock: Clock) -> None:
    clock.costs = {"second": 0.1}
    bad = mx.array([float("nan"), 1])

    def run(name: str) -> mx.array:
        clock.run(name)
        return bad + (name == "second")

    assert choose(clock, run=run) == "first"
    assert choose(clock, run=run, rows=2, must_agree=False) == "second"


@pytest.mark.parametrize("content", [b'"second"', b"{}", b'{"chosen": 3}', b'{"chosen": "third"}'])
def test_a_damaged_choice_is_made_again(clock: Clock, content: bytes, tmp_path: Path) -> None:
    clock.costs = {"second": 0.5}
    choose(clock)
    [file] = (tmp_path / "cache" / "kernel_checks").iterdir()
    file.write_bytes(b'{"choices": {"product(rows=1)": ' + content + b"}}")
    start_process()
    clock.runs.clear()
    assert choose(clock) == "second"
    assert clock.runs


def test_choices_outlast_a_new_check(clock: Clock) -> None:
    clock.costs = {"second": 0.5}
    choose(clock)
    self_check.check_again()
    clock.runs.clear()
    assert choose(clock) == "second"
    assert not clock.runs


@pytest.mark.parametrize(
    ("rows", "dims", "outputs", "way"),
    [
        (1, 2560, 256, "groups"),
        (48, 2560, 256, "groups"),
        (49, 2560, 256, "split"),
        (64, 11_008, 512, "split"),
        # 127 and 128 tiles
        (64, 512, 127 * 64, "split"),
        (64, 512, 127 * 64 + 1, "tiles"),
        (64, 511, 256, "tiles"),
        # 32 tiles for each 64 rows
        (192, 2560, 2048, "split"),
        (193, 2560, 2048, "tiles"),
        (8128, 2560, 1, "split"),
        (8129, 2560, 1, "tiles"),
    ],
)
def test_which_of_ours_computes(rows: int, dims: int, outputs: int, way: str) -> None:
    assert own_way(rows, dims, outputs) == way


@pytest.mark.exhaustive
@pytest.mark.metal
@pytest.mark.usefixtures("metal")
@pytest.mark.parametrize("name", choice.NAMES[1:])
@pytest.mark.parametrize(("rows", "dims"), [(1, 64), (20, 100), (50, 1100)])
def test_all_give_the_same_sums_of_codes(name: str, rows: int, dims: int) -> None:
    with choice.use(name):
        check_code_sums(rows, dims, 33, mx.float32)
        check_fused_sums(rows, dims, (33, 8), mx.float16)


@pytest.mark.sample(2)
@pytest.mark.metal
@pytest.mark.usefixtures("metal")
@pytest.mark.parametrize("name", choice.NAMES[1:])
def test_all_quantise_alike(name: str) -> None:
    with choice.use(name):
        check_fused_codes(
            20, 100, mx.float32, gate="silu", norm_eps=1e-2, eps=1e-2, rounding="half_away"
        )


@pytest.fixture
def timed(emulated: Emulator, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The emulator, with a clock that knows which kernel was launched last."""
    monkeypatch.setattr(self_check, "_checks", {})
    emulate = emulated.launch

    def launch_kernel(kernel: Any, **call: Any) -> list[mx.array]:
        results = emulate(kernel, **call)
        name = emulated.records[-1].kernel.removeprefix("custom_kernel_").split("__")[0]
        parts = dict(call.get("template", ())).get("PARTS", 1)
        clock.run(f"{name}_split" if parts > 1 else name)
        return results

    def multiply(*arrays: mx.array, **options: Any) -> mx.array:
        clock.run("mlx")
        return quantized_matmul(*arrays, **options)

    quantized_matmul = mx.quantized_matmul
    monkeypatch.setattr(launch, "launch", launch_kernel)
    monkeypatch.setattr(mx, "quantized_matmul", multiply)
    return clock


TRITS = mx.arange(40 * 32).reshape(40, 32) % 3 - 1
WEIGHT = pack_ternary(TRITS)


def codes(rows: int) -> mx.array:
    return mx.arange(rows * 32).reshape(rows, 32).astype(mx.float32) % 255 - 127


@pytest.mark.parametrize(
    ("costs", "kernel"), [({}, "ternary_matmul_decode"), ({"mlx": 0.5}, "mlx")]
)
def test_ternary_matmul_takes_the_faster(timed: Clock, costs: Any, kernel: str) -> None:
    timed.costs = costs
    x = codes(40)
    want = x @ TRITS.T.astype(mx.float32)
    assert mx.array_equal(ternary_matmul(x, WEIGHT, codes=True), want)
    assert set(timed.runs) == {"ternary_matmul_decode", "mlx"}
    timed.runs.clear()
    # of the same class
    assert mx.array_equal(ternary_matmul(x[:38], WEIGHT, codes=True), want[:38])
    assert timed.runs == [kernel]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("costs", "rows", "kernels"),
    [
        ({}, 20, ["bit_linear_1"]),
        ({}, 30, ["bit_linear_codes", "bit_linear_tiles_1"]),
        ({"mlx": 0.5}, 30, ["rms_norm_quantize", "mlx"]),
    ],
)
def test_bit_linear_takes_the_faster(
    timed: Clock, costs: Any, rows: int, kernels: list[str]
) -> None:
    timed.costs = costs
    x = codes(2 * rows).reshape(2, rows, 32)
    projection = Projection(WEIGHT, mx.array([0.5]))
    residual = mx.ones((2, rows, 40))
    with dispatch.use_backend("reference"):
        want = bit_linear(x, [projection], residual=residual)
    assert mx.allclose(bit_linear(x, [projection], residual=residual), want, rtol=1e-5)
    assert "mlx" in timed.runs
    assert len(choice.stored_choices()) == 1
    timed.runs.clear()
    assert mx.allclose(bit_linear(x, [projection], residual=residual), want, rtol=1e-5)
    assert timed.runs == kernels


def test_few_tiles_with_many_inputs_are_split(timed: Clock) -> None:
    x, trits = mx.tile(codes(50), (1, 16)), mx.tile(TRITS, (1, 16))
    x[:, 5] = 127
    weight, want = pack_ternary(trits), x @ trits.T.astype(mx.float32)
    for _ in range(2):
        timed.runs.clear()
        assert mx.array_equal(ternary_matmul(x, weight, codes=True), want)
        # whose scale is 1
        got = bit_linear(x, [Projection(weight, mx.array([0.5]))])
        assert mx.array_equal(got, want / 2)
    assert timed.runs == [
        "ternary_matmul_prefill_split",
        "bit_linear_codes",
        "bit_linear_tiles_1_split",
    ]
    for found in choice.stored_choices().values():
        assert found["chosen"] == "split"
        assert set(found["seconds"]) == {"split", "mlx"}


def test_floats_are_not_multiplied_as_less_than_float32(timed: Clock) -> None:
    ternary_matmul(codes(40) / 7, WEIGHT)
    bit_linear(codes(40), [Projection(WEIGHT, mx.array([0.5]))], quantize=False)
    assert choice.stored_choices() == {}
    assert "mlx" not in timed.runs
    ternary_matmul(codes(40).astype(mx.float16), WEIGHT)
    assert "mlx" in timed.runs


def test_more_codes_than_have_exact_sums_are_not_given_to_mlx(timed: Clock) -> None:
    dims = 2**16 + 32
    weight = mx.full((1, dims // 16), 0x55555555, mx.uint32)
    ternary_matmul(mx.zeros((9, dims)), weight, codes=True)
    assert set(timed.runs) == {"ternary_matmul_decode"}
    ternary_matmul(mx.zeros((9, 32)), weight[:, :2], codes=True)
    assert "mlx" in timed.runs


def test_a_choice_that_does_not_run_gives_way_to_the_default(
    timed: Clock, emulated: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    # where MLX's product is the default
    monkeypatch.setattr(stored_results, "device_name", lambda: "Apple M5")
    timed.costs = {"ternary_matmul_prefill": 0.5}
    x = codes(50)
    want = x @ TRITS.T.astype(mx.float32)
    ternary_matmul(x, WEIGHT, codes=True)
    start_process()
    self_check.check_again()
    emulated.edit = lambda text: text.replace("simdgroup_store(", "if (false) simdgroup_store(")
    timed.runs.clear()
    with pytest.warns(RuntimeWarning, match="ternary_matmul_prefill.*is switched off"):
        assert mx.array_equal(ternary_matmul(x, WEIGHT, codes=True), want)
    assert timed.runs[-1] == "mlx"


def test_an_unsound_kernel_is_not_timed(timed: Clock, emulated: Emulator) -> None:
    emulated.edit = lambda text: text.replace("simdgroup_store(", "if (false) simdgroup_store(")
    x = codes(50)
    with pytest.warns(RuntimeWarning, match="ternary_matmul_prefill.*is switched off"):
        got = ternary_matmul(x, WEIGHT, codes=True)
    # by another backend
    assert mx.array_equal(got, x @ TRITS.T.astype(mx.float32))
    assert choice.stored_choices() == {}


@pytest.mark.parametrize("kernel", ["ternary_matmul_prefill", "mlx"])
def test_gradients_do_not_depend_on_the_choice(timed: Clock, kernel: str) -> None:
    timed.costs = {kernel: 0.5}
    weights = mx.arange(40).astype(mx.float32)
    gradient = mx.grad(lambda x: (ternary_matmul(x, WEIGHT, codes=True) * weights).sum())(codes(50))
    want = mx.broadcast_to(weights @ TRITS.astype(mx.float32), (50, 32))
    assert mx.array_equal(gradient, want)
    [found] = choice.stored_choices().values()
    assert found["chosen"] == {"ternary_matmul_prefill": "tiles"}.get(kernel, "mlx")


# of a model of one layer in float16; a prompt within a group of rows, one of tiles, and a token
FIRST_CHAT = {("hgrn_bit", 40): 15, ("bitnet", 40): 10, ("hgrn_bit", 300): 17, ("bitnet", 300): 11}


def run_both(name: str, ways: Any, run: Any, must_agree: bool) -> str:
    mx.eval([run(way) for way in ways])
    return str(ways[0])


@pytest.mark.sample(2)
@pytest.mark.parametrize(("model_type", "length"), FIRST_CHAT)
def test_texts_that_a_first_chat_compiles(
    model_type: str, length: int, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is checked, timed and run. Nothing of it is computed."""
    texts = set()

    def launch_kernel(kernel: Any, *, inputs: Any, **call: Any) -> list[mx.array]:
        texts.add(launch.generated_text(kernel, inputs, **({"init_value": None} | call))[0])
        return stand_in(call["output_shapes"], call["output_dtypes"], *inputs)

    def check(run: Any, reference: Any, inputs: Any) -> self_check._Finding:
        mx.eval(run(*inputs))
        return self_check._Finding(None)

    model = small_model(model_type, hidden_size=512, intermediate_size=512, num_hidden_layers=1)
    model.set_dtype(mx.float16)
    monkeypatch.setattr(dispatch, "metal_unavailable", lambda: None)
    monkeypatch.setattr(launch, "launch", launch_kernel)
    monkeypatch.setattr(self_check, "_difference", check)
    monkeypatch.setattr(self_check, "_checks", {})
    monkeypatch.setattr(choice, "_time", run_both)
    _, state = model(mx.ones((1, length), mx.int32))
    mx.eval(state, model(mx.ones((1, 1), mx.int32), state))
    assert len(texts) == FIRST_CHAT[model_type, length]
    assert set(choice._chosen.values()) == {"split" if length > launch.FEW_ROWS else "groups"}


@pytest.mark.sample(2)
@pytest.mark.metal
@pytest.mark.usefixtures("metal")
@pytest.mark.parametrize("name", choice.NAMES[1:])
@pytest.mark.parametrize("model_type", ["hgrn_bit", "bitnet"])
def test_a_model_says_the_same_whatever_is_chosen(model_type: str, name: str) -> None:
    model = small_model(model_type)
    prompt = mx.arange(2 * 20).reshape(2, 20)
    with dispatch.use_backend("reference"):
        want = model(prompt)[0]
        mx.eval(want)
    with choice.use(name):
        assert relative_error(model(prompt)[0], want) <= TOLERANCE[mx.float32]
