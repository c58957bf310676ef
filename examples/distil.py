"""Makes a float model ternary and compares ways of training it again at equal cost.

python examples/distil.py [--quick] [--seeds N] [--teacher DIR]

The teacher, a small dense Llama, learns from many more tokens than its ternary students. A student is
the teacher with its matrices made ternary, or it begins with random weights:

- distilled: it learns from the data and from the teacher's whole distribution;
- fine-tuned: it learns from the data alone, once for the same steps and once for the processor time of
  the distilled one;
- from scratch: a ternary model of the same shape learns for the same steps.

On the command line, `mmfree convert --model FLOAT --ternarize --to hf --keep-masters` makes the model
ternary, and `mmfree lora --train --model TERNARY --fine-tune-type full --keys '*' --teacher FLOAT --data
DIR` distils it. Two more students come about by other loops, from the same weights and in as many steps:

- `mmfree distil --to same --ternary`, which does both;
- `mmfree train` with `init_from`, which learns the same batches from the data alone.

The students of a seed and of a loop see the same rows in the same order. mlx_mmfree/training/README.md
shows the results of `--seeds 3`, which takes about fifteen minutes on one core.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_mmfree.evaluation import measure_perplexity
from mlx_mmfree.hub import Tokenizer, convert, load, load_model, open_checkpoint
from mlx_mmfree.hub.conversion.to_folder import FloatFormats, ternarized
from mlx_mmfree.models import Decoder, find
from mlx_mmfree.platform.allocator import keep_freed_memory
from mlx_mmfree.training import Settings, train_model
from mlx_mmfree.training.corpus.documents import read_documents
from mlx_mmfree.training.corpus.mixture import Stage
from mlx_mmfree.training.corpus.tokenize import TokenFile, open_token_file, write_token_file
from mlx_mmfree.training.distil.distil import Distillation
from mlx_mmfree.training.distil.settings import DistilSettings
from mlx_mmfree.training.fine_tuning.fine_tune import fine_tune, prepare
from mlx_mmfree.training.fine_tuning.settings import FineTuneSettings
from mlx_mmfree.training.samples import Sample, Samples

CORPUS = Path(__file__).parent / "demo_corpus"
LENGTH, ROWS = 64, 16


@dataclass(frozen=True)
class Plan:
    """The size of the comparison."""

    train: Path = CORPUS / "train-tinystories.txt.xz"
    valid: Path = CORPUS / "valid-tinystories.txt.xz"
    dims: int = 64
    teacher_steps: int = 3000
    student_steps: int = 150
    valid_tokens: int = 32768
    learning_rate: float = 2e-3


QUICK = Plan(
    train=CORPUS / "valid-storybooks.txt",
    valid=CORPUS / "valid-storybooks.txt",
    dims=32,
    teacher_steps=4,
    student_steps=2,
    valid_tokens=300,
)


def train_teacher(folder: Path, plan: Plan) -> None:
    settings = Settings(
        output=str(folder),
        model={
            "model_type": "llama",
            "vocab_size": 512,
            "hidden_size": plan.dims,
            "num_hidden_layers": 3,
            "intermediate_size": 3 * plan.dims,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
        },
        embedding_std=0.02,
        stages=(Stage(1, {str(plan.train): 1}),),
        valid=(str(plan.valid),),
        valid_tokens=4096,
        steps=plan.teacher_steps,
        batch_size=ROWS,
        sequence_length=LENGTH,
        learning_rate=3e-3,
        warmup_steps=plan.teacher_steps // 20,
    )
    train_model(settings)


def read(file: Path, tokenizer: Tokenizer, folder: Path) -> TokenFile:
    """The tokens of a text, which are kept in a folder."""
    made = folder / f"{file.name}.tokens"
    write_token_file(read_documents(file), made, tokenizer)
    return open_token_file(made)


def windows(file: TokenFile) -> Samples:
    tokens = file.tokens[:].astype(np.int32)
    starts = range(0, len(tokens) - LENGTH, LENGTH)
    return Samples([Sample(tokens[start : start + LENGTH + 1]) for start in starts])


class Comparison:
    """The teacher, the data, and the training and measuring of students."""

    def __init__(self, folder: Path, teacher: Path, plan: Plan):
        self.plan = plan
        self.folder = folder
        self.float_model = teacher / "model"
        if not self.float_model.exists():
            train_teacher(teacher, plan)
        self.teacher, self.tokenizer = load(self.float_model)
        self.held_out = read(plan.valid, self.tokenizer, folder)
        self.samples = windows(read(plan.train, self.tokenizer, folder))
        # the float matrices become master weights of ternary ones
        source = ternarized(open_checkpoint(self.float_model))
        convert(source, folder / "ternary", to="hf", formats=FloatFormats(keep_masters=True))

    def loss(self, model: Decoder) -> float:
        """The held-out cross-entropy in nats a token."""
        tokens = self.held_out.tokens[: self.plan.valid_tokens + 1]
        return measure_perplexity(
            model, tokens, self.held_out.header.size_bytes, length=LENGTH
        ).loss

    def ternary_teacher(self) -> Decoder:
        return load_model(self.folder / "ternary", packed=False)

    def random_student(self, seed: int) -> Decoder:
        llama = find("llama")
        config = json.loads((self.folder / "ternary/config.json").read_text())
        mx.random.seed(seed)
        model: Decoder = llama.build(llama.config.from_hub(config))
        return model

    def train(
        self, student: Decoder, name: str, steps: int, rate: float, seed: int, is_distilled: bool
    ) -> tuple[float, float]:
        """Trains all weights of a student. Returns its held-out loss and the processor seconds."""
        settings = FineTuneSettings(
            data=str(self.plan.train),
            adapter_path=str(self.folder / f"{name}-{seed}"),
            fine_tune_type="full",
            keys=("*",),
            num_layers=-1,
            optimizer="adamw",
            lr_schedule={
                "name": "cosine_decay",
                "arguments": [rate, steps],
                "warmup": steps // 20,
            },
            clip_norm=1.0,
            iters=steps,
            batch_size=ROWS,
            quantization_warmup=steps // 5,
            seed=seed,
        )
        prepare(student, settings)
        teacher = self.teacher if is_distilled else None
        start = time.process_time()
        fine_tune(student, self.tokenizer, {"train": self.samples}, settings, teacher=teacher)
        seconds = time.process_time() - start
        return self.loss(student), seconds

    def by_command(self, seed: int) -> float:
        """The held-out loss of the student of `mmfree distil --to same --ternary`."""
        steps, output = self.plan.student_steps, self.folder / f"command-{seed}"
        settings = DistilSettings(
            model=str(self.float_model),
            output=str(output),
            to=("same",),
            ternary=True,
            data=(str(self.plan.train),),
            logits_steps=steps,
            logits_rate=self.plan.learning_rate,
            quantization_warmup=steps // 5,
            batch_size=ROWS,
            sequence_length=LENGTH,
            seed=seed,
        )
        Distillation(settings).run()
        return self.loss(load_model(output / "model"))

    def by_plain_training(self, seed: int) -> float:
        """The held-out loss after the same steps on the same batches, without the teacher's logits."""
        steps, output = self.plan.student_steps, self.folder / f"plain-{seed}"
        settings = Settings(
            output=str(output),
            init_from=str(self.folder / "ternary"),
            stages=(Stage(1, {str(self.plan.train): 1}),),
            steps=steps,
            learning_rate=self.plan.learning_rate,
            warmup_steps=steps // 20,
            quantization_warmup=steps // 5,
            weight_decay=0.0,
            batch_size=ROWS,
            sequence_length=LENGTH,
            seed=seed,
        )
        train_model(settings)
        return self.loss(load_model(output / "model"))

    def students(self, seed: int) -> dict[str, float]:
        """The held-out losses of the students of one seed."""
        plan = self.plan
        steps, rate = plan.student_steps, plan.learning_rate
        result: dict[str, float] = {}
        result["distilled"], distilling_s = self.train(
            self.ternary_teacher(), "distilled", steps, rate, seed, True
        )
        result["fine-tuned, same steps"], tuning_s = self.train(
            self.ternary_teacher(), "tuned", steps, rate, seed, False
        )
        longer = round(steps * max(1.0, distilling_s / tuning_s))
        result["fine-tuned, same processor time"], _ = self.train(
            self.ternary_teacher(), "longer", longer, rate, seed, False
        )
        result["ternary from scratch, same steps"], _ = self.train(
            self.random_student(seed), "scratch", steps, rate, seed, False
        )
        result["mmfree distil --to same --ternary"] = self.by_command(seed)
        result["mmfree train, same steps"] = self.by_plain_training(seed)
        print(
            f"Seed {seed}: a step of distillation took {distilling_s / tuning_s:.2f} times as long."
        )
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="train minimal models for a few steps")
    parser.add_argument("--seeds", type=int, default=1, help="number of students of each kind (1)")
    parser.add_argument(
        "--teacher", type=Path, help="folder in which the teacher is kept for further runs"
    )
    arguments = parser.parse_args()
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        plan = QUICK if arguments.quick else Plan()
        comparison = Comparison(folder, arguments.teacher or folder / "float", plan)
        losses = {
            "float teacher": [comparison.loss(comparison.teacher)],
            "made ternary": [comparison.loss(comparison.ternary_teacher())],
        }
        for seed in range(arguments.seeds):
            for name, value in comparison.students(seed).items():
                losses.setdefault(name, []).append(value)
    print("Held-out loss in nats a token:")
    for name, values in losses.items():
        spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
        print(f"  {name}: {statistics.mean(values):.3f}{spread}")


if __name__ == "__main__":
    main()
