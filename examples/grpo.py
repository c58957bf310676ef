"""Teaches the bundled model to write sentences of six words: by rewards, and by examples beside it.

python examples/grpo.py [--quick] [--seed 0]

A program counts the words, so that no answers are needed for GRPO: the model goes on with stories, eight
times with each, and learns from what was nearer to six words than the others. The plain fine-tune learns
as many steps from stories in which a sentence of six words follows. Both train an adapter beside the
packed ternary weights. This file is also the file of the reward function.

On the command line, `mmfree lora --train --train-mode grpo --data DIR --reward-functions-file FILE` does
the same with prompts in DIR.
"""

import argparse
import json
import lzma
import re
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_mmfree import batch_generate, demo, load, make_sampler
from mlx_mmfree.platform.allocator import keep_freed_memory
from mlx_mmfree.training.fine_tuning.data import read_data
from mlx_mmfree.training.fine_tuning.fine_tune import fine_tune, held_out_loss, prepare
from mlx_mmfree.training.fine_tuning.settings import FineTuneSettings

STORIES = Path(__file__).parent / "demo_corpus" / "valid-tinystories.txt.xz"
WORDS, TOKENS = 6, 24


def first_sentence_words(text: str) -> int:
    """The number of words of the first sentence of a text; 0 if it does not end."""
    sentence = re.match(r"\s*([^.!?]*)[.!?]", text)
    return len(sentence[1].split()) if sentence else 0


def closeness(completions: list[str]) -> list[float]:
    """1 for a first sentence of six words, and less for others."""
    return [max(0.0, 1 - abs(first_sentence_words(text) - WORDS) / WORDS) for text in completions]


def parts(story: str) -> list[tuple[str, str]]:
    """The prefixes of a story that end with a sentence, each with the sentence that follows."""
    sentences = re.findall(r"[^.!?]+[.!?]+[\"']?", story.replace("\n", " "))
    return [("".join(sentences[:n]).strip(), sentences[n]) for n in range(2, len(sentences))]


def write_data(folder: Path, learned: int, held_out: int) -> list[str]:
    """Prompts to answer, examples to learn from, and stories; the held-out prefixes."""
    stories = lzma.decompress(STORIES.read_bytes()).decode().split("<|endoftext|>")[1:]
    both = [[pair for pair in parts(story.strip()) if len(pair[0]) < 300] for story in stories]
    both = [pairs for pairs in both if pairs]
    train, unseen = both[:learned], both[learned : learned + held_out]
    lines = {
        "prompts/train": [{"prompt": pairs[0][0]} for pairs in train],
        "examples/train": [
            {"prompt": before, "completion": sentence}
            for pairs in train
            for before, sentence in pairs
            if first_sentence_words(sentence) == WORDS
        ],
        "stories/test": [{"text": "".join(pairs[-1])} for pairs in unseen],
    }
    for name, values in lines.items():
        file = folder / f"{name}.jsonl"
        file.parent.mkdir()
        file.write_text("\n".join(map(json.dumps, values)))
    return [pairs[0][0] for pairs in unseen]


def report(name: str, model: Any, tokenizer: Any, prompts: list[str], data: Path) -> None:
    """Prints a row of the table: how often the model does the task, and how well it knows stories."""
    mx.random.seed(1)
    model.eval()
    texts = batch_generate(
        model, tokenizer, prompts * 4, max_tokens=TOKENS, sampler=make_sampler(1.0)
    ).texts
    right = sum(first_sentence_words(text) == WORDS for text in texts) / len(texts)
    reward = sum(closeness(texts)) / len(texts)
    plain = FineTuneSettings(data=str(data / "stories"), batch_size=8)
    loss = held_out_loss(model, read_data(plain, tokenizer)["test"], plain)
    print(f"| {name} | {reward:.3f} | {right:.1%} | {loss:.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="train for two steps on a few prompts")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    keep_freed_memory()
    iters, learned, held_out = (2, 8, 4) if arguments.quick else (40, 600, 40)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = write_data(folder, learned, held_out)
        common: dict[str, Any] = {
            "iters": iters,
            "lr_schedule": {"name": "cosine_decay", "arguments": [2e-3, iters]},
            "rank": 16,
            "scale": 2.0,
            "num_layers": -1,
            "steps_per_report": 5,
            "seed": arguments.seed,
        }
        rewarded = {
            "train_mode": "grpo",
            "reward_functions_file": __file__,
            "max_completion_length": TOKENS,
            "batch_size": 2,
            "beta": 0.02,
        }
        shown = {"mask_prompt": True, "batch_size": 8 if arguments.quick else 16}
        runs: dict[str, tuple[str, dict[str, Any]]] = {
            "GRPO": ("prompts", rewarded),
            "plain fine-tune": ("examples", shown),
        }
        print("| model | reward | six words | loss on stories |\n|---|---|---|---|")
        report("bundled", *load(demo.path()), prompts, folder)
        for title, (data, options) in runs.items():
            model, tokenizer = load(demo.path())
            settings = FineTuneSettings(
                data=str(folder / data), adapter_path=str(folder / title), **options, **common
            )
            prepare(model, settings)
            fine_tune(model, tokenizer, read_data(settings, tokenizer), settings)
            report(title, model, tokenizer, prompts, folder)


if __name__ == "__main__":
    main()
