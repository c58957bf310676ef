"""Teaches the bundled model to answer questions about fairy tales with LoRA, in minutes on two cores.

python examples/lora_fairytales.py [--quick]

The packed ternary weights stay as they are, and an adapter of low rank is trained beside them. A model
of 9.3 million weights learns what an answer looks like (held-out loss 4.79 before, 3.87 after), but not
how to find it.

On the command line, `mmfree lora --train --mask-prompt --data examples/fairytale_questions` does the
same.
"""

import argparse
import json
import lzma
import tempfile
from pathlib import Path

from mlx_mmfree import demo, generate, load
from mlx_mmfree.platform.allocator import keep_freed_memory
from mlx_mmfree.training.fine_tuning.data import read_data
from mlx_mmfree.training.fine_tuning.fine_tune import fine_tune, held_out_loss, prepare
from mlx_mmfree.training.fine_tuning.settings import FineTuneSettings

QUESTIONS = Path(__file__).parent / "fairytale_questions"
SHOWN = (0, 30, 100)


def decompress_questions(folder: Path, limit: int | None) -> None:
    for file in QUESTIONS.glob("*.jsonl.xz"):
        lines = lzma.decompress(file.read_bytes()).splitlines(keepends=True)
        (folder / file.stem).write_bytes(b"".join(lines[:limit]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="train for a few steps on a few questions"
    )
    quick = parser.parse_args().quick
    keep_freed_memory()
    iters = 2 if quick else 200
    with tempfile.TemporaryDirectory() as folder:
        decompress_questions(Path(folder), 4 if quick else None)
        settings = FineTuneSettings(
            data=folder,
            adapter_path=f"{folder}/adapters",
            mask_prompt=True,
            lr_schedule={"name": "cosine_decay", "arguments": [2e-3, iters]},
            iters=iters,
            batch_size=1 if quick else 8,
            rank=16,
            scale=2.0,
            dropout=0.1,
            num_layers=-1,
            val_batches=1 if quick else 8,
            steps_per_eval=50,
        )
        model, tokenizer = load(demo.path())
        data = read_data(settings, tokenizer)
        lines = Path(folder, "test.jsonl").read_text().splitlines()
        shown = [json.loads(lines[n % len(lines)]) for n in SHOWN]

        def answers() -> list[str]:
            texts = [
                generate(model, tokenizer, q["prompt"], max_tokens=2 if quick else 12)
                for q in shown
            ]
            return [text.split("\n")[0].strip() for text in texts]

        before, loss_before = answers(), held_out_loss(model, data["test"], settings)
        print("Training", ", ".join(sorted(prepare(model, settings))[:7]), "...")
        fine_tune(model, tokenizer, data, settings)
        loss_after = held_out_loss(model, data["test"], settings)
        for question, old, new in zip(shown, before, answers(), strict=True):
            print("\n" + question["prompt"].removesuffix("\nAnswer:"))
            print(f"  right:  {question['completion'].strip()}\n  before: {old}\n  after:  {new}")
    print(f"\nHeld-out loss of the answers: {loss_before:.3f} before, {loss_after:.3f} after")


if __name__ == "__main__":
    main()
