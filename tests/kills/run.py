"""Kills training runs at random moments and compares them with whole ones, bit for bit.

`python -m tests.kills.run --count 50` goes on until so many starts were killed. Each option has its
turn; `--first 12 --seed 3 --count 1` runs one case again.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
from tqdm import tqdm

from mlx_mmfree.hub import load_model, save_model
from mlx_mmfree.models import find
from tests.kills.case import Refused, alone, draw_case, kill_and_compare
from tests.process_group import ROOT
from tests.training.conftest import write_corpus

TOKENIZER = ROOT / "tests/data/goldens/tokenizer_bpe"
_SIZES = {"vocab_size": 518, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32}
_MODELS: dict[str, dict[str, Any]] = {
    "masters": {"model_type": "hgrn_bit"},
    "latent": {
        "model_type": "llama",
        "num_attention_heads": 2,
        "quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear"},
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50, help="kills")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0, help="seed of moments and combinations")
    arguments = parser.parse_args()
    kills, cases, refused, faults = 0, 0, 0, []
    with tempfile.TemporaryDirectory() as name, tqdm(total=arguments.count, unit="kill") as bar:
        folder = Path(name)
        write_files(folder)
        while kills < arguments.count:
            number = arguments.first + cases
            draw = random.Random(f"{arguments.seed} {number}")
            case = draw_case(number, draw)
            try:
                new, found = kill_and_compare(case, folder, draw)
            except Refused:
                refused += 1
                _empty(folder)
                case = alone(number, case)
                new, found = kill_and_compare(case, folder, draw)
            faults += [f"case {number}: {case}: {text}" for text in found]
            kills, cases = kills + new, cases + 1
            bar.update(new)
            _empty(folder)
    print("\n".join(faults))
    print(
        f"{cases} runs were killed {kills} times; {refused} combinations were refused; "
        f"{len(faults)} differences."
    )
    return int(bool(faults))


def write_files(folder: Path) -> None:
    """The texts, samples, tokenizer and models that the cases name."""
    for number, name in enumerate(("train.txt", "more.txt", "valid.txt")):
        write_corpus(folder / name, number, documents=40 if number < 2 else 8)
    (folder / "tokenizer").symlink_to(TOKENIZER)
    draw = random.Random(5)
    for name, features in _DATA.items():
        (folder / name).mkdir()
        for split, count in (("train", 12), ("valid", 4), ("test", 4)):
            lines = [json.dumps(_sample(features, draw)) for _ in range(count)]
            (folder / name / f"{split}.jsonl").write_text("\n".join(lines))
    mx.random.seed(3)
    for name, values in _MODELS.items():
        architecture = find(values["model_type"])
        model = architecture.build(architecture.config.from_hub(_SIZES | values))
        save_model(folder / name, model, TOKENIZER)
    save_model(folder / "packed", load_model(folder / "masters", packed=True), TOKENIZER)


_DATA = {
    "data": ("prompt", "completion"),
    "renamed": ("question", "answer"),
    "pairs": ("prompt", "chosen", "rejected"),
    "renamed_pairs": ("prompt", "a", "b"),
    "talks": ("talk",),
    "lines": ("line",),
}


def _sample(features: tuple[str, ...], draw: random.Random) -> dict[str, object]:
    def text() -> str:
        return " ".join(draw.choices(["the", "cat", "dog", "sat", "ran"], k=draw.randint(2, 8)))

    if features == ("talk",):
        roles = ("user", "assistant")
        return {"talk": [{"role": role, "content": text()} for role in roles]}
    return {name: text() for name in features}


def _empty(folder: Path) -> None:
    for name in ("whole", "killed"):
        shutil.rmtree(folder / name, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
