"""Log-probabilities of preferences under a reference model, computed once for a run."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
from tqdm import tqdm

from ..files.tensors import read_header, read_tensors
from ..files.writing import new_file
from ..hub.checkpoint.save import write_tensors
from ..models import Decoder
from .data_parallel import DataParallel
from .digests import samples_digest, weights_digest
from .pairs import Pair, pair_batch
from .preference_loss import answer_log_probabilities
from .run_folder import make_run_folder, writing
from .samples import Samples

_FILE = "reference.safetensors"


def with_reference(
    data: Mapping[str, Samples[Pair]],
    model: Decoder,
    *,
    batch_size: int = 4,
    folder: Path | None = None,
    processes: DataParallel | None = None,
) -> dict[str, Samples[Pair]]:
    """The same pairs, with the log-probabilities of their answers under a reference model.

    Args:
        data: The pairs of each split.
        model: The reference model: the one that a run begins with, or another one with its vocabulary.
        batch_size: Pairs in a forward pass.
        folder: Where they are kept for a run that is resumed; `None`: nowhere.
        processes: The processes that compute them together, each a part.
    """
    processes = DataParallel() if processes is None else processes
    digest = hashlib.sha256((samples_digest(data) + weights_digest(model)).encode()).hexdigest()
    blank = {name: mx.zeros((len(samples.samples), 2)) for name, samples in data.items()}
    file = None if folder is None else folder / _FILE
    kept = _read(file, digest, blank) if processes.is_first else None
    if processes.largest(int(kept is not None)):
        values = processes.of_first(blank if kept is None else kept)
    else:
        values = _computed(data, model, batch_size, processes)
        if file is not None and processes.is_first:
            make_run_folder(file.parent)
            with writing(file.parent), new_file(file) as new:
                write_tensors(new, values, {"digest": digest})
    return {
        name: replace(samples, samples=_referenced(samples.samples, values[name]))
        for name, samples in data.items()
    }


def reference_digest(data: Mapping[str, Samples[Pair]]) -> str:
    """The digest of the log-probabilities that `with_reference` has added."""
    digest = hashlib.sha256()
    for name in sorted(data):
        known = [pair.reference for pair in data[name].samples if pair.reference is not None]
        digest.update(np.array(known, np.float32).tobytes())
    return digest.hexdigest()


def _read(
    file: Path | None, digest: str, blank: Mapping[str, mx.array]
) -> dict[str, mx.array] | None:
    """What an earlier start of the same run has kept, or `None`."""
    if file is None or not file.exists():
        return None
    entries, metadata = read_header(file)
    is_same = metadata.get("digest") == digest and entries.keys() == blank.keys()
    if not is_same or any(entries[name].shape != blank[name].shape for name in blank):
        return None
    return dict(read_tensors(file, entries.values()))


def _computed(
    data: Mapping[str, Samples[Pair]], model: Decoder, batch_size: int, processes: DataParallel
) -> dict[str, mx.array]:
    """The log-probabilities `(pairs, 2)` of each split; each process computes every n-th batch."""
    model.eval()
    found = {}
    total = sum(len(samples.samples) for samples in data.values())
    shown = None if processes.is_first else True
    with tqdm(total=total, unit="pair", desc="reference", dynamic_ncols=True, disable=shown) as bar:
        for name, samples in data.items():
            values = np.zeros((len(samples.samples), 2), np.float32)
            # texts of similar lengths together
            order = sorted(range(len(values)), key=lambda n: samples.samples[n].length)
            starts = range(0, len(order), batch_size)
            for start in starts[processes.rank :: processes.size]:
                places = order[start : start + batch_size]
                batch = pair_batch([samples.samples[n] for n in places])
                rows = np.array(answer_log_probabilities(model, batch))
                values[places] = rows.reshape(2, -1).T
                bar.update(len(places) * processes.size)
            found[name] = mx.array(values)
    _, _, values_of_all = processes.sums(mx.zeros(()), mx.array(0, mx.int32), found)
    return dict(values_of_all)


def _referenced(pairs: Sequence[Pair], values: mx.array) -> list[Pair]:
    rows = np.array(values).tolist()
    return [replace(pair, reference=tuple(row)) for pair, row in zip(pairs, rows, strict=True)]
