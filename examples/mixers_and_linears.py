"""Trains token mixers with dense and ternary linears at equal size, and writes a table of them.

python examples/mixers_and_linears.py [--quick] [--output DIR] [--models NAME ...]
    [--embeddings one small] [--tokens N] [--seeds N] [--rates R ...] [--jobs N]

Each model has 1.38 million parameters: 4 blocks of 128 dims and a vocabulary of 2,048 tokens. All learn
for 320 steps, from the same tokens of TinyStories in the same order. The learning rate is the best one
with the first seed: while the best one lies at an end of those tried, twice or half of it is tried as
well. The table holds the bits per byte of 200 held-out stories, as mean and standard deviation over the
seeds. `--embeddings one small` also trains all models with embeddings as small as the other weights.

The folder gets `table.md`, `table.json`, `table.png` (extra `plot`) and the folders of all runs. The
tables are written when the rates are chosen, and again after each seed. Repeat the command to go on
after a stop: finished runs are not repeated. mlx_mmfree/training/README.md shows the results.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from comparisons import runs as comparisons

from mlx_mmfree.cli.parts.terminal import markdown
from mlx_mmfree.evaluation.picture import COLOURS, save_picture
from mlx_mmfree.files.reading import write_json
from mlx_mmfree.files.writing import new_file, new_folder
from mlx_mmfree.tokenizer.documents import train_vocabulary
from mlx_mmfree.tokenizer.tokenizer import Tokenizer
from mlx_mmfree.training.corpus.documents import read_documents
from mlx_mmfree.training.corpus.tokenize import write_token_file
from mlx_mmfree.training.results import read_log

CORPUS = Path(__file__).parent / "demo_corpus"
TERNARY = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
HEADS = {"num_attention_heads": 4, "tie_word_embeddings": False}
MODELS: dict[str, dict[str, Any]] = {
    "MLGRU, dense": {"model_type": "hgrn_bit", "linear_class": "dense"},
    "MLGRU, ternary": {"model_type": "hgrn_bit"},
    "Llama, dense": {"model_type": "llama", **HEADS},
    "Llama, ternary": {"model_type": "llama", "linear_class": "ternary", **HEADS},
    "Llama, ternary, inner norms": {
        "model_type": "llama",
        "quantization_config": TERNARY | {"use_rms_norm": True},
        **HEADS,
    },
    "BitNet": {"model_type": "bitnet", "rope_theta": 500000.0, **HEADS},
}
EMBEDDINGS = {"small": 0.02, "one": 1.0}
"""Standard deviations of the embeddings; all other weights have 0.02."""


@dataclass(frozen=True)
class Plan:
    """The size of the comparison. The tokens of a run decide the size of its batches."""

    train: Path = CORPUS / "train-tinystories.txt.xz"
    valid: Path = CORPUS / "valid-tinystories.txt.xz"
    stories: int = 200
    vocab_size: int = 2048
    dims: int = 128
    layers: int = 4
    steps: int = 320
    length: int = 256
    tokens: int = 1_310_720
    seeds: int = 3
    rates: tuple[float, ...] = (4e-3, 8e-3)
    most_further_rates: int = 4
    models: tuple[str, ...] = tuple(MODELS)
    embeddings: tuple[str, ...] = ("one",)


QUICK = Plan(
    train=CORPUS / "valid-storybooks.txt",
    valid=CORPUS / "valid-storybooks.txt",
    stories=4,
    vocab_size=300,
    dims=16,
    layers=1,
    steps=2,
    length=16,
    tokens=64,
    seeds=1,
    rates=(4e-3,),
    most_further_rates=0,
    models=("MLGRU, ternary",),
)


@dataclass(frozen=True)
class Run:
    model: str
    embedding: str
    rate: float
    seed: int = 0

    @property
    def folder(self) -> str:
        model = self.model.lower().replace(", ", "-").replace(" ", "-")
        return f"runs/{model}-{self.embedding}-{self.rate:g}-{self.seed}"


Results = Mapping[Run, Mapping[str, Any]]


def settings_of(run: Run, plan: Plan) -> dict[str, Any]:
    """The settings for `mmfree train`. Paths are relative to the folder of the run."""
    tokens = "../../tokens/{}.tokens"
    return {
        "output": ".",
        "model": {
            "vocab_size": plan.vocab_size,
            "hidden_size": plan.dims,
            "num_hidden_layers": plan.layers,
            "intermediate_size": 3 * plan.dims,
            **MODELS[run.model],
        },
        "embedding_std": EMBEDDINGS[run.embedding],
        "stages": [{"until": 1, "weights": {tokens.format("train"): 1}}],
        "valid": [tokens.format("valid")],
        "valid_tokens": 8192,
        "steps": plan.steps,
        "batch_size": plan.tokens // (plan.steps * plan.length),
        "sequence_length": plan.length,
        "learning_rate": run.rate,
        "warmup_steps": plan.steps // 20,
        "steps_per_eval": plan.steps // 2,
        "seed": run.seed,
    }


def train(run: Run, plan: Plan, folder: Path) -> dict[str, Any]:
    """Trains or resumes a run with one thread. Returns what it came to."""
    home = folder / run.folder
    home.mkdir(parents=True, exist_ok=True)
    # JSON is YAML too
    write_json(home / "train.yaml", settings_of(run, plan))
    command = [sys.executable, "-m", "mlx_mmfree", "train", "--config", str(home / "train.yaml")]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise comparisons.RunFailed(f"{run.folder}: {ended.stderr}")
    [figure] = re.findall(r"valid/bits_per_byte: (\S+)", ended.stdout)
    records = read_log(home / "log.jsonl")
    metrics = {
        "bits_per_byte": float(figure),
        "losses": [[record["tokens"], record["loss"]] for record in records if "loss" in record],
    }
    write_json(home / "result.json", metrics)
    return metrics


def finished(run: Run, plan: Plan, folder: Path) -> dict[str, Any] | None:
    """The result of a finished run, unless it was another plan's."""
    home = folder / run.folder
    if not (home / "result.json").exists():
        return None
    is_same = json.loads((home / "train.yaml").read_text()) == settings_of(run, plan)
    return dict(json.loads((home / "result.json").read_text())) if is_same else None


