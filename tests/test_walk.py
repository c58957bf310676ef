"""How far a reader walks through the package to see one thing happen.

A walk is what runs, warm, in all threads: the files and the functions that are entered, and the moves,
which are calls into another file than the call before. `python tests/test_walk.py` prints each walk
with its files in the order in which they are entered, as a map; `load` after it prints that walk alone,
with its functions.
"""

import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np

import mlx_mmfree
from mlx_mmfree import demo, generate, load, load_model, save_model
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.models import Decoder, llama
from mlx_mmfree.training.batches import Batch
from mlx_mmfree.training.data_parallel import DataParallel
from mlx_mmfree.training.losses.loss import next_token_loss
from mlx_mmfree.training.optimizer_step import OptimizerStep
from mlx_mmfree.training.run_settings import LoopSettings

ROOT = Path(mlx_mmfree.__file__).parent
TOKENIZER = Path(__file__).parent / "data" / "goldens" / "tokenizer_bpe"


class Size(NamedTuple):
    """How long a walk is."""

    files: int
    functions: int
    moves: int


class Walk:
    """The calls of functions of the package, in all threads, while it `looks`."""

    def __init__(self) -> None:
        self.looks = False
        self.calls: list[CodeType] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Called by Python at each call: modules, classes, lambdas and comprehensions do not count."""
        code = frame.f_code
        if not self.looks or event != "call" or code.co_name.startswith("<"):
            return
        if code.co_filename.startswith(f"{ROOT}/"):
            self.calls.append(code)

    def functions(self) -> list[str]:
        """Each function as `file: name`, in the order in which they are entered first."""
        return list(dict.fromkeys(f"{_file(code)}: {code.co_qualname}" for code in self.calls))

    def files(self) -> list[str]:
        """Each file, in the order in which they are entered first."""
        return list(dict.fromkeys(map(_file, self.calls)))

    def size(self) -> Size:
        """Files, functions and moves."""
        files = [code.co_filename for code in self.calls]
        moves = sum(one != other for one, other in pairwise(files))
        return Size(len({*files}), len({*self.calls}), moves)


def _file(code: CodeType) -> str:
    return Path(code.co_filename).relative_to(ROOT).as_posix()


@contextmanager
def _watched() -> Iterator[Walk]:
    """Watches this thread and those that start within."""
    walk = Walk()
    threading.setprofile(walk)
    sys.setprofile(walk)
    try:
        yield walk
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _walked(run: Callable[[], object]) -> Walk:
    """The walk of what has run twice before."""
    with _watched() as walk:
        run()
        run()
        walk.looks = True
        run()
        walk.looks = False
    return walk


SIZES = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "bitnet"},
}


def _tiny() -> Decoder:
    """A Llama of two layers of ternary weights, in its training variant."""
    mx.random.seed(3)
    return llama.build(llama.Config.from_hub(SIZES))


def walk_of_load(folder: Path) -> Walk:
    """`load` of a folder."""
    return _walked(lambda: load(folder))


def walk_of_generate(folder: Path) -> Walk:
    """`generate` of three tokens."""
    model, tokenizer = load(folder)
    return _walked(lambda: generate(model, tokenizer, "Once upon", max_tokens=3))


def walk_of_token(folder: Path) -> Walk:
    """The model alone on one token, after two others."""
    model = load_model(folder)
    _, state = model(mx.array([[5, 6]]))
    mx.eval(state)
    return _walked(lambda: mx.eval(model(mx.array([[7]]), state)))


def walk_of_completion(folder: Path) -> Walk:
    """One `/v1/completions` of three tokens, in process."""
    from starlette.testclient import TestClient

    from mlx_mmfree.generation.sessions import Sessions
    from mlx_mmfree.server.app import make_app
    from mlx_mmfree.server.run import make_service
    from mlx_mmfree.server.settings import ServedModel, Settings

    model, tokenizer = load(folder)
    sessions = Sessions(model, memory_bytes=10**8)
    served = ServedModel("m", model, tokenizer, sessions.for_model(model))
    service = make_service([served], Settings(), sessions)
    app = make_app(service)
    asked = {"prompt": "Once upon", "max_tokens": 3, "temperature": 0}
    with _watched() as walk, TestClient(app, base_url="http://127.0.0.1:8080") as client:
        for times in range(3):
            walk.looks = times == 2
            assert client.post("/v1/completions", json=asked).status_code == 200
            # what a text leaves is kept when it has ended, and decides what the next one goes on from
            while any(worker.has_work for worker in service.engine._workers.values()):
                time.sleep(0.001)
            walk.looks = False
    return walk


def walk_of_training(folder: Path) -> Walk:
    """One step of training: what computes it was traced in the steps before."""
    settings = LoopSettings(folder=folder, steps=3)
    optimizer, model = optim.AdamW(0.0), _tiny()
    optimizer.init(model.trainable_parameters())
    rows = np.arange(24, dtype=np.int32).reshape(2, 12)

    def schedule(step: int) -> mx.array:
        return mx.array(1e-3)

    def batches(step: int) -> list[Batch]:
        return [Batch.of_rows(rows)]

    step = OptimizerStep(
        model, settings, optimizer, schedule, batches, next_token_loss, DataParallel()
    )
    steps = iter(range(3))
    return _walked(lambda: step(next(steps)))


WALKS = {
    "load": walk_of_load,
    "generate": walk_of_generate,
    "token": walk_of_token,
    "completion": walk_of_completion,
    "training": walk_of_training,
}


def make_tiny(folder: Path) -> Path:
    """Writes the tiny Llama packed, with a tokenizer."""
    model = _tiny()
    pack_linears(model)
    save_model(folder, model, TOKENIZER)
    return folder


def test_a_walk_of_a_token(tmp_path: Path) -> None:
    walked = walk_of_token(make_tiny(tmp_path / "tiny"))
    assert {"models/parts/stack.py", "ops/bit_linear/__init__.py"} <= {*walked.files()}


def main(names: list[str]) -> None:
    """Prints walks: all with their files, or those named with their functions."""
    with tempfile.TemporaryDirectory() as folder:
        models = {"tiny Llama": make_tiny(Path(folder) / "tiny"), "bundled model": demo.path()}
        for name in names or WALKS:
            for title, model in models.items():
                walked = WALKS[name](model)
                files, functions, moves = walked.size()
                print(f"{name}, {title}: {files} files, {functions} functions, {moves} moves")
                if title == "tiny Llama":
                    for line in walked.functions() if names else walked.files():
                        print(f"    {line}")


if __name__ == "__main__":
    main(sys.argv[1:])
