"""Adapters of mlx-lm's and PEFT's format: odd numbers, shapes, names and options."""

import json
import random
import shutil
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_mmfree import generate
from mlx_mmfree.hub.adapters.adapter import attach
from mlx_mmfree.hub.adapters.adapter_folder import read_adapter, write_adapter, write_peft_adapter
from mlx_mmfree.training.fine_tuning.fine_tune import adapt_layers
from tests.fuzz.base_model import BASES, base_of, link_base, make_base
from tests.fuzz.case import FuzzClass
from tests.fuzz.classes.checkpoints import (
    damaged_json,
    damaged_weights,
    odd_file,
    odd_header,
    odd_tensors,
    odd_values,
    truncated_weights,
)
from tests.fuzz.hostile import ODD_VALUES, with_raw_json

_NUMBERS = (
    *(0, -1, 1, 8, 2**31, 1e30, -1e30, 1e308, 1e-320, 3.5e38, float("nan"), float("inf")),
    *("8", "1e400", None, True, [8], 10**400),
)


def make_sources(folder: Path) -> None:
    """LoRA and DoRA for each model, in both formats where both exist."""
    for base in BASES:
        make_base(folder / base, base)
        (folder / f"{base}-adapters").mkdir()
        link_base(folder / f"{base}-adapters", folder / base)
        for kind in ("lora", "dora"):
            model, _ = base_of(folder / f"{base}-adapters")
            attach(model, None)
            adapt_layers(model, kind=kind, rank=4, scale=2.0)
            for name, array in tree_flatten(model.trainable_parameters()):
                if name.endswith("lora_b"):
                    array[:] = mx.random.normal(array.shape) * 0.1
            target = folder / f"{base}-adapters"
            write_adapter(target / kind, model, {"model": base})
            if base == "llama":
                write_peft_adapter(target / f"{kind}-peft", model, base)


def odd_options(folder: Path, rng: random.Random) -> str:
    """Odd values of the options, with odd numbers among them."""
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text())
    changed = {}
    for _ in range(rng.choice((1, 1, 2))):
        options = config.get("lora_parameters", config)
        if rng.random() < 0.3 or not isinstance(options, dict):
            options = config
        named = [key for key in ("scale", "rank", "dropout", "r", "lora_alpha") if key in options]
        extra = ("rank_pattern", "alpha_pattern", "use_rslora", "bias", "modules_to_save", "odd")
        key = rng.choice((*named, *named, *named, *options, *extra))
        options[key] = rng.choice((*_NUMBERS, *_NUMBERS, *ODD_VALUES, {"q_proj": 1e300}))
        changed[key] = options[key]
    file.write_text(json.dumps(config))
    return f"{changed!r:.200}"


def raw_options(folder: Path, rng: random.Random) -> str:
    """Options that Python would not write as JSON."""
    file = folder / "adapter_config.json"
    file.write_text(with_raw_json(json.loads(file.read_text()), rng))
    return file.read_text()[:100]


def huge_values(folder: Path, rng: random.Random) -> str:
    """Finite factors, so large that the model's numbers are not."""
    [file] = folder.glob("*.safetensors")
    tensors = mx.load(str(file))
    mx.eval(tensors)
    factor = rng.choice((1e10, 1e20, 1e30, 3e38, -3e38))
    names = rng.sample(sorted(tensors), rng.randrange(1, len(tensors) + 1))
    for name in names:
        tensors[name] = tensors[name].astype(mx.float32) * factor
    mx.save_safetensors(str(file), tensors, {"format": "mlx"})
    return f"{len(names)} tensors times {factor}"


_MUTATIONS = (
    *(odd_options, odd_options, odd_options, raw_options, huge_values, odd_header, odd_values),
    *(odd_values, odd_tensors, damaged_json, damaged_weights, truncated_weights, odd_file),
)


def mutate(sources: Path, target: Path, rng: random.Random) -> str:
    """Damages a copy of an adapter; some lie beside a model that they do not fit."""
    base = rng.choice(BASES)
    other = rng.choice(BASES) if rng.random() < 0.1 else base
    kinds = [path for path in (sources / f"{other}-adapters").iterdir() if not path.is_symlink()]
    source = rng.choice(sorted(kinds))
    shutil.copytree(source, target / "adapter")
    link_base(target, sources / base)
    mutation = rng.choice(_MUTATIONS)
    what = mutation(target / "adapter", rng)
    return f"{mutation.__name__} in {other}'s {source.name} for {base}: {what}"


def exercise(folder: Path, rng: random.Random) -> None:
    """Puts the adapter on the model and generates; logits must be finite, or be refused."""
    model, tokenizer = base_of(folder)
    attach(model, None)
    attach(model, read_adapter(folder / "adapter")).eval()
    generate(model, tokenizer, "a b", max_tokens=2)
    logits, _ = model(mx.array([tokenizer.encode("a b")]))
    if not mx.isfinite(logits[:, -1]).all().item():
        raise AssertionError("logits are not finite and generation did not stop")


CLASS = FuzzClass(make_sources, mutate, exercise)
