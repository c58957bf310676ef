"""Trains token mixers with dense and ternary linears at equal size, and writes a table of them.

python examples/mixers_and_linears.py [--quick] [--output DIR] [--tokens N] [--seeds N] [--rates R ...]
    [--jobs N]

Each model has 1.38 million parameters: 4 blocks of 128 dims and a vocabulary of 2,048 tokens. All learn
for 320 steps, from the same tokens of TinyStories in the same order, once with `embedding_std: 1`, the
default, and once with an embedding as small as the other weights. The learning rate is the best of
`--rates` with the first seed. The table holds the bits per byte of 200 held-out stories, as mean and
standard deviation over the seeds.

The folder gets `table.md`, `table.json`, `table.png` (extra `plot`) and the folders of all runs. Repeat
the command to go on after a stop: finished runs are not repeated. mlx_mmfree/training/README.md shows
the results.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from mlx_mmfree.evaluation.picture import COLOURS, save_picture
from mlx_mmfree.files.json_file import write_json
from mlx_mmfree.files.replacing import new_file, new_folder
from mlx_mmfree.tokenizer.tokenizer import Tokenizer
from mlx_mmfree.tokenizer.train_vocabulary import train_vocabulary
from mlx_mmfree.training.corpus.documents import read_documents
from mlx_mmfree.training.corpus.tokenize import write_token_file
from mlx_mmfree.training.log import read_log

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
    "BitNet": {"model_type": "bitnet", **HEADS},
}
EMBEDDINGS = {"small": 0.02, "one": 1.0}
"""Standard deviations of the embeddings. That of all other weights is 0.02."""


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
    rates: tuple[float, ...] = (2e-3, 4e-3, 8e-3)
    models: tuple[str, ...] = tuple(MODELS)


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


class RunFailed(Exception):
    """A run ended with an error, or was stopped."""


Results = Mapping[Run, Mapping[str, Any]]


def settings_of(run: Run, plan: Plan) -> dict[str, Any]:
    """What `mmfree train` is told. Paths are relative to the folder of the run."""
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
        raise RunFailed(f"{run.folder}: {ended.stderr}")
    [figure] = re.findall(r"valid/bits_per_byte: (\S+)", ended.stdout)
    records = read_log(home / "log.jsonl")
    figures = {
        "bits_per_byte": float(figure),
        "losses": [[record["tokens"], record["loss"]] for record in records if "loss" in record],
    }
    write_json(home / "result.json", figures)
    return figures


def finished(run: Run, plan: Plan, folder: Path) -> dict[str, Any] | None:
    """What a finished run came to, unless it was another plan's."""
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
    """What each run came to. Those that are not finished are trained, several at a time."""
    found = {run: figures for run in runs if (figures := finished(run, plan, folder))}
    missing = [run for run in runs if run not in found]
    with ThreadPoolExecutor(jobs) as pool:
        started = {pool.submit(train, run, plan, folder): run for run in missing}
        try:
            for number, future in enumerate(as_completed(started), 1):
                run = started[future]
                found[run] = future.result()
                value = f"{found[run]['bits_per_byte']:.3f} bits per byte"
                print(f"[{number} of {len(missing)}] {run.folder}: {value}", flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return found


def compare(plan: Plan, folder: Path, jobs: int) -> str:
    """Runs the comparison. Returns its table."""
    tokenise(plan, folder)
    kinds = [(model, embedding) for model in plan.models for embedding in EMBEDDINGS]
    search = [Run(*kind, rate) for rate in plan.rates for kind in kinds]
    tried = results_of(search, plan, folder, jobs)
    best = {
        kind: min(
            (run for run in search if (run.model, run.embedding) == kind),
            key=lambda run: tried[run]["bits_per_byte"],
        )
        for kind in kinds
    }
    runs = [replace(run, seed=seed) for seed in range(plan.seeds) for run in best.values()]
    results = {**tried, **results_of(runs, plan, folder, jobs)}
    write_figures(folder, plan, search, runs, results)
    draw(folder / "table.png", search, runs, results)
    text = table(best, runs, results)
    with new_file(folder / "table.md") as new:
        new.write_text(text)
    return text


def values_of(run: Run, runs: Iterable[Run], results: Results) -> list[float]:
    """The bits per byte of a run with each seed."""
    return [results[other]["bits_per_byte"] for other in runs if replace(other, seed=0) == run]


def table(best: Mapping[tuple[str, str], Run], runs: list[Run], results: Results) -> str:
    """The table as Markdown."""
    lines = ["| model | rate | `embedding_std: 0.02` | rate | `embedding_std: 1` |"]
    lines.append("|---|---|---|---|---|")
    for model in dict.fromkeys(model for model, _ in best):
        cells = [model]
        for embedding in EMBEDDINGS:
            run = best[model, embedding]
            values = values_of(run, runs, results)
            spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
            cells += [f"{run.rate:g}", f"{statistics.mean(values):.3f}{spread}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write_figures(
    folder: Path, plan: Plan, search: list[Run], runs: list[Run], results: Results
) -> None:
    """Writes the bits per byte of all runs as JSON."""
    figures = [
        {
            "model": run.model,
            "embedding_std": EMBEDDINGS[run.embedding],
            "learning_rate": run.rate,
            "seed": run.seed,
            "bits_per_byte": results[run]["bits_per_byte"],
        }
        for run in dict.fromkeys([*search, *runs])
    ]
    size = {"tokens": plan.tokens, "steps": plan.steps, "sequence_length": plan.length}
    write_json(folder / "table.json", {**size, "runs": figures})


def draw(file: Path, search: list[Run], runs: list[Run], results: Results) -> None:
    """Draws the bits per byte over the rate, and the training losses of the first seed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("No picture was drawn, because matplotlib is not installed.")
        return
    figure = Figure(figsize=(10, 4.5), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    models = dict.fromkeys(run.model for run in runs)
    for model, colour in zip(models, COLOURS, strict=False):
        for embedding, line in zip(EMBEDDINGS, ("--", "-"), strict=True):
            style = {"color": colour, "linestyle": line, "linewidth": 1}
            tried = sorted(
                (run.rate, results[run]["bits_per_byte"])
                for run in search
                if (run.model, run.embedding) == (model, embedding)
            )
            left.plot(*zip(*tried, strict=True), marker=".", **style)
            [run] = [
                run for run in runs if (run.model, run.embedding, run.seed) == (model, embedding, 0)
            ]
            tokens, losses = zip(*results[run]["losses"], strict=True)
            label = model if embedding == "one" else f"{model}, small embedding"
            right.plot([n / 1e6 for n in tokens], losses, label=label, **style)
    rates = sorted({run.rate for run in search})
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
    parser.add_argument("--rates", type=float, nargs="+", help="learning rates (0.002 0.004 0.008)")
    parser.add_argument("--jobs", type=int, default=1, help="number of runs at a time (1)")
    arguments = parser.parse_args()
    names = ("tokens", "seeds", "rates")
    given = {name: value for name, value in vars(arguments).items() if name in names and value}
    if "rates" in given:
        given["rates"] = tuple(given["rates"])
    if arguments.quick:
        with tempfile.TemporaryDirectory() as folder:
            print(compare(QUICK, Path(folder), arguments.jobs))
        return
    plan = replace(Plan(), **given)
    if plan.tokens % (plan.steps * plan.length):
        parser.error(f"--tokens must be a multiple of {plan.steps * plan.length}")
    try:
        print(compare(plan, arguments.output, arguments.jobs))
    except RunFailed as failure:
        parser.exit(1, f"{failure}Repeat the command to go on.\n")
    except KeyboardInterrupt:
        parser.exit(130, "The runs were stopped. Repeat the command to go on.\n")


if __name__ == "__main__":
    main()
