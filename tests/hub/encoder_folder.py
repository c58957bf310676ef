"""A tiny Big Bird of random weights, whose tokenizer has the mask `[MASK]`."""

import json
import shutil
from pathlib import Path

import mlx.core as mx

from mlx_mmfree.hub import save_model
from mlx_mmfree.models import find
from tests.hub.checkpoints import GOLDENS

MASK = "[MASK]"


def encoder_folder(folder: Path) -> Path:
    """Writes it, and its tokenizer beside it."""
    tokenizer = folder.with_name(f"{folder.name}-tokenizer")
    shutil.copytree(GOLDENS / "tokenizer_bpe", tokenizer)
    file = tokenizer / "tokenizer.json"
    last = json.loads(file.read_text())["added_tokens"][-1]["content"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (tokenizer / name).read_text()
        (tokenizer / name).write_text(text.replace(json.dumps(last), json.dumps(MASK)))
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(settings | {"mask_token": MASK}))
    architecture = find("big_bird")
    mx.random.seed(2)
    sizes = {"vocab_size": 518, "initializer_range": 0.5}
    config = architecture.config.from_hub({**architecture.tiny, **sizes})
    save_model(folder, architecture.build(config), tokenizer)
    return folder