def tokenise(plan: Plan, folder: Path) -> None:
    """Writes the tokens of both texts and the tokenizer, unless they are there."""
    if (folder / "tokens").exists():
        return
    with new_folder(folder / "tokens") as new:
        train_vocabulary(read_documents(plan.train), plan.vocab_size, new / "tokenizer")
        tokenizer = Tokenizer.from_folder(new / "tokenizer")
        write_token_file(read_documents(plan.train), new / "train.tokens", tokenizer)
        stories = islice(read_documents(plan.valid), plan.stories)
        write_token_file(stories, new / "valid.tokens", tokenizer)


def results_of(runs: Sequence[Run], plan: Plan, folder: Path, jobs: int) -> Results:
    """The result of each run. Runs that are not finished are trained, several at a time."""
    known = partial(finished, plan=plan, folder=folder)
    trained = partial(train, plan=plan, folder=folder)
    return comparisons.results_of(runs, known, trained, ThreadPoolExecutor(jobs), line)


def line(run: Run, metrics: comparisons.Metrics) -> str:
    return f"{run.folder}: {metrics['bits_per_byte']:.3f} bits per byte"


def compare(plan: Plan, folder: Path, jobs: int) -> str:
    """Runs the comparison. Returns its table."""
    tokenise(plan, folder)
    tried = search(plan, folder, jobs)
    best = [best_of(kind, tried) for kind in kinds_of(plan)]
    results = dict(tried)
    for seed in range(plan.seeds):
        runs = [replace(run, seed=seed) for run in best]
        results |= results_of(runs, plan, folder, jobs)
        write_metrics(folder, plan, results)
        draw(folder / "table.png", tried, best, results)
        text = table(tried, best, results)
        with new_file(folder / "table.md") as new:
            new.write_text(text)
    return text


def kinds_of(plan: Plan) -> list[tuple[str, str]]:
    return [(model, embedding) for embedding in plan.embeddings for model in plan.models]


def rates_of(kind: tuple[str, str], tried: Iterable[Run]) -> list[float]:
    """The rates that were tried for a model and an embedding."""
    return sorted(run.rate for run in tried if (run.model, run.embedding) == kind)


def best_of(kind: tuple[str, str], tried: Results) -> Run:
    return min(
        (run for run in tried if (run.model, run.embedding) == kind),
        key=lambda run: float(tried[run]["bits_per_byte"]),
    )


def search(plan: Plan, folder: Path, jobs: int) -> Results:
    """Tries rates with the first seed until the best one of each row lies between two others."""
    kinds = kinds_of(plan)
    tried: dict[Run, Mapping[str, Any]] = {}
    wanted = [Run(*kind, rate) for rate in plan.rates for kind in kinds]
    for _ in range(1 + plan.most_further_rates):
        tried |= results_of(wanted, plan, folder, jobs)
        wanted = []
        for kind in kinds:
            best, rates = best_of(kind, tried).rate, rates_of(kind, tried)
            beyond = {rates[-1]: 2 * best, rates[0]: best / 2}
            wanted += [Run(*kind, beyond[best])] if best in beyond else []
    return tried


