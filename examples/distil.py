"""Turns a float model ternary and lets it recover by learning from itself: minutes on two cores.

python examples/distil.py [--quick]

A small dense Llama is trained, its matrices are made ternary, and the ternary model learns from the
distribution of the float one. The last step from the command line: `mmfree lora --train --model
TERNARY --fine-tune-type full --teacher FLOAT --data DIR`.
"""

import argparse
import tempfile
from pathlib import Path

from mlx_mmfree.evaluation import measure_perplexity
from mlx_mmfree.hub import Tokenizer, convert, load, load_model, open_checkpoint
from mlx_mmfree.hub.folder_plan import FloatForms
from mlx_mmfree.hub.ternarize import ternarized
from mlx_mmfree.models import Decoder
from mlx_mmfree.platform.allocator import keep_freed_memory
from mlx_mmfree.training import Settings, train_language_model
from mlx_mmfree.training.corpus import END_OF_TEXT, Stage, TokenStream, tokenize
from mlx_mmfree.training.distillation import distillation_loss
from mlx_mmfree.training.fine_tune import fine_tune, prepare
from mlx_mmfree.training.fine_tune_settings import FineTuneSettings
from mlx_mmfree.training.samples import Sample, Samples

CORPUS = Path(__file__).parent / "demo_corpus"
TRAIN, VALID = CORPUS / "train-storybooks.txt.xz", CORPUS / "valid-storybooks.txt"
LENGTH = 64


def train_float_model(folder: str, corpus: Path, steps: int, dims: int) -> None:
    settings = Settings(
        output=folder,
        model={
            "model_type": "llama",
            "vocab_size": 512,
            "hidden_size": dims,
            "num_hidden_layers": 3,
            "intermediate_size": 3 * dims,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
        },
        stages=(Stage(1, {str(corpus): 1}),),
        valid=(str(VALID),),
        valid_tokens=4096,
        steps=steps,
        batch_size=16,
        sequence_length=LENGTH,
        learning_rate=3e-3,
        warmup_steps=steps // 10,
    )
    train_language_model(settings)


def read(file: Path, tokenizer: Tokenizer) -> TokenStream:
    [end_of_text] = tokenizer.encode(END_OF_TEXT, add_special_tokens=False, parse_special=True)
    return tokenize(file, lambda text: tokenizer.encode(text, parse_special=False), end_of_text)


def windows(stream: TokenStream, count: int | None = None) -> Samples:
    starts = range(0, len(stream.tokens) - LENGTH, LENGTH)[:count]
    return Samples([Sample(stream.tokens[start : start + LENGTH + 1]) for start in starts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few steps of a minimal model")
    quick = parser.parse_args().quick
    keep_freed_memory()
    corpus = VALID if quick else TRAIN
    with tempfile.TemporaryDirectory() as folder:
        train_float_model(f"{folder}/float", corpus, 10 if quick else 1000, 32 if quick else 128)
        teacher, tokenizer = load(f"{folder}/float/model")
        held_out = read(VALID, tokenizer)
        tokens = held_out.tokens[: 1000 if quick else None]

        def loss(model: Decoder) -> float:
            return measure_perplexity(model, tokens, held_out.size_bytes, length=LENGTH).loss

        # the float matrices become the masters of ternary ones
        source = ternarized(open_checkpoint(f"{folder}/float/model"))
        convert(source, f"{folder}/ternary", to="hf", forms=FloatForms(keep_masters=True))
        student = load_model(f"{folder}/ternary", packed=False)
        losses = {"float": loss(teacher), "ternary, before": loss(student)}
        iters = 4 if quick else 500
        settings = FineTuneSettings(
            data=str(corpus),
            adapter_path=f"{folder}/recovered",
            fine_tune_type="full",
            learning_rate=2e-3,
            lr_schedule={"name": "cosine_decay", "arguments": [2e-3, iters]},
            iters=iters,
            batch_size=16,
            num_layers=-1,
            steps_per_eval=100,
            quantization_warmup=iters // 5,
        )
        data = {"train": windows(read(corpus, tokenizer)), "valid": windows(held_out, 16)}
        prepare(student, settings)
        distilled = distillation_loss(teacher, student)
        fine_tune(student, tokenizer, data, settings, loss=distilled)
        losses["ternary, distilled"] = loss(load_model(f"{folder}/recovered/model"))
    print("Held-out loss, nats a token:")
    for name, value in losses.items():
        print(f"  {name}: {value:.3f}")


if __name__ == "__main__":
    main()
