"""Files for the commands of the README files: tiny models under published names, and small files."""

import json
import lzma
import shutil
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import yaml
from PIL import Image

from mlx_mmfree import demo
from mlx_mmfree.hub import save_model
from mlx_mmfree.models import architectures
from tests.hub.checkpoints import (
    GOLDENS,
    tiny_model,
    tiny_of,
    tiny_transformer,
    write_bitnet_checkpoint,
)
from tests.hub.embedder_folder import embedder_folder
from tests.hub.encoder_folder import encoder_folder
from tests.hub.marian_folder import marian_folder
from tests.hub.timm_models import DATA as TIMM
from tests.readme.documents import ROOT, sections
from tests.training.conftest import write_corpus

VOCABULARY = 518


def write_repositories(folder: Path) -> dict[str, Path]:
    """Folder by repository, of the repositories that commands name."""
    names = ("ridger/MMfreeLM-370M", "ridger/MMfreeLM-1.3B", "microsoft/bitnet-b1.58-2B-4T")
    found = {name: folder / name.replace("/", "--") for name in names}
    for name, target in found.items():
        if name.startswith("ridger"):
            _write_matmul_free(target)
        else:
            _write_bitnet(target)
        for file in (GOLDENS / "tokenizer_bpe").glob("tokenizer*.json"):
            shutil.copyfile(file, target / file.name)
    bonsai = "prism-ml/Ternary-Bonsai-8B-mlx-2bit"
    found[bonsai] = _write_bonsai(folder / bonsai.replace("/", "--"))
    encoder, translator = "google/fnet-base", "Helsinki-NLP/opus-mt-en-de"
    found[translator] = marian_folder(folder / translator.replace("/", "--"))
    found[encoder] = encoder_folder(folder / encoder.replace("/", "--"))
    embedder = "microsoft/bitnet-embedding-0.6b"
    found[embedder] = embedder_folder(folder / embedder.replace("/", "--"))
    found["timm/edgenext_xx_small.in1k"] = TIMM / "edgenext"
    return found


def _write_bonsai(folder: Path) -> Path:
    """2-bit codes of MLX's affine format, as published."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 64}
    model = tiny_of("qwen3", vocab_size=VOCABULARY, **sizes)
    nn.quantize(model, group_size=128, bits=2)
    save_model(folder, model, GOLDENS / "tokenizer_bpe")
    return folder


def _write_matmul_free(folder: Path) -> None:
    """16-bit master weights, as published."""
    model = tiny_model(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48)
    model.set_dtype(mx.bfloat16)
    save_model(folder, model)


def _write_bitnet(folder: Path) -> None:
    """Packed as transformers packs, as published, with rows that GGUF's ternary types can hold."""
    model = tiny_transformer(
        "bitnet",
        vocab_size=VOCABULARY,
        num_hidden_layers=1,
        hidden_size=256,
        intermediate_size=256,
        head_dim=64,
    )
    model.set_dtype(mx.bfloat16)
    write_bitnet_checkpoint(folder, model, "autobitlinear")


