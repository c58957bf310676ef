"""Teaches encoder-decoders to write generated words in hiragana and backwards.

python examples/translation_toy.py [--quick] [--output DIR] [--steps N] [--seeds N]

A source is one or two words such as `tsukemi no`, and its target `の みけつ`. A sign stands for one to
three letters, so that no position follows from another by counting alone. The vocabulary is trained on
the words too. No held-out source is in the training file.

For each model, the table has the share of the held-out targets that are written without a mistake, by
greedy search and by beam search, as mean and deviation over seeds. The folder gets `table.md`,
`table.json` and the folders of the runs. Repeat the command to go on after a stop.
mlx_mmfree/training/README.md shows the table.
"""

import argparse
import json
import random
import sys
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from comparisons.runs import mean_and_spread

from mlx_mmfree.files.reading import write_json
from mlx_mmfree.files.writing import new_file
from mlx_mmfree.generation.translation import translate
from mlx_mmfree.hub import load
from mlx_mmfree.platform.allocator import keep_freed_memory
from mlx_mmfree.training import Settings, train_model
from mlx_mmfree.training.corpus.mixture import Stage

ROWS = {
    **{
        "": "あいうえお",
        "k": "かきくけこ",
        "s": "さしすせそ",
        "t": "たちつてと",
        "n": "なにぬねの",
    },
    **{
        "h": "はひふへほ",
        "m": "まみむめも",
        "r": "らりるれろ",
        "g": "がぎぐげご",
        "z": "ざじずぜぞ",
    },
    **{"d": "だぢづでど", "b": "ばびぶべぼ", "p": "ぱぴぷぺぽ"},
}
IRREGULAR = {
    "si": "shi",
    "ti": "chi",
    "tu": "tsu",
    "hu": "fu",
    "zi": "ji",
    "di": "dji",
    "du": "dzu",
}
KANA = {
    IRREGULAR.get(onset + vowel, onset + vowel): kana
    for onset, row in ROWS.items()
    for vowel, kana in zip("aiueo", row, strict=True)
}
"""Hiragana by the syllable."""

ATTENTION = {"name": "multi_head_attention", "num_heads": 4}
POST = {"norm_order": "post", "norm": "layer_norm", "scale_embedding": True}
RECURRENT = {"token_mixer": "mlgru", "encoder_token_mixer": ATTENTION}
MODELS: dict[str, dict[str, Any]] = {
    "Transformer, norms after the sums": POST,
    "Transformer, norms before the mixers": {},
    "Transformer, ternary": {"linear_class": "ternary"},
    "MLGRU writes, attention reads": RECURRENT,
    "MLGRU writes, attention reads, ternary": RECURRENT | {"linear_class": "ternary"},
}
"""The differences from `_model`."""

RATES = {"Transformer, norms after the sums": 1e-3}
"""Learning rates other than the plan's: gradients near such a head are large (arXiv 2002.04745)."""


@dataclass(frozen=True)
class Plan:
    """The size of the experiment."""

    pairs: int = 20_000
    held_out: int = 500
    dims: int = 64
    layers: int = 2
    steps: int = 1500
    batch_size: int = 32
    learning_rate: float = 3e-3
    warmup_steps: int = 200
    seeds: int = 3
    models: tuple[str, ...] = tuple(MODELS)


QUICK = Plan(
    pairs=64, held_out=6, dims=16, layers=1, steps=4, batch_size=4, warmup_steps=2,
    seeds=1, models=("Transformer, ternary",),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="train a minimal model for a few steps"
    )
    parser.add_argument("--output", type=Path, help="folder for tables and runs")
    parser.add_argument("--steps", type=int, help=f"steps of each run; default: {Plan.steps}")
    parser.add_argument("--seeds", type=int, default=Plan.seeds, help="number of seeds (3)")
    arguments = parser.parse_args()
    plan = Plan(steps=arguments.steps or Plan.steps, seeds=arguments.seeds)
    plan = QUICK if arguments.quick else plan
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        print(experiment(plan, arguments.output or Path(folder)))


