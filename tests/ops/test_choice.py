"""Candidates are chosen by timing, once for a class of tasks. A clock of the tests tells their times."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.errors import UsageError
from mlx_mmfree.ops import Projection, bit_linear, pack_ternary, ternary_matmul
from mlx_mmfree.ops.backend import choice, dispatch, kept_results, launch, self_check
from mlx_mmfree.ops.ternary_matmul.metal import candidates, shape_class
from tests.emulator.emulator import Emulator
from tests.ops.kernel_checks import check_code_sums, check_fused_codes, check_fused_sums
from tests.ops.test_launches import small_model
from tests.tolerances import TOLERANCE, relative_error

X = mx.ones((2,))
CANDIDATES = ("first", "second", "third")


class Clock:
    """Each reading comes later by what the candidate takes that was run last.

    Attributes:
        costs: The seconds that each candidate takes; others take one.
        runs: The names of the candidates, in the order in which they ran.
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
    """Time as the test wants it, and a folder in which choices are kept."""
    monkeypatch.setenv("MLX_MMFREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(choice.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(kept_results, "_kept", {})
    monkeypatch.setattr(choice, "_chosen", {})
    made = Clock()
    monkeypatch.setattr(choice, "_clock", made)
    yield made


def choose(clock: Clock, x: mx.array = X, rows: int = 1, **options: Any) -> str:
    return choice.choose(
        "product",
        options.get("candidates", CANDIDATES),
        options.get("others", ()),
        options.get("run", clock.run),
        x,
        task={"rows": rows},
        facts={"inputs": 5},
        must_agree=options.get("must_agree", True),
    )


def start_process() -> None:
    choice._chosen.clear()
    kept_results._kept.clear()


def test_the_fastest_is_chosen_once(clock: Clock) -> None:
    clock.costs = {"first": 3.0, "second": 1.0, "third": 2.0}
    assert choose(clock) == "second"
    assert set(clock.runs) == set(CANDIDATES)
    clock.runs.clear()
    assert choose(clock) == "second"
    start_process()
    assert choose(clock) == "second"
    assert not clock.runs
    assert choice.kept_choices() == {
        "product(rows=1)": {"inputs": 5, "chosen": "second", "seconds": clock.costs}
    }


def test_each_class_is_timed(clock: Clock) -> None:
    clock.costs = {"second": 0.5}
    assert choose(clock) == "second"
    clock.costs = {"third": 0.5}
    assert choose(clock, rows=2) == "third"
    assert choose(clock) == "second"


def test_what_is_hardly_faster_is_not_chosen(clock: Clock) -> None:
    clock.costs = {"second": 0.97, "third": 1.5}
    assert choose(clock) == "first"


def test_short_runs_are_repeated(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "BUDGET", 1.0)
    clock.costs = {"first": 0.25, "second": 2.0}
    assert choose(clock, candidates=("first", "second")) == "first"
    # the results are compared; then by turns one is timed, and as many as fit
    assert clock.runs == ["first", "second"] + (["first"] * (1 + 4) + ["second"]) * choice.ROUNDS
    [found] = choice.kept_choices().values()
    assert found["seconds"] == {"first": 0.25 / 4, "second": 2.0}


@pytest.mark.parametrize("name", ["groups", "tiles", choice.DEFAULT])
def test_nothing_is_timed_where_one_is_forced(
    clock: Clock, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_MMFREE_PRODUCT", name)
    assert choose(clock, candidates=("mlx", "tiles")) == ("tiles" if name == "tiles" else "mlx")
    with choice.use("mlx"):
        assert choose(clock, candidates=("tiles", "mlx")) == "mlx"
        assert choose(clock, candidates=("tiles",), others=("mlx",)) == "mlx"
    assert not clock.runs
    assert choice.kept_choices() == {}


def test_an_unknown_name_is_the_users_mistake(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_MMFREE_PRODUCT", "fastest")
    with pytest.raises(UsageError, match="'MLX_MMFREE_PRODUCT' must be one of default, groups, "):
        choose(clock)


def test_five_trits_are_said_to_be_gone(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_MMFREE_PRODUCT", "five_trits")
    with pytest.raises(UsageError, match="'five_trits', which is gone: five trits a byte are"):
        choose(clock)


def test_a_single_candidate_is_not_timed(clock: Clock) -> None:
    assert choose(clock, candidates=("first",)) == "first"
    assert not clock.runs


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
        assert choose(clock) == "first"
    assert not clock.runs


@pytest.mark.parametrize("failure", [RuntimeError, ValueError, MemoryError])
def test_what_fails_is_left_out(clock: Clock, failure: type[Exception]) -> None:
    failing = ["second"]

    def run(name: str) -> mx.array:
        if name in failing:
            raise failure("no")
        return clock.run(name)

    clock.costs = {"second": 0.1, "third": 0.5}
    assert choose(clock, run=run) == "third"
    # the next process tries again what the default could not do in this one
    failing = ["first"]
    assert choose(clock, run=run, rows=2) == "first"
    assert list(choice.kept_choices()) == ["product(rows=1)"]


@pytest.mark.parametrize(("name", "chosen"), [("second", "third"), ("first", "first")])
def test_what_fails_while_it_is_timed_is_left_out(clock: Clock, name: str, chosen: str) -> None:
    def run(candidate: str) -> mx.array:
        # it has been compared, and timed once
        if candidate == name and clock.runs.count(name) == 2:
            raise MemoryError
        return clock.run(candidate)

    clock.costs = {"second": 0.1, "third": 0.5}
    assert choose(clock, run=run) == chosen
    kept = [set(found["seconds"]) for found in choice.kept_choices().values()]
    assert kept == ([{"first", "third"}] if name == "second" else [])


def test_results_that_differ_are_left_out(clock: Clock) -> None:
    clock.costs = {"second": 0.1, "third": 0.5}
    bad = mx.array([float("nan"), 1])

    def run(name: str) -> mx.array:
        clock.run(name)
        return bad + (name == "second")

    assert choose(clock, run=run) == "third"
    assert choose(clock, run=run, rows=2, must_agree=False) == "second"


@pytest.mark.parametrize("content", [b'"second"', b"{}", b'{"chosen": 3}', b'{"chosen": "fourth"}'])
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
    choice.forget()
    choose(clock)
    assert clock.runs


@pytest.mark.parametrize(
    ("rows", "timed", "others"),
    [
        (1, ["groups"], ["tiles", "split", "mlx"]),
        (8, ["groups"], ["tiles", "split", "mlx"]),
        (9, ["groups", "mlx"], ["tiles", "split"]),
        (16, ["groups", "mlx"], ["tiles", "split"]),
        (32, ["groups", "mlx"], ["tiles", "split"]),
        (33, ["groups", "tiles", "mlx"], ["split"]),
        (48, ["groups", "tiles", "mlx"], ["split"]),
        (49, ["tiles", "groups", "mlx"], ["split"]),
        (64, ["tiles", "groups", "mlx"], ["split"]),
        (65, ["tiles", "mlx"], ["groups", "split"]),
        (9999, ["tiles", "mlx"], ["groups", "split"]),
    ],
)
def test_what_comes_into_question(rows: int, timed: list[str], others: list[str]) -> None:
    # enough outputs to fill a GPU
    assert candidates(rows, 2560, 8192, mlx_is_exact=True) == (timed, others)
    inexact = [[name for name in names if name != "mlx"] for names in (timed, others)]
    assert candidates(rows, 2560, 8192, mlx_is_exact=False) == tuple(inexact)


@pytest.mark.parametrize(
    ("rows", "dims", "outputs", "is_split"),
    [
        (32, 2560, 256, False),
        (33, 2560, 256, True),
        (64, 11_008, 512, True),
        # 127 and 128 tiles
        (64, 512, 127 * 64, True),
        (64, 512, 127 * 64 + 1, False),
        (64, 511, 256, False),
        # 32 tiles for each 64 rows
        (192, 2560, 2048, True),
        (193, 2560, 2048, False),
        (8128, 2560, 1, True),
        (8129, 2560, 1, False),
    ],
)
def test_split_inputs_come_into_question_where_tiles_are_few(
    rows: int, dims: int, outputs: int, is_split: bool
) -> None:
    timed, others = candidates(rows, dims, outputs, mlx_is_exact=True)
    assert ("split" in timed, "split" in others) == (is_split, not is_split)
    # never the default, which is not timed
    assert timed[0] != "split"
    assert shape_class(rows, dims, outputs)["may_split"] == is_split


@pytest.mark.metal
@pytest.mark.usefixtures("metal")
@pytest.mark.parametrize("name", choice.NAMES[1:])
@pytest.mark.parametrize(("rows", "dims"), [(1, 64), (20, 100), (50, 1100)])
def test_all_give_the_same_sums_of_codes(name: str, rows: int, dims: int) -> None:
    with choice.use(name):
        check_code_sums(rows, dims, 33, mx.float32)
        check_fused_sums(rows, dims, (33, 8), mx.float16)


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
    """The emulator, with a clock that is told which kernel was launched last."""
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
    ("costs", "kernel"),
    [
        ({}, "ternary_matmul_decode"),
        ({"ternary_matmul_prefill": 0.5}, "ternary_matmul_prefill"),
        ({"mlx": 0.5}, "mlx"),
    ],
)
def test_ternary_matmul_takes_the_fastest(timed: Clock, costs: Any, kernel: str) -> None:
    timed.costs = costs
    x = codes(40)
    want = x @ TRITS.T.astype(mx.float32)
    assert mx.array_equal(ternary_matmul(x, WEIGHT, codes=True), want)
    assert set(timed.runs) == {"ternary_matmul_decode", "ternary_matmul_prefill", "mlx"}
    timed.runs.clear()
    # of the same class
    assert mx.array_equal(ternary_matmul(x[:38], WEIGHT, codes=True), want[:38])
    assert timed.runs == [kernel]


@pytest.mark.parametrize(
    ("costs", "kernels"),
    [
        ({}, ["bit_linear_1"]),
        ({"bit_linear_tiles_1": 0.5}, ["bit_linear_codes", "bit_linear_tiles_1"]),
        ({"mlx": 0.5}, ["rms_norm_quantize", "mlx"]),
    ],
)
def test_bit_linear_takes_the_fastest(timed: Clock, costs: Any, kernels: list[str]) -> None:
    timed.costs = costs
    x = codes(2 * 20).reshape(2, 20, 32)
    projection = Projection(WEIGHT, mx.array([0.5]))
    residual = mx.ones((2, 20, 40))
    with dispatch.use_backend("reference"):
        want = bit_linear(x, [projection], residual=residual)
    assert mx.allclose(bit_linear(x, [projection], residual=residual), want, rtol=1e-5)
    assert {"bit_linear_1", "bit_linear_tiles_1", "mlx"} <= set(timed.runs)
    [found] = choice.kept_choices().values()
    assert (found["rows"], found["inputs"], found["outputs"]) == (40, 32, 40)
    timed.runs.clear()
    assert mx.allclose(bit_linear(x, [projection], residual=residual), want, rtol=1e-5)
    assert timed.runs == kernels


def test_few_outputs_take_split_inputs_where_they_are_fastest(timed: Clock) -> None:
    timed.costs = {"ternary_matmul_prefill_split": 0.5, "bit_linear_tiles_1_split": 0.5}
    x, trits = mx.tile(codes(40), (1, 16)), mx.tile(TRITS, (1, 16))
    x[:, 5] = 127
    weight, want = pack_ternary(trits), x @ trits.T.astype(mx.float32)
    for size in (40, 38):
        timed.runs.clear()
        assert mx.array_equal(ternary_matmul(x[:size], weight, codes=True), want[:size])
        # whose scale is 1
        got = bit_linear(x[:size], [Projection(weight, mx.array([0.5]))])
        assert mx.array_equal(got, want[:size] / 2)
    # of the same class
    assert timed.runs == [
        "ternary_matmul_prefill_split",
        "bit_linear_codes",
        "bit_linear_tiles_1_split",
    ]
    for found in choice.kept_choices().values():
        assert found["chosen"] == "split"
        assert set(found["seconds"]) == {"groups", "tiles", "split", "mlx"}


def test_floats_are_not_multiplied_as_less_than_float32(timed: Clock) -> None:
    ternary_matmul(codes(40) / 7, WEIGHT)
    bit_linear(codes(40), [Projection(WEIGHT, mx.array([0.5]))], quantize=False)
    assert len(choice.kept_choices()) == 2
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
    timed: Clock, emulated: Emulator
) -> None:
    timed.costs = {"ternary_matmul_prefill": 0.5}
    x = codes(40)
    want = x @ TRITS.T.astype(mx.float32)
    ternary_matmul(x, WEIGHT, codes=True)
    start_process()
    self_check.check_again()
    emulated.edit = lambda text: text.replace("simdgroup_store(", "if (false) simdgroup_store(")
    timed.runs.clear()
    with pytest.warns(RuntimeWarning, match="ternary_matmul_prefill.*is switched off"):
        assert mx.array_equal(ternary_matmul(x, WEIGHT, codes=True), want)
    assert timed.runs[-1] == "ternary_matmul_decode"


def test_an_unsound_kernel_is_not_chosen(timed: Clock, emulated: Emulator) -> None:
    timed.costs = {"ternary_matmul_prefill": 0.5}
    emulated.edit = lambda text: text.replace("simdgroup_store(", "if (false) simdgroup_store(")
    with pytest.warns(RuntimeWarning, match="ternary_matmul_prefill.*is switched off"):
        ternary_matmul(codes(40), WEIGHT, codes=True)
    [found] = choice.kept_choices().values()
    assert set(found["seconds"]) == {"groups", "mlx"}


@pytest.mark.parametrize("kernel", ["ternary_matmul_prefill", "mlx"])
def test_gradients_do_not_depend_on_the_choice(timed: Clock, kernel: str) -> None:
    timed.costs = {kernel: 0.5}
    weights = mx.arange(40).astype(mx.float32)
    gradient = mx.grad(lambda x: (ternary_matmul(x, WEIGHT, codes=True) * weights).sum())(codes(40))
    want = mx.broadcast_to(weights @ TRITS.astype(mx.float32), (40, 32))
    assert mx.array_equal(gradient, want)
    [found] = choice.kept_choices().values()
    assert found["chosen"] == {"ternary_matmul_prefill": "tiles"}.get(kernel, "mlx")


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
