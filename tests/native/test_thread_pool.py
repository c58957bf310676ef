"""The threads of the compiled kernels: counts, concurrent callers, fork and the end of a process."""

import os
import subprocess
import sys
import threading

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree import native
from mlx_mmfree.generation.decode import generate_tokens
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.models import hgrn_bit
from mlx_mmfree.ops import pack_ternary
from mlx_mmfree.ops.ternary_matmul import native as compiled

if reason := native.unavailable():
    pytest.skip(reason, allow_module_level=True)

# there is enough work to be shared out
SETUP = """
import os
import mlx.core as mx
from mlx_mmfree import native
from mlx_mmfree.ops import pack_ternary
from mlx_mmfree.ops.ternary_matmul import native as compiled
weight = pack_ternary(mx.ones((1024, 1024)))
def works():
    return compiled(mx.ones((4, 1024)), weight, codes=True).sum().item() == 4 * 1024 * 1024
def thread_total():
    return len(os.listdir("/proc/self/task"))
"""


def run(code: str, **environment: str) -> str:
    process = subprocess.run(
        [sys.executable, "-c", SETUP + code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def test_environment_sets_the_number_of_threads() -> None:
    code = "native.unavailable(); print(native.kernels().threads())"
    assert run(code, OPENBLAS_NUM_THREADS="3") == "3"
    assert run(code, OPENBLAS_NUM_THREADS="", OMP_NUM_THREADS="2") == "2"


def test_two_models_generate_at_once() -> None:
    models = []
    for seed in (1, 2):
        mx.random.seed(seed)
        config = hgrn_bit.Config(
            vocab_size=300, hidden_size=256, num_hidden_layers=3, intermediate_size=512
        )
        models.append(pack_linears(hgrn_bit.build(config)))
        mx.eval(models[-1].parameters())
    results: dict[int, list] = {0: [], 1: []}

    def generate(number: int) -> None:
        for _ in range(3):
            results[number].append(list(generate_tokens(models[number], [5, 6], max_tokens=40)))

    generate(0), generate(1)
    workers = [threading.Thread(target=generate, args=(number,)) for number in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for texts in results.values():
        assert len(texts) == 6 and all(text == texts[0] for text in texts)
    assert results[0][0] != results[1][0]


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_threads_start_at_first_need() -> None:
    code = """
native.unavailable()
mx.eval(weight)
before = thread_total()
assert works()
print(thread_total() - before)
"""
    assert run(code, OPENBLAS_NUM_THREADS="4") == "3"
    assert run(code, OPENBLAS_NUM_THREADS="1") == "0"


def test_number_of_threads_can_change() -> None:
    module = native.kernels()
    before = module.threads()
    random = np.random.default_rng(0)
    q, trits = random.integers(-128, 128, (9, 512)), random.integers(-1, 2, (1000, 512))
    x, weight = mx.array(q, mx.float32), pack_ternary(mx.array(trits))
    try:
        for count in (2, 5, 1, 3, 2):
            module.set_threads(count)
            assert module.threads() == count
            assert np.array_equal(np.array(compiled(x, weight, codes=True)), q @ trits.T)
    finally:
        module.set_threads(before)
    module.set_threads(0)
    assert module.threads() == 1
    module.set_threads(before)


def test_concurrent_callers() -> None:
    module = native.kernels()
    before = module.threads()
    module.set_threads(2)
    random = np.random.default_rng(1)
    failures: list[str] = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        stream = mx.new_stream(mx.cpu)
        with mx.stream(stream):
            for _ in range(60):
                q = random.integers(-128, 128, (int(random.integers(1, 9)), 512))
                got = compiled(mx.array(q, mx.float32), weight, codes=True)
                mx.eval(got)
                if not np.array_equal(np.array(got), q @ trits.T):
                    failures.append(f"thread {seed}")

    trits = random.integers(-1, 2, (1500, 512))
    weight = pack_ternary(mx.array(trits))
    mx.eval(weight)
    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    module.set_threads(before)
    assert not failures


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("used_before", [True, False])
def test_a_forked_child_exits(used_before: bool) -> None:
    code = f"""
native.unavailable()
if {used_before}:
    assert works()
child = os.fork()
if child == 0:
    os._exit(7)
assert os.waitpid(child, 0)[1] == 7 << 8
assert works()
print("fine")
"""
    assert run(code, OPENBLAS_NUM_THREADS="2") == "fine"


def test_a_process_ends_while_products_run() -> None:
    code = """
for _ in range(20):
    mx.async_eval(compiled(mx.ones((64, 1024)), weight, codes=True))
print("fine")
"""
    assert run(code, OPENBLAS_NUM_THREADS="2") == "fine"
