"""Parquet files: damage in footers and pages, cut ends, shared texts, columns of other kinds."""

import random
import shutil
from pathlib import Path

from mlx_mmfree.training.corpus.documents import parquet_documents
from tests.fuzz.case import OUTSIDE, FuzzClass
from tests.fuzz.hostile import damage_bytes, odd_entry

_TEXTS = ["Once upon a time", None, "é" * 40, "", "The cat sat."] * 40
_FOOTER_BYTES = 8
_MOST_BYTES = 100_000


def make_sources(folder: Path) -> None:
    """Files with and without dictionaries and compression, and one of which rows share a large text."""
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"text": _TEXTS, "number": list(range(len(_TEXTS)))})
    for compression in ("none", "snappy", "zstd"):
        for has_dictionary in (True, False):
            parquet.write_table(
                table,
                folder / f"{compression}-{has_dictionary}.parquet",
                compression=compression,
                use_dictionary=has_dictionary,
                row_group_size=64,
            )
    shared = pyarrow.table({"text": ["a" * 90_000] * 5_000})
    parquet.write_table(shared, folder / "shared.parquet")
    nested = pyarrow.table({"text": [[text] for text in _TEXTS], "other": _TEXTS})
    parquet.write_table(nested, folder / "nested.parquet")


def mutate(sources: Path, target: Path, rng: random.Random) -> str:
    """Copies a file and damages it, mostly in the footer, which tells of sizes."""
    target.mkdir()
    source = rng.choice(sorted(sources.iterdir()))
    file = target / "text.parquet"
    kind = rng.choice(("footer", "footer", "bytes", "size", "none", "entry"))
    if kind == "entry":
        shutil.copyfile(source, file)
        return odd_entry(file, target.parent / OUTSIDE / "secret.txt", rng)
    data = source.read_bytes()
    if kind == "footer":
        size = int.from_bytes(data[-_FOOTER_BYTES : -_FOOTER_BYTES // 2], "little")
        start = len(data) - _FOOTER_BYTES - size
        data = data[:start] + damage_bytes(data[start:-_FOOTER_BYTES], rng) + data[-_FOOTER_BYTES:]
    elif kind == "bytes":
        data = damage_bytes(data, rng)
    elif kind == "size":
        data = data[: rng.randrange(len(data))]
    file.write_bytes(data)
    return f"{kind} of {source.name}"


def exercise(folder: Path, rng: random.Random) -> None:
    """Reads the texts, as a corpus is read."""
    column = rng.choice(("text", "text", "text", "number", "absent"))
    for text in parquet_documents(folder / "text.parquet", column, _MOST_BYTES, None):
        text.encode()


CLASS = FuzzClass(make_sources, mutate, exercise, batch=1, count=12, packages=("pyarrow",))
