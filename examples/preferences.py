"""Teaches the bundled model to prefer short sentences, by DPO and by ORPO, in minutes on two cores.

python examples/preferences.py [--quick]

The model continues the first words of each story twice. The continuation with the shorter sentences is
the chosen answer, and the other one is rejected. An adapter is trained beside the packed ternary
weights. Then the models continue the prefixes of other stories. DPO shortens the sentences from 9.2 to
5.6 words, and ORPO to 8.3.

On the command line, `mmfree lora --train --train-mode dpo --data DIR` does the same with pairs in DIR.
"""

import argparse
import json
import lzma
import re
import tempfile
from pathlib import Path

import mlx.core as mx

from mlx_mmfree import batch_generate, demo, load, make_sampler
from mlx_mmfree.hub import Tokenizer
from mlx_mmfree.models import Decoder
from mlx_mmfree.platform.allocator import keep_freed_memory
from mlx_mmfree.training.fine_tuning.data import read_data
from mlx_mmfree.training.fine_tuning.fine_tune import fine_tune, held_out_loss, prepare
from mlx_mmfree.training.fine_tuning.preferences import with_reference
from mlx_mmfree.training.fine_tuning.settings import FineTuneSettings

STORIES = Path(__file__).parent / "demo_corpus" / "valid-tinystories.txt.xz"
WORDS = 14


def read_stories(count: int) -> list[str]:
    stories = lzma.decompress(STORIES.read_bytes()).decode().split("<|endoftext|>")[1:]
    return [story.strip() for story in stories if len(story.split()) > 2 * WORDS][:count]


def continued(model: Decoder, tokenizer: Tokenizer, prompts: list[str], seed: int) -> list[str]:
    mx.random.seed(seed)
    sampler = make_sampler(0.8)
    return batch_generate(model, tokenizer, prompts, max_tokens=64, sampler=sampler).texts


def sentence_length(text: str) -> float:
    """The mean number of words of the sentences that are complete."""
    sentences = re.split(r"(?<=[.!?])\s+", text.strip())[:-1]
    return sum(len(sentence.split()) for sentence in sentences) / max(len(sentences), 1)


def write_pairs(file: Path, prompts: list[str], one: list[str], other: list[str]) -> None:
    lines = []
    for prompt, *texts in zip(prompts, one, other, strict=True):
        chosen, rejected = sorted(texts, key=sentence_length)
        if 0 < sentence_length(chosen) < sentence_length(rejected):
            lines.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    file.write_text("\n".join(map(json.dumps, lines)))


def report(name: str, model: Decoder, tokenizer: Tokenizer, prompts: list[str], data: Path) -> None:
    """Prints a row of the table: how the model writes, and how well it still knows the stories."""
    texts = [text for seed in (2, 3) for text in continued(model, tokenizer, prompts, seed)]
    lengths = [length for text in texts if (length := sentence_length(text))]
    plain = FineTuneSettings(data=str(data / "plain"), batch_size=8)
    loss = held_out_loss(model, read_data(plain, tokenizer)["test"], plain)
    print(f"| {name} | {sum(lengths) / max(len(lengths), 1):.1f} | {loss:.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="train for two steps on a few pairs")
    quick = parser.parse_args().quick
    keep_freed_memory()
    learned, held_out, iters = (12, 4, 2) if quick else (600, 150, 120)
    stories = read_stories(learned + held_out)
    prompts = [" ".join(story.split()[:WORDS]) for story in stories]
    unseen = prompts[learned:]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        (data / "plain").mkdir()
        lines = [json.dumps({"text": story}) for story in stories[learned:]]
        (data / "plain" / "test.jsonl").write_text("\n".join(lines))
        model, tokenizer = load(demo.path())
        texts = [continued(model, tokenizer, prompts[:learned], seed) for seed in (0, 1)]
        write_pairs(data / "train.jsonl", prompts[:learned], *texts)
        print("| model | words in a sentence | loss on stories |\n|---|---|---|")
        report("bundled", model, tokenizer, unseen, data)
        for mode in ("dpo", "orpo"):
            settings = FineTuneSettings(
                data=folder,
                adapter_path=f"{folder}/{mode}",
                train_mode=mode,
                lr_schedule={"name": "cosine_decay", "arguments": [2e-4, iters]},
                iters=iters,
                batch_size=2 if quick else 8,
                rank=16,
                scale=2.0,
                num_layers=-1,
            )
            model, tokenizer = load(demo.path())
            prepare(model, settings)
            pairs = read_data(settings, tokenizer)
            if mode == "dpo":
                pairs = with_reference(pairs, model, batch_size=settings.batch_size)
            fine_tune(model, tokenizer, pairs, settings)
            model.eval()
            report(mode.upper(), model, tokenizer, unseen, data)


if __name__ == "__main__":
    main()
