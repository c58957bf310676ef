"""A corpus that is larger than the memory that training takes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from mlx_mmfree.platform.resident_memory import STATUS
from mlx_mmfree.tokenizer.documents import tokenizer_digest
from mlx_mmfree.tokenizer.tokenizer import Tokenizer
from mlx_mmfree.training.corpus.tokenize import TokenFileWriter
from mlx_mmfree.training.results import read_log
from tests.hub.checkpoints import GOLDENS

TOKENIZER = GOLDENS / "tokenizer_bpe"
SMALL, LARGE = 2**14, 2**25
LIMIT_BYTES = 24 * 2**20
"""Far less than the large file's 64 MiB, and enough for what any second run in a process adds."""

# the first run takes the memory that a run of this size needs, and keeps it
RUNS = """
import sys
from mlx_mmfree.cli.train import main
from mlx_mmfree.training import trainer
trainer.plot_run = lambda *_: True
for config in sys.argv[1:]:
    assert main(["--config", config]) == 0
"""


def _write_random_tokens(path: Path, count: int) -> None:
    tokenizer = Tokenizer.from_folder(TOKENIZER)
    ids = np.random.default_rng(0).integers(0, tokenizer.vocab_size, count, np.uint16)
    with open(path, "wb") as stream:
        writer = TokenFileWriter(stream, tokenizer.vocab_size, 0, tokenizer_digest(tokenizer))
        writer.add(ids, ["a"])
        writer.finish()


@pytest.mark.exhaustive
@pytest.mark.skipif(not STATUS.exists(), reason="only Linux tells the kinds of memory apart")
def test_a_large_corpus_takes_no_more_memory_than_a_small_one(
    tmp_path: Path, run_values: dict[str, Any]
) -> None:
    configs = []
    for name, count in (("small", SMALL), ("large", LARGE)):
        _write_random_tokens(tmp_path / f"{name}.tokens", count)
        values = run_values | {
            "output": name,
            "model": run_values["model"] | {"vocab_size": 518},
            "tokenizer": str(TOKENIZER),
            "stages": [{"until": 1, "weights": {f"{name}.tokens": 1}}],
            "valid": [f"{name}.tokens"] if name == "small" else [],
            "order": "epochs",
        }
        configs.append(tmp_path / f"{name}.yaml")
        configs[-1].write_text(yaml.safe_dump(values))
    command = [sys.executable, "-c", RUNS, *map(str, configs)]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    small, large = (
        max(record.get("anonymous_bytes", 0) for record in read_log(tmp_path / name / "log.jsonl"))
        for name in ("small", "large")
    )
    assert (tmp_path / "large.tokens").stat().st_size > 2 * LIMIT_BYTES
    assert small > 0
    assert large - small < LIMIT_BYTES
    assert "mapped_bytes" in json.loads((tmp_path / "large/log.jsonl").read_text().splitlines()[1])
