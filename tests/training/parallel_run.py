"""One of the processes of `test_data_parallel.py`, or a whole run in one process."""

import hashlib
import itertools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlx_mmfree.errors import TrainingError
from mlx_mmfree.models import Decoder, find
from mlx_mmfree.training import data_parallel
from mlx_mmfree.training.batches import Batch
from mlx_mmfree.training.data_parallel import DataParallel
from mlx_mmfree.training.losses.loss import next_token_loss
from mlx_mmfree.training.optimizer import named_optimizer
from mlx_mmfree.training.run_settings import LoopSettings
from mlx_mmfree.training.trainer import Trainer
from tests.process_group import connect

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "llama", "num_attention_heads": 4},
    "ternary": {"model_type": "hgrn_bit"},
}
STEPS = {"dense": 20, "ternary": 2}
ROWS, DEATH = 4, 11
SMALL_BUCKET = 4096
STOPPED_TIMEOUT_S = 1.0


def build(name: str, seed: int = 5) -> Decoder:
    architecture = find(MODELS[name]["model_type"])
    mx.random.seed(seed)
    config = architecture.config.from_hub(SIZES | MODELS[name] | {"initializer_range": 0.2})
    model: Decoder = architecture.build(config)
    return model


def batch(step: int, rank: int, size: int) -> Batch:
    """Rows of which the second half is learned less, so that the processes' tokens differ."""
    first, stride = np.random.default_rng(step).integers(0, 40, (2, ROWS, 1)).astype(np.int32)
    whole = Batch.of_rows((first + stride % 4 * np.arange(13, dtype=np.int32)) % 40)
    whole.weights[1::2, :9] = 0
    arrays = (array[rank::size] for array in (whole.inputs, whole.targets, whole.weights))
    return Batch(*arrays)


def after_first(processes: DataParallel, folder: Path) -> list[str]:
    """Files that a process sees when its turn comes, after several beats of the first one."""

    def action() -> list[str]:
        seen = sorted(path.name for path in folder.glob("done-*"))
        if processes.is_first:
            threading.Event().wait(3 * data_parallel._BEAT_S)
        (folder / f"done-{processes.rank}").touch()
        return seen

    data_parallel._BEAT_S = 0.05
    return processes.after_first(action)


def pause_evaluations() -> None:
    """Lets three exchanges begin, and those after them when the loss of a process may be known."""
    evaluate, count = mx.async_eval, itertools.count(1)

    def evaluate_and_wait(*arrays: mx.array) -> None:
        evaluate(*arrays)
        if next(count) == 3:
            time.sleep(0.5)

    mx.async_eval = evaluate_and_wait


def train(
    folder: Path,
    name: str,
    processes: DataParallel,
    dying: int | None = None,
    number: int = signal.SIGKILL,
) -> str:
    """A short run; returns a digest of the weights. The process `dying` gets a signal on the way."""
    rank, size = processes.share(ROWS)

    def batches(step: int) -> list[Batch]:
        if step == DEATH and number == signal.SIGSTOP:
            processes._timeout_s = STOPPED_TIMEOUT_S
        if step == DEATH and rank == dying:
            os.kill(os.getpid(), number)
        if step == DEATH and dying is not None:
            # each array is exchanged alone
            data_parallel._BYTES = 4
            pause_evaluations()
        return [batch(step, rank, size)]

    def validation(model: Decoder) -> dict[str, float]:
        held_out = batch(99, 0, 1)
        return {"valid_loss": next_token_loss(model, held_out).item() / held_out.tokens}

    # weights of the first process count
    model = build(name, seed=5 + rank)
    settings = LoopSettings(
        folder, STEPS[name], clip_norm=1.0, steps_per_report=1, steps_per_eval=5, save_every=5
    )
    optimizer = named_optimizer("adamw", 3e-3, None)
    Trainer(
        model,
        settings,
        optimizer,
        lambda step: mx.array(3e-3),
        batches,
        validation,
        processes=processes,
    ).train()
    digest = hashlib.sha256()
    for _, array in tree_flatten(model.parameters()):
        digest.update(np.array(array).tobytes())
    return digest.hexdigest()


def gradient_of(rank: int) -> dict[str, mx.array]:
    """Random numbers of very different sizes, which no order of a sum leaves the same."""
    draw = np.random.default_rng(rank)
    sizes = {"blocks.0.weight": (130, 70), "blocks.1.weight": (40_000,), "bound": (3,)}
    return {
        name: mx.array((draw.normal(size=size) * 10 ** draw.uniform(-3, 3, size)).astype("f4"))
        for name, size in sizes.items()
    }


def exact(processes: DataParallel) -> list[str]:
    """Digests of the same sum in buckets, in buckets again, and in one message."""
    digests = []
    for size in (SMALL_BUCKET, SMALL_BUCKET, 2**20):
        data_parallel._BYTES = size
        own = gradient_of(processes.rank)
        _, _, total = processes.sums(mx.zeros(()), mx.array(0, mx.int32), own)
        digest = hashlib.sha256()
        for _, array in sorted(tree_flatten(total)):
            digest.update(np.array(array).tobytes())
        digests.append(digest.hexdigest())
    return digests


def raw(processes: DataParallel) -> dict[str, Any]:
    """The functions of `DataParallel` on numbers that tell the processes apart."""
    own = processes.rank + 1
    gradient = {"a": [mx.full((3, 2), float(own))], "b": mx.array([0.5 * own], mx.bfloat16)}
    loss, tokens, total = processes.sums(mx.array(own / 4), mx.array(own * 10**8), gradient)
    metrics = {"valid_loss": own / 8, "count": own}
    first = processes.of_first({"weights": mx.array([own, own]), "metrics": metrics})
    done = []
    processes.after_first(lambda: done.append(processes.rank))
    refusals = []
    for check in (lambda: processes.check_same("step", own), lambda: processes.share(3)):
        try:
            check()
        except TrainingError as error:
            refusals.append(str(error))
    processes.check_same("step", 7)
    return {
        "sums": [loss.item(), tokens.item(), total["a"][0].tolist(), total["b"].tolist()],
        "dtypes": [str(total["a"][0].dtype), str(total["b"].dtype)],
        "first": [first["weights"].tolist(), first["metrics"]],
        "share": processes.share(4),
        "refusals": refusals,
    }


def main(task: str, folder: str, results: str, *arguments: str) -> None:
    """Runs a task; what it finds goes to a file of this process in the folder `results`."""
    # the small models then send several messages at once
    data_parallel._BYTES = SMALL_BUCKET
    processes = DataParallel(connect())
    if task in ("kill", "stop"):
        number = signal.SIGKILL if task == "kill" else signal.SIGSTOP
        train(Path(folder), "dense", processes, int(arguments[0]), number)
        return
    result: dict[str, Any]
    if task == "exact":
        result = {"exact": exact(processes)}
    elif task == "resume":
        result = {"dense": train(Path(folder), "dense", processes)}
    else:
        own = Path(folder) / str(processes.rank)
        result = {name: train(own / name, name, processes) for name in MODELS}
        result["raw"] = raw(processes)
        result["exact"] = exact(processes)
        result["order"] = after_first(processes, Path(folder))
    (Path(results) / f"result-{processes.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
