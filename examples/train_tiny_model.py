"""Trains a tiny MatMul-free language model from scratch and lets it write, in minutes on two cores.

python examples/train_tiny_model.py [--quick]

This is a smoke test of the training loop and does not make a good model. The recipes in
`examples/demo_model` make better ones, the bundled one among them.
"""

import argparse
import tempfile
from pathlib import Path

from mlx_mmfree import generate, load
from mlx_mmfree.platform.allocator import keep_freed_memory
from mlx_mmfree.training import Settings, train_model
from mlx_mmfree.training.corpus.mixture import Stage

CORPUS = Path(__file__).parent / "demo_corpus"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="train a minimal model for a few steps"
    )
    quick = parser.parse_args().quick
    text = "valid-storybooks.txt" if quick else "train-storybooks.txt.xz"
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(
            output=f"{folder}/run",
            model={
                "model_type": "hgrn_bit",
                "vocab_size": 512,
                "hidden_size": 32 if quick else 128,
                "num_hidden_layers": 2,
                "intermediate_size": 64 if quick else 384,
            },
            stages=(Stage(1, {str(CORPUS / text): 1}),),
            valid=(str(CORPUS / "valid-storybooks.txt"),),
            valid_tokens=256 if quick else 2048,
            steps=6 if quick else 400,
            batch_size=4 if quick else 16,
            sequence_length=64,
            warmup_steps=2 if quick else 40,
        )
        result = train_model(settings)
        print({name: round(value, 3) for name, value in result["held_out"].items()})
        model, tokenizer = load(f"{folder}/run/model")
        print(generate(model, tokenizer, "The cat", max_tokens=60))


if __name__ == "__main__":
    main()