def write_working_folder(folder: Path) -> None:
    """The checkout as far as commands look at it, with a tiny recipe, and a user's files."""
    folder.mkdir()
    for name in ("generate.py", "convert.py"):
        shutil.copyfile(ROOT / name, folder / name)
    for name in ("text.txt", "book.txt", "prompts.txt"):
        (folder / name).write_text("The queen gave a robe to Ryn Jin.\nHe wore it.\n" * 3)
    shutil.copytree(
        Path(demo.path()), folder / "mlx_mmfree/demo", ignore=shutil.ignore_patterns("*.py", "__*")
    )
    (folder / "names.txt").write_text("one\ntwo\nthree\nfour\nfive\n")
    for name in ("cat.jpg", "dog.png"):
        Image.effect_noise((40, 30), 50).save(folder / name)
    (folder / "corpus").mkdir()
    write_corpus(folder / "corpus" / "texts.txt", 1, documents=200)
    _write_held_out(folder / "examples" / "demo_corpus")
    models = (ROOT / "mlx_mmfree/models/README.md").read_text()
    (folder / "tanh_llama.py").write_text(models.partition("```py\n")[2].partition("```")[0])
    for name, title in (("large", "Large corpora"), ("llama", "In other programs")):
        (folder / f"{name}.yaml").write_text(_yaml_of(title))
    answers = {"completion": "It is {}."}
    preferred = {"chosen": "It is {}.", "rejected": "No, {}."}
    for name, texts in (("data", answers), ("preferences", preferred)):
        (folder / name).mkdir()
        for split in ("train", "valid"):
            lines = [
                {"prompt": f"Number {n}?"} | {key: text.format(n) for key, text in texts.items()}
                for n in range(4)
            ]
            (folder / name / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "problems").mkdir()
    lines = [{"prompt": f"What is {n} and 1?", "answer": n + 1} for n in range(4)]
    (folder / "problems" / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    _write_pets(folder)
    _write_recipes(folder / "examples" / "demo_model", folder / "runs")
    _write_questions(folder / "examples" / "fairytale_questions")


def _write_questions(folder: Path) -> None:
    """A few of the questions about fairy tales."""
    folder.mkdir()
    for file in (ROOT / "examples" / "fairytale_questions").glob("*.jsonl.xz"):
        lines = lzma.decompress(file.read_bytes()).splitlines(keepends=True)
        (folder / file.name).write_bytes(lzma.compress(b"".join(lines[:4])))


def _write_held_out(folder: Path) -> None:
    """Files under the names of the held-out texts of the bundled model."""
    folder.mkdir(parents=True)
    for file in (ROOT / "examples" / "demo_corpus").glob("valid-*"):
        write_corpus(folder / "text", 2, documents=5)
        text = (folder / "text").read_bytes()
        (folder / file.name).write_bytes(lzma.compress(text) if file.suffix == ".xz" else text)


def _write_recipes(folder: Path, runs: Path) -> None:
    """The files of the bundled model's runs, for a smaller model and fewer steps."""
    folder.mkdir(parents=True)
    for name in ("log.jsonl", "log-dense.jsonl", "log-teacher.jsonl", "log-student.jsonl"):
        shutil.copyfile(ROOT / "examples" / "demo_model" / name, folder / name)
    model = {
        "model_type": "hgrn_bit",
        "vocab_size": 300,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
    }
    prefixes: dict[str, dict[str, object]] = {
        "train": {"output": str(runs / "demo"), "model": model},
        "teacher": {
            "output": str(runs / "demo-teacher"),
            "model": model | {"hidden_size": 24, "linear_class": "dense"},
        },
        "student": {
            "output": str(runs / "demo-student"),
            "model": model,
            "teacher": str(runs / "demo-teacher" / "model"),
        },
    }
    text = folder / "train.txt"
    write_corpus(text, 0)
    for name, values in prefixes.items():
        values |= {
            "stages": [{"until": 1, "weights": {str(text): 1}}],
            "steps": 4,
            "batch_size": 2,
            "sequence_length": 16,
            "warmup_steps": 2,
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))


def _write_pets(folder: Path) -> None:
    """Pictures of two classes, and the file for their training, for a smaller model and fewer steps."""
    for split in ("train", "valid"):
        for number, name in enumerate(("cat", "dog")):
            (folder / split / name).mkdir(parents=True)
            for shade in range(2):
                picture = Image.new("RGB", (40, 36), (50 * number, 80 * shade, 90))
                picture.save(folder / split / name / f"{shade}.png")
    recipe = yaml.safe_load(_yaml_of("Images"))
    sizes = architectures()["swiftformer"].tiny["model_args"]
    recipe["model"]["model_args"] |= {**sizes, "img_size": 32}
    recipe |= {"steps": 2, "warmup_steps": 1, "batch_size": 2}
    (folder / "pets.yaml").write_text(yaml.safe_dump(recipe))


def _yaml_of(title: str) -> str:
    """The YAML file that a section of the page on training shows beside its commands."""
    found = sections(ROOT / "mlx_mmfree" / "training" / "README.md")
    [text] = next(part for part in found if part.title == title).blocks("yaml")
    return text
