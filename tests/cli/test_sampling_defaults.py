"""Commands sample as the user says, then as the model's files say, then as its makers recommend."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlx_mmfree.cli import chat, generate, main, serve
from mlx_mmfree.cli.parts.flags import settle_sampling
from mlx_mmfree.hub import convert, load_model, open_checkpoint, save_model
from mlx_mmfree.models import llama

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
Captured = pytest.CaptureFixture[str]
MAKERS = {
    "mlx_qwen35_2bit_g128": {"temp": 0.7, "top_p": 0.95, "top_k": 20},
    "mlx_qwen3_1bit_g128": {"temp": 0.5, "top_p": 0.85, "top_k": 20},
    "prism_schema1": {"temp": 1.0, "top_p": 0.95, "top_k": 20},
    "gguf_qwen35_pq2_0_rotated/model.gguf": {"temp": 1.0, "top_p": 0.95, "top_k": 20},
    "qwen35_hub": {},
}


class Files:
    """The tokenizer of a model with these files."""

    def __init__(self, folder: Path):
        self.folder = folder


@pytest.mark.parametrize("name", MAKERS)
def test_what_the_makers_recommend(tmp_path: Path, name: str) -> None:
    model = load_model(GOLDENS / name)
    args = generate.build_parser().parse_args([])
    line = settle_sampling(args, model, Files(tmp_path))
    want = {"temp": 0.0, "top_p": 1.0, "top_k": 0, "presence_penalty": 0.0} | MAKERS[name]
    assert {key: getattr(args, key) for key in want} == want
    assert line.startswith("Sampling as the makers of this model recommend: ") is bool(MAKERS[name])


def test_bonsai_2_without_reasoning(tmp_path: Path) -> None:
    args = chat.build_parser().parse_args(["--top-k", "7"])
    line = settle_sampling(
        args, load_model(GOLDENS / "prism_schema1"), Files(tmp_path), thinks=False
    )
    assert (args.temp, args.top_p, args.top_k, args.presence_penalty) == (0.7, 0.8, 7, 1.5)
    assert line.endswith(": --temp 0.7 --top-p 0.8 --presence-penalty 1.5.")


def with_file(folder: Path, target: Path, **values: Any) -> Path:
    shutil.copytree(folder, target)
    (target / "generation_config.json").write_text(json.dumps(values))
    return target


def test_the_file_goes_before_the_makers(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.3}')
    args = chat.build_parser().parse_args([])
    line = settle_sampling(args, load_model(GOLDENS / "prism_schema1"), Files(folder))
    assert (args.temp, args.top_p, args.top_k) == (0.3, chat.TOP_P, 0)
    assert line == "Sampling as generation_config.json says: --temp 0.3."


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ((), "--temp 0.9 --top-p 0.8 --repetition-penalty 1.1 --repetition-context-size 131072"),
        (("--temp", "0"), "--top-p 0.8 --repetition-penalty 1.1 --repetition-context-size 131072"),
        (("--repetition-penalty", "1"), "--temp 0.9 --top-p 0.8"),
        (("--temp", "0", "--top-p", "1", "--repetition-penalty", "1"), ""),
    ],
)
def test_what_a_user_gives_wins(
    folder: Path, tmp_path: Path, given: tuple[str, ...], line: str, capsys: Captured
) -> None:
    values = {"temperature": 0.9, "top_p": 0.8, "repetition_penalty": 1.1}
    model = with_file(folder, tmp_path / "m", **values)
    command = ["generate", "--model", str(model), "--prompt", "Hi", "--max-tokens", "3", *given]
    assert main(command) == 0
    reported = [
        text for text in capsys.readouterr().err.splitlines() if text.startswith("Sampling")
    ]
    assert reported == ([f"Sampling as generation_config.json says: {line}."] if line else [])


def test_zero_stays_greedy(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    model = with_file(folder, tmp_path / "m", do_sample=True, temperature=5.0)
    texts = []
    for source, given in ((folder, ()), (model, ("--temp", "0")), (model, ())):
        command = ["--model", str(source), "--prompt", "Hi", "--max-tokens", "24", "--seed", "3"]
        assert main(["generate", *command, *given]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_a_wrong_value_is_refused_in_one_line(
    folder: Path, tmp_path: Path, capsys: Captured
) -> None:
    model = with_file(folder, tmp_path / "m", top_p="0.9")
    assert main(["generate", "--model", str(model), "--prompt", "Hi"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "[generation_config.json] 'top_p' must be a number above 0 and up to 1" in line


def test_gguf_files_carry_it_both_ways(tmp_path: Path, capsys: Captured) -> None:
    values = {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.95}
    sizes = {"vocab_size": 518, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = llama.Config(**sizes, num_attention_heads=2)
    save_model(tmp_path / "plain", llama.build(config), GOLDENS / "tokenizer_bpe")
    model = with_file(tmp_path / "plain", tmp_path / "m", **values)
    convert(open_checkpoint(str(model)), tmp_path / "g", to="gguf", check=False)
    [file] = (tmp_path / "g").glob("*.gguf")
    assert main(["generate", "--model", str(file), "--prompt", "Hi", "--max-tokens", "2"]) == 0
    line = f"Sampling as {file.name} says: --temp 0.9 --top-p 0.95 --top-k 20."
    assert line in capsys.readouterr().err.splitlines()
    convert(open_checkpoint(str(file)), tmp_path / "again", check=False)
    again = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert {key: again[key] for key in values} == values


def test_chat_and_serve_have_penalties() -> None:
    for command in (chat, serve):
        args = command.build_parser().parse_args(["--presence-penalty", "1.5"])
        assert args.presence_penalty == 1.5 and args.repetition_penalty is None


@pytest.mark.parametrize(
    ("given", "variables"),
    [
        ((), {}),
        (("--reasoning-effort", "low"), {"reasoning_effort": "low"}),
        (("--reasoning-effort", "none"), {"enable_thinking": False}),
    ],
)
def test_efforts_are_variables_of_the_template(
    given: tuple[str, ...], variables: dict[str, Any]
) -> None:
    from mlx_mmfree.cli.parts.prompts import template_variables

    for command in (generate, chat, serve):
        assert template_variables(command.build_parser().parse_args(given)) == variables