def values_of(run: Run, results: Results) -> list[float]:
    """The bits per byte of a run with each seed."""
    return [results[other]["bits_per_byte"] for other in results if replace(other, seed=0) == run]


def table(tried: Results, best: Iterable[Run], results: Results) -> str:
    """The table as Markdown: of one size of embeddings with the rates tried, of several side by side."""
    best = list(best)
    sizes = sorted({EMBEDDINGS[run.embedding] for run in best})
    if len(sizes) == 1:
        rows = [["model", "rates tried", "best", "bits per byte"]]
    else:
        rows = [["model", *chain(*(("rate", f"embedding {size:g}") for size in sizes))]]
    of_model: dict[str, list[str]] = {}
    for run in sorted(best, key=lambda run: EMBEDDINGS[run.embedding]):
        cells = of_model.setdefault(run.model, [run.model])
        if len(sizes) == 1:
            rates = rates_of((run.model, run.embedding), tried)
            cells.append(f"{rates[0]:g} to {rates[-1]:g}")
        cells += [f"{run.rate:g}", comparisons.mean_and_spread(values_of(run, results))]
    return "\n".join(markdown([*rows, *of_model.values()])) + "\n"


def write_metrics(folder: Path, plan: Plan, results: Results) -> None:
    """Writes the bits per byte of all runs as JSON."""
    runs = [
        {
            "model": run.model,
            "embedding_std": EMBEDDINGS[run.embedding],
            "learning_rate": run.rate,
            "seed": run.seed,
            "bits_per_byte": metrics["bits_per_byte"],
        }
        for run, metrics in results.items()
    ]
    size = {"tokens": plan.tokens, "steps": plan.steps, "sequence_length": plan.length}
    write_json(folder / "table.json", {**size, "runs": runs})


def draw(file: Path, tried: Results, best: Sequence[Run], results: Results) -> None:
    """Draws the bits per byte over the rate, and the training losses of the first seed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("No picture was drawn, because matplotlib is not installed.")
        return
    figure = Figure(figsize=(10, 4.5), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    colours = dict(zip(dict.fromkeys(run.model for run in best), COLOURS, strict=False))
    for run in best:
        line = "-" if run.embedding == "one" else "--"
        style = {"color": colours[run.model], "linestyle": line, "linewidth": 1}
        rates = rates_of((run.model, run.embedding), tried)
        values = [tried[replace(run, rate=rate)]["bits_per_byte"] for rate in rates]
        left.plot(rates, values, marker=".", **style)
        tokens, losses = zip(*results[run]["losses"], strict=True)
        label = run.model if run.embedding == "one" else f"{run.model}, small embedding"
        right.plot([n / 1e6 for n in tokens], losses, label=label, **style)
    rates = sorted({run.rate for run in tried})
    left.set_xscale("log", base=2)
    left.set_xticks(rates, [f"{rate:g}" for rate in rates])
    left.set_xlabel("learning rate")
    left.set_ylabel("bits per byte of held-out stories")
    right.set_xlabel("million tokens learned from")
    right.set_ylabel("training loss (nats)")
    right.legend(fontsize="x-small")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    save_picture(figure, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="train minimal models for two steps")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/mixers"), help="folder of all runs"
    )
    parser.add_argument(
        "--tokens", type=int, help="tokens of a run, a multiple of 81,920 (1,310,720)"
    )
    parser.add_argument("--seeds", type=int, help="number of seeds (3)")
    parser.add_argument(
        "--rates", type=float, nargs="+", help="learning rates to begin with (0.004 0.008)"
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), help="rows (all)")
    parser.add_argument(
        "--embeddings", nargs="+", choices=list(EMBEDDINGS), help="sizes of embeddings (one)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="number of runs at a time (1)")
    arguments = parser.parse_args()
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name in ("tokens", "seeds", "rates", "models", "embeddings")
        if (value := getattr(arguments, name))
    }
    if arguments.quick:
        with tempfile.TemporaryDirectory() as folder:
            print(compare(QUICK, Path(folder), arguments.jobs))
        return
    plan = replace(Plan(), **given)
    if plan.tokens % (plan.steps * plan.length):
        parser.error(f"--tokens must be a multiple of {plan.steps * plan.length}")
    try:
        print(compare(plan, arguments.output, arguments.jobs))
    except comparisons.RunFailed as failure:
        parser.exit(1, f"{failure}Repeat the command to go on.\n")
    except KeyboardInterrupt:
        parser.exit(130, "The runs were stopped. Repeat the command to go on.\n")


if __name__ == "__main__":
    main()
