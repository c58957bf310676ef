"""Output of commands on a terminal about hostile tokens, names, keys, templates and addresses."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from mlx_mmfree.hub import save_model
from tests.fuzz.case import command_class
from tests.fuzz.commands import CommandRefused, run
from tests.fuzz.hostile import CONTROLS, TERMINAL_CONTROLS
from tests.hub.checkpoints import GOLDENS, split_safetensors, tiny_model, write_safetensors

_PASSWORD = "hf_" + "s3cret" * 6
_ODD_FLAGS = (
    "nan",
    "-1",
    "1e400",
    "",
    "0",
    "9" * 30,
    CONTROLS,
    "\u0661",
    "1e5",
    "-0",
    "true",
    "[]",
)
_GENERATE_FLAGS = (
    *("--temp", "--top-p", "--min-p", "--top-k", "--seed", "--max-tokens", "--stop", "--dtype"),
    *("--repetition-penalty", "--prefill-step-size", "--chat-template-config", "--wired-limit"),
    *("--extra-eos-token", "--max-kv-size", "--kv-bits", "--batch-size", "--prompt", "--revision"),
    *("--data", "--prompt-cache-file", "--draft-model", "--adapter-path", "--latent"),
)
_NEEDED_FLAGS = {
    "upload": ["--upload-repo", "X"],
    "lora": ["--data", "X", "--train"],
    "cache_prompt": ["--prompt-cache-file", "x", "--prompt", "a"],
    "perplexity": ["--data", "X"],
    "fuse": ["--adapter-path", "X", "--save-path", "x"],
}
Change = Callable[[Path, random.Random], list[str]]


def make_sources(folder: Path) -> None:
    """A model with capacity for more tokens."""
    model = tiny_model(vocab_size=640, hidden_size=16, intermediate_size=24)
    save_model(folder, model, GOLDENS / "tokenizer_bpe")


def _order(rng: random.Random) -> str:
    return rng.choice((CONTROLS, *TERMINAL_CONTROLS)) + rng.choice(("", "a", "\n"))


def _generate(folder: Path, *flags: str) -> list[str]:
    return ["generate", "--model", str(folder), "--max-tokens", "20", "--prompt", "a", *flags]


def hostile_tokens(folder: Path, rng: random.Random) -> list[str]:
    file = folder / "tokenizer.json"
    document = json.loads(file.read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    document["added_tokens"] += [
        {"id": number, "content": f"{_order(rng)}{number}", "special": False, **flags}
        for number in range(518, 640)
    ]
    file.write_text(json.dumps(document))
    command = rng.choice((("--temp", "50", "--seed", "3"), ("--json",), ("--verbose", "F")))
    return _generate(folder, "--ignore-chat-template", *command)


def hostile_template(folder: Path, rng: random.Random) -> list[str]:
    source = rng.choice(("{{ raise_exception('X') }}", "{{ 'X' + 1 }}", "{% X %}", "{{ X }}", "X"))
    (folder / "chat_template.jinja").write_text(source.replace("X", _order(rng)))
    return _generate(folder)


def hostile_settings(folder: Path, rng: random.Random) -> list[str]:
    file = folder / rng.choice(("config.json", "tokenizer_config.json", "tokenizer.json"))
    document = json.loads(file.read_text())
    key = rng.choice((*document, _order(rng)))
    document[key] = rng.choice((_order(rng), {_order(rng): 1}, [_order(rng)]))
    file.write_text(json.dumps(document))
    return _generate(folder)


def hostile_tensor_names(folder: Path, rng: random.Random) -> list[str]:
    header, data = split_safetensors(folder / "model.safetensors")
    header[_order(rng)] = header.pop(rng.choice(sorted(header)))
    write_safetensors(folder / "model.safetensors", header, data)
    return _generate(folder)


def hostile_adapter(folder: Path, rng: random.Random) -> list[str]:
    adapter = folder / "adapter"
    adapter.mkdir()
    options = {"rank": 1, "scale": 1.0, "dropout": 0.0, _order(rng): 1}
    kind = rng.choice(("lora", _order(rng)))
    config = {"fine_tune_type": kind, "lora_parameters": options, "num_layers": 1}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    names = (f"{_order(rng)}.lora_a", f"{_order(rng)}.lora_b")
    entry = {"dtype": "F32", "shape": [1, 1]}
    header = {name: {**entry, "data_offsets": [4 * n, 4 * n + 4]} for n, name in enumerate(names)}
    write_safetensors(adapter / "adapters.safetensors", header, bytes(8))
    return _generate(folder, "--adapter-path", str(adapter))


def hostile_names(folder: Path, rng: random.Random) -> list[str]:
    name = _order(rng).replace("/", "")
    (folder / f"{name}.txt").touch()
    (folder / f".{name}").mkdir()
    return ["upload", "--path", str(folder), "--upload-repo", "me/model", "--dry-run"]


def hostile_data(folder: Path, rng: random.Random) -> list[str]:
    data = folder / "data"
    data.mkdir()
    line = json.dumps({rng.choice(("text", _order(rng))): rng.choice((_order(rng), 5))})
    (data / "train.jsonl").write_text(rng.choice((line, _order(rng), f'{{"text": "{_order(rng)}')))
    flags = ["--train", "--iters", "1", "--batch-size", "1", "--adapter-path", str(folder / "run")]
    return ["lora", "--model", str(folder), "--data", str(data), *flags]


def hostile_yaml(folder: Path, rng: random.Random) -> list[str]:
    file = folder / "run.yaml"
    order = json.dumps(_order(rng))
    file.write_text(
        rng.choice((f"{order}: 1\n", f"output: {order}\n", f"a: {order}\nb", _order(rng)))
    )
    return rng.choice((["train", "--config", str(file)], ["lora", "--config", str(file)]))


def password(folder: Path, rng: random.Random) -> list[str]:
    address = rng.choice(("https://me:X@huggingface.co/a/b", "https://huggingface.co/a/b?token=X"))
    model = rng.choice((address, "me:X@a/b", "X", "a/X")).replace("X", _PASSWORD)
    name = rng.choice(
        ("generate", "convert", "perplexity", "upload", "lora", "fuse", "cache_prompt")
    )
    flag = "--path" if name == "upload" else "--model"
    extra = _NEEDED_FLAGS.get(name, [])
    return [name, flag, model, *(model if text == "X" else text for text in extra)]


def odd_flags(folder: Path, rng: random.Random) -> list[str]:
    flags = []
    for flag in rng.sample(_GENERATE_FLAGS, rng.choice((1, 1, 2))):
        flags += [flag, rng.choice(_ODD_FLAGS)]
    return _generate(folder, *flags)


_CHANGES: tuple[Change, ...] = (
    hostile_tokens,
    hostile_template,
    hostile_settings,
    hostile_tensor_names,
    hostile_adapter,
    hostile_names,
    hostile_data,
    hostile_yaml,
    password,
    odd_flags,
    odd_flags,
)


def mutate(sources: Path, target: Path, rng: random.Random) -> str:
    """Hides orders to the terminal somewhere in a model folder, or in the flags."""
    shutil.copytree(sources, target / "model")
    change = rng.choice(_CHANGES)
    arguments = change(target / "model", rng)
    (target / "arguments.json").write_text(json.dumps(arguments))
    return f"{change.__name__}: {arguments[3:]!r:.300}"


def exercise(folder: Path, rng: random.Random) -> None:
    """Runs a command on a terminal; neither orders nor passwords may come out."""
    arguments = json.loads((folder / "arguments.json").read_text())
    try:
        text = run(arguments, folder, lambda: os.chdir(folder), on_terminal=True)
    except CommandRefused as refused:
        text = str(refused)
    printed = "".join(file.read_text(errors="replace") for file in folder.glob("*printed.txt"))
    if _PASSWORD in printed:
        raise AssertionError(f"{arguments} shows the password: {text[-300:]}")
    if text.startswith("error: "):
        raise CommandRefused(text)


CLASS = command_class(make_sources, mutate, exercise)