def experiment(plan: Plan, folder: Path) -> str:
    """Trains and measures every model; returns the table."""
    folder.mkdir(parents=True, exist_ok=True)
    held_out = write_pairs(plan, folder)
    rows = []
    for seed, (number, name) in product(range(plan.seeds), enumerate(plan.models)):
        run = f"run-{number}-{seed}"
        metrics = train_model(_settings(plan, folder, run, name, seed))["held_out"]
        row = {"model": name, "seed": seed, "loss": metrics["valid/loss"]}
        rows.append(row | exact_matches(folder / run / "model", held_out))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        write_json(folder / "table.json", rows)
    table = _table(rows)
    with new_file(folder / "table.md") as file:
        file.write_text(table + "\n")
    return table


def write_pairs(plan: Plan, folder: Path) -> list[tuple[str, str]]:
    """Writes `train.tsv` and `valid.tsv`; returns the pairs of the latter."""
    draw = random.Random(0)
    pairs: dict[str, str] = {}
    while len(pairs) < plan.pairs + plan.held_out:
        words = phrase(draw)
        pairs[" ".join("".join(word) for word in words)] = hiragana(words)
    everything = list(pairs.items())
    for name, part in (
        ("valid", everything[: plan.held_out]),
        ("train", everything[plan.held_out :]),
    ):
        with new_file(folder / f"{name}.tsv") as file:
            file.write_text("".join(f"{source}\t{target}\n" for source, target in part))
    return everything[: plan.held_out]


def phrase(draw: random.Random) -> list[list[str]]:
    """One or two words, each as its syllables."""
    syllables = list(KANA)
    return [draw.choices(syllables, k=draw.randint(1, 4)) for _ in range(draw.randint(1, 2))]


def hiragana(words: list[list[str]]) -> str:
    """The words in hiragana, backwards."""
    return " ".join("".join(KANA[syllable] for syllable in word) for word in words)[::-1]


def exact_matches(model: Path, pairs: list[tuple[str, str]]) -> dict[str, float]:
    """The share of the targets that are written without a mistake, by each search."""
    loaded, tokenizer = load(model)
    sources, targets = zip(*pairs, strict=True)
    shares = {}
    for search, beams in (("greedy", 1), ("beam", 4)):
        written = translate(
            loaded, tokenizer, sources, num_beams=beams, max_tokens=64, batch_size=64
        )
        right = sum(got == want for got, want in zip(written, targets, strict=True))
        shares[search] = right / len(pairs)
    return shares


def _settings(plan: Plan, folder: Path, run: str, name: str, seed: int) -> Settings:
    return Settings(
        root=folder,
        output=run,
        model=_model(plan) | MODELS[name],
        stages=(Stage(1, {"train.tsv": 1}),),
        valid=("valid.tsv",),
        valid_tokens=4096,
        order="epochs",
        steps=plan.steps,
        batch_size=plan.batch_size,
        sequence_length=64,
        learning_rate=RATES.get(name, plan.learning_rate),
        schedule="inverse_sqrt",
        warmup_steps=plan.warmup_steps,
        betas=(0.9, 0.98),
        label_smoothing=0.1,
        weight_decay=0.0,
        seed=seed,
        steps_per_report=100,
        save_every=100,
    )


def _model(plan: Plan) -> dict[str, Any]:
    return {
        "model_type": "metaformer",
        "task": "encoder_decoder",
        "vocab_size": 400,
        "hidden_size": plan.dims,
        "encoder_layers": plan.layers,
        "num_hidden_layers": plan.layers,
        "intermediate_size": 4 * plan.dims,
        "token_mixer": ATTENTION,
        "memory_mixer": ATTENTION,
        "channel_mixer": {"name": "feed_forward", "activation": "relu"},
        "positions": "sinusoidal",
        "scale_embedding": True,
    }


def _table(rows: list[dict[str, Any]]) -> str:
    lines = ["| model | greedy | 4 beams | loss |", "|---|---|---|---|"]
    for name in dict.fromkeys(row["model"] for row in rows):
        same = [row for row in rows if row["model"] == name]
        shares = [
            mean_and_spread([100 * row[search] for row in same], digits=1)
            for search in ("greedy", "beam")
        ]
        loss = mean_and_spread([row["loss"] for row in same])
        lines.append(f"| {name} | {' % | '.join(shares)} % | {loss} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
