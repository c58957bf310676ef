"""`mmfree generate` on a tiny local model."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree import demo, native
from mlx_mmfree.cli import main
from mlx_mmfree.cli.parts.terminal import ReadingBar
from mlx_mmfree.generation import generate, stream_generate
from mlx_mmfree.generation.decode import Decoding
from mlx_mmfree.generation.scheduling import Scheduler
from mlx_mmfree.hub import Tokenizer, load, load_tokenizer
from mlx_mmfree.platform.device import DeviceInfo

Captured = pytest.CaptureFixture[str]
BARE = "--ignore-chat-template"


def expected(folder: Path, prompt: Any, **options: Any) -> str:
    model, tokenizer = load(folder)
    return generate(model, tokenizer, prompt, **{"max_tokens": 8} | options)


def run(folder: Path, *arguments: str) -> int:
    return main(["generate", "--model", str(folder), "-m", "8", *arguments])


def refusal(capsys: Captured) -> str:
    """The one line that a mistake leaves."""
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ") and shown.err.count("\n") == 1
    return shown.err


def set_stdin(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_text_on_stdout_and_statistics_on_stderr(folder: Path, capsys: Captured) -> None:
    assert run(folder, "-p", "The dog", BARE) == 0
    shown = capsys.readouterr()
    assert shown.out == expected(folder, "The dog") + "\n"
    prompt, generation, memory = shown.err.splitlines()
    assert prompt.startswith("Prompt: ") and prompt.endswith(" tokens-per-sec")
    assert generation.startswith("Generation: 8 tokens, ")
    assert memory.startswith("Peak memory: ") and memory.endswith(" GB")


@pytest.mark.exhaustive
@pytest.mark.parametrize("prompts", [1, 2])
def test_metrics_follow_the_text_in_a_file_of_both(
    folder: Path, tmp_path: Path, prompts: int
) -> None:
    (tmp_path / "prompts.txt").write_text("Hello\n" * prompts)
    source = ["--prompt", "Hello"] if prompts == 1 else ["--data", str(tmp_path / "prompts.txt")]
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "mlx_mmfree",
            "generate",
            "--model",
            str(folder),
            *source,
            "-m",
            "3",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        # as a shell starts it
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    before, _, after = ended.stdout.rpartition("\nPrompt: ")
    assert before and after.endswith(" GB\n")


def test_quiet(folder: Path, capsys: Captured) -> None:
    assert run(folder, "--verbose", "F") == 0
    assert capsys.readouterr().err == ""


def test_json(folder: Path, capsys: Captured) -> None:
    assert run(folder, "--json", BARE, "-p", "The dog") == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert (shown.err, shown.out.count("\n")) == ("", 1)
    assert set(result) == {
        "model",
        "text",
        "prompt_tokens",
        "prompt_tps",
        "generation_tokens",
        "generation_tps",
        "peak_memory",
        "finish_reason",
    }
    assert result["model"] == str(folder)
    assert result["text"] == expected(folder, "The dog")
    assert (result["generation_tokens"], result["finish_reason"]) == (8, "length")


def test_the_demo_model_and_a_story_are_the_default(
    folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "path", lambda: folder)
    assert main(["generate", "-m", "8", BARE]) == 0
    shown = capsys.readouterr()
    assert shown.out == expected(folder, "Once upon a time") + "\n"
    assert shown.err.startswith("The prompt is: Once upon a time\n")
    assert main(["generate", "-m", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "demo"


@pytest.mark.skipif(native.unavailable() is not None, reason="needs the compiled CPU kernels")
def test_the_packaged_model_writes_what_the_readme_shows(capsys: Captured) -> None:
    prompt = "Once upon a time"
    arguments = ["--temp", "0.7", "--top-p", "0.9", "--max-tokens", "150", "--seed", "1"]
    with mx.stream(mx.cpu):
        assert main(["generate", "--prompt", prompt, *arguments]) == 0
    readme = (Path(demo.__file__).parent / "README.md").read_text()
    quotes = re.findall(r"(?:^> .*\n)+", readme, re.MULTILINE)
    shown = next(quote for quote in quotes if quote.startswith(f"> {prompt}"))
    assert (prompt + capsys.readouterr().out).split() == shown.replace("> ", "").split()


def test_an_unknown_backend_in_the_environment_is_one_line(
    folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_MMFREE_BACKEND", "fast")
    assert run(folder) == 2
    assert "'MLX_MMFREE_BACKEND' must be one of metal" in refusal(capsys)


def test_an_unknown_product_in_the_environment_is_one_line_on_a_cpu_too(
    folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_MMFREE_PRODUCT", "fastest")
    with mx.stream(mx.cpu):
        assert run(folder) == 2
    shown = refusal(capsys)
    assert "'MLX_MMFREE_PRODUCT' must be one of default, groups" in shown
    assert "'fastest'. Name one of them, or unset it." in shown
    monkeypatch.setenv("MLX_MMFREE_PRODUCT", "groups")
    assert run(folder) == 0


def test_missing_demo_files_are_named(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "__file__", str(tmp_path / "__init__.py"))
    (tmp_path / "config.json").write_text("{}")
    assert main(["generate"]) == 2
    assert "lacks model.safetensors, tokenizer.json" in refusal(capsys)


def test_chat_template(folder: Path, capsys: Captured) -> None:
    _, tokenizer = load(folder)
    assert run(folder, "-p", "Hello", "--system-prompt", "Be kind.") == 0
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello"},
    ]
    ids = tokenizer.apply_chat_template(messages)
    assert capsys.readouterr().out == expected(folder, ids) + "\n"
    assert run(folder, "-p", "Hello", "--prefill-response", "Well, <|eot_id|>") == 0
    ids = tokenizer.apply_chat_template(messages[1:])
    plain = tokenizer.encode("Well, <|eot_id|>", add_special_tokens=False, parse_special=False)
    assert capsys.readouterr().out == expected(folder, [*ids, *plain]) + "\n"


def test_chat_template_variables(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "chat_template.jinja").write_text("{{ word }} {{ messages[0]['content'] }}")
    assert run(copy, "-p", "Hello", "--chat-template-config", '{"word": "Oh"}') == 0
    _, tokenizer = load(folder)
    ids = tokenizer.encode("Oh Hello", add_special_tokens=False)
    assert capsys.readouterr().out == expected(folder, ids) + "\n"


def test_standard_input(folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    set_stdin(monkeypatch, "Où est\\n\n".encode())
    assert run(folder, "-p", "-", BARE) == 0
    assert capsys.readouterr().out == expected(folder, "Où est\\n\n") + "\n"


def test_escapes_in_a_prompt(folder: Path, capsys: Captured) -> None:
    assert run(folder, "-p", r"A\n\tB", BARE) == 0
    assert capsys.readouterr().out == expected(folder, "A\n\tB") + "\n"


def test_stop_strings_and_tokens(folder: Path, capsys: Captured) -> None:
    model, tokenizer = load(folder)
    steps = list(stream_generate(model, tokenizer, "The dog", max_tokens=8))
    text = "".join(step.text for step in steps)
    stop = text[3:5]
    assert run(folder, "-p", "The dog", BARE, "--json", "--stop", "zzz", stop) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["text"], result["finish_reason"]) == (text[: text.index(stop)], "stop")
    token = str(steps[2].token)
    assert run(folder, "-p", "The dog", BARE, "--json", "--extra-eos-token", token) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["finish_reason"] == "stop"
    assert result["generation_tokens"] <= 3


def test_seed_and_sampling(folder: Path, capsys: Captured) -> None:
    flags = ["--temp", "1.5", "--top-p", "0.99", "--top-k", "200", "--min-p", "0.001"]
    flags += ["--min-tokens-to-keep", "3", "--xtc-probability", "0.5", "--xtc-threshold", "0.2"]
    texts = []
    for seed in ("1", "1", "2"):
        assert run(folder, *flags, "--seed", seed) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_penalties(folder: Path, capsys: Captured) -> None:
    flags = ["--repetition-penalty", "1e6", "--repetition-context-size", "3"]
    flags += ["--presence-penalty", "1e6", "--frequency-penalty", "1"]
    assert main(["generate", "--model", str(folder), "-m", "60", BARE, *flags, "--json"]) == 0
    penalised = json.loads(capsys.readouterr().out)["text"]
    assert penalised != expected(folder, "Once upon a time", max_tokens=60)


def test_float16_and_memory_flags(folder: Path, capsys: Captured) -> None:
    flags = ["--dtype", "float16", "--memory-margin", "1", "--cache-limit", "0.5"]
    flags += ["--wired-limit", "0", "--memory-limit", "8", "--prefill-step-size", "2"]
    before = mx.set_cache_limit(77_000_000)
    assert run(folder, *flags) == 0
    assert mx.set_cache_limit(before) == 77_000_000
    assert "Generation: 8 tokens" in capsys.readouterr().err


def test_what_may_not_fit_is_one_warning(
    folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_mmfree.generation import memory

    small = DeviceInfo("Toy", "metal", 10**6, 10**5, None)
    monkeypatch.setattr(memory, "device_info", lambda: small)
    assert run(folder, "--verbose", "F", "--prefill-step-size", "64") == 0
    shown = capsys.readouterr().err
    assert shown.startswith("warning: [memory] the model needs ")
    assert shown.count("\n") == 1
    tiny = DeviceInfo("Toy", "metal", 1000, 1000, None)
    monkeypatch.setattr(memory, "device_info", lambda: tiny)
    assert run(folder) == 2
    assert "[memory] the weights need" in refusal(capsys)


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_prompts_of_a_file(name: str, folder: Path, tmp_path: Path, capsys: Captured) -> None:
    prompts = ["The dog", "A cat sat on\tthe mat.", "Lily"]
    file = tmp_path / name
    if file.suffix == ".jsonl":
        rows: list[Any] = [{"prompt": prompts[0]}, prompts[1], {"prompt": prompts[2]}]
        file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    else:
        # as an editor for Windows writes it
        file.write_text("\ufeff" + "\n\n".join(prompts) + "\r\n", encoding="utf-8")
    arguments = ["--data", str(file), "--batch-size", "2", BARE]
    assert run(folder, *arguments) == 0
    texts = [expected(folder, prompt) for prompt in prompts]
    shown = capsys.readouterr()
    assert shown.out == "\n==========\n".join(texts) + "\n"
    assert "Generation: 24 tokens" in shown.err
    assert run(folder, *arguments, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["text"] for row in result["results"]] == texts
    assert result["generation_tokens"] == sum(r["generation_tokens"] for r in result["results"])
    assert result["prompt_tokens"] == sum(r["prompt_tokens"] for r in result["results"])
    assert [row["finish_reason"] for row in result["results"]] == ["length"] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", ""], "--prompt must not be empty"),
        (["-p", "", BARE], "--prompt must not be empty"),
        (["-p", "a\udcff", BARE], "surrogate"),
        (["-p", "a\udcff"], "surrogate"),
        (["-m", "0"], "--max-tokens/-m: must be a whole number from 1 to 2147483647 but got '0'"),
        (["-m", "many"], "must be a whole number from 1 to 2147483647 but got 'many'"),
        (["--temp", "-1"], "--temp must be a finite number from 0"),
        (["--temp", "hot"], "--temp: invalid float value: 'hot'"),
        (["--top-p", "2"], "--top-p must be above 0"),
        (["--top-k", "-3"], "--top-k: must be a whole number from 0 to 2147483647 but got '-3'"),
        (["--min-p", "nan"], "--min-p must be between"),
        (["--repetition-penalty", "0"], "--repetition-penalty must be positive"),
        (["--seed", "-1"], "--seed: must be a whole number from 0"),
        (["--stop", ""], "--stop must not hold an empty string"),
        (["--extra-eos-token", "two tokens"], "--extra-eos-token must be"),
        (["--prefill-step-size", "0"], "--prefill-step-size: must be"),
        (["--memory-margin", "-1"], "--memory-margin: must be a size in GB"),
        (["--verbose", "maybe"], "--verbose: must be T or F"),
        (["--chat-template-config", "[1]"], "--chat-template-config: must be a JSON object"),
        (["--system-prompt", "x", BARE], "--system-prompt must be left out"),
        (["--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
        (["--revision", "main"], "--revision must be left out for folder"),
        (["--data", "/no/such/file"], "--data must be"),
        (["--data", "x", "-p", "y"], "not allowed with argument"),
        (["--tepm", "1"], "unrecognized arguments: --tepm 1"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, folder: Path, capsys: Captured
) -> None:
    assert run(folder, *arguments) == 2
    assert message in refusal(capsys)


def test_bad_models(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    assert run(tmp_path / "nothing") == 2
    assert "must be an existing folder" in refusal(capsys)
    assert run(tmp_path) == 2
    assert "has no config.json" in refusal(capsys)
    bare = shutil.copytree(folder, tmp_path / "bare")
    for file in bare.glob("tokenizer*"):
        file.unlink()
    assert run(bare) == 2
    assert "must hold 'tokenizer.json' or 'tokenizer.model'" in refusal(capsys)
    assert main(["generate", "--revision", "main"]) == 2
    assert "--revision must come with --model" in refusal(capsys)


def test_binary_standard_input(
    folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_stdin(monkeypatch, b"abc\xff")
    assert run(folder, "-p", "-") == 2
    assert "standard input must be UTF-8 text but byte 3 is 0xff" in refusal(capsys)


def test_empty_standard_input(
    folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_stdin(monkeypatch, b"")
    assert run(folder, "-p", "-") == 2
    assert "standard input must hold the prompt" in refusal(capsys)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\n \n", "is empty"),
        ("a.txt", b"\xff", "must be a UTF-8 text file"),
        ("a.jsonl", b'"ok"\n{"prompt": ', "line 2 must be JSON"),
        ("a.jsonl", b'{"text": "x"}', "line 1 must be a string or an object"),
        ("a.jsonl", b"[" * 100_000, "line 1 must be nested at most 64 deep"),
        ("a.jsonl", b"1e400", "line 1 must have finite numbers"),
        ("a.jsonl", b'"ok"\n\n""', "--prompt must not be empty"),
    ],
)
def test_bad_prompt_files(
    name: str, content: bytes, message: str, folder: Path, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / name).write_bytes(content)
    assert run(folder, "--data", str(tmp_path / name)) == 2
    assert message in refusal(capsys)


def test_too_long_prompts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    content = b"x" * 8_000_001
    (tmp_path / "prompts.txt").write_bytes(b"short\n" + content)
    assert run(folder, "--data", str(tmp_path / "prompts.txt")) == 2
    assert "line 2 must have at most 8,000,000 bytes" in refusal(capsys)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert run(folder, "-p", "-") == 2
    assert "standard input must have at most 8,000,000 bytes" in refusal(capsys)


def test_pipes_do_not_hang(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert run(folder, "--data", str(tmp_path / "pipe")) == 2
    assert "it is a pipe, not a regular file" in refusal(capsys)


def test_token_outside_the_vocabulary(
    folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: [5, 518])
    assert run(folder, BARE) == 2
    assert "518 at position 1" in refusal(capsys)


def test_interrupt_restores_the_limits(
    folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("mlx_mmfree.generation.stream_generate", interrupted)
    before = mx.set_cache_limit(77_000_000)
    assert run(folder) == 130
    assert mx.set_cache_limit(before) == 77_000_000
    assert capsys.readouterr().out == ""


def press_ctrl_c_after(
    count: int, monkeypatch: pytest.MonkeyPatch, kind: type[Any] = Decoding
) -> None:
    """Ctrl-C comes with the step after this number of them."""
    step = kind.step
    steps = iter(range(1, 1000))

    def stepping(self: Any, **options: Any) -> Any:
        if next(steps) == count + 1:
            signal.raise_signal(signal.SIGINT)
        return step(self, **options)

    monkeypatch.setattr(kind, "step", stepping)


def test_ctrl_c_keeps_what_was_written(
    folder: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as context:
        press_ctrl_c_after(4, context)
        assert run(folder, "-p", "A", "--json", "-m", "50") == 130
    shown = json.loads(capsys.readouterr().out)
    assert shown["finish_reason"] == "interrupted"
    assert shown["text"] == expected(folder, chat_ids(folder, "A"), max_tokens=5)
    file = tmp_path / "prompts.txt"
    file.write_text("A\nB\n")
    with monkeypatch.context() as context:
        # the first step reads the prompts
        press_ctrl_c_after(5, context, Scheduler)
        assert run(folder, "--data", str(file), "--json", "-m", "50") == 130
    results = json.loads(capsys.readouterr().out)["results"]
    assert [row["generation_tokens"] for row in results] == [5, 5]
    assert [row["finish_reason"] for row in results] == ["interrupted"] * 2
    with monkeypatch.context() as context:
        press_ctrl_c_after(0, context)
        assert run(folder, "-p", "A", "--json") == 130
    assert capsys.readouterr() == ("", "\n")
    assert signal.getsignal(signal.SIGINT) is before


def chat_ids(folder: Path, prompt: str) -> Any:
    tokenizer = load_tokenizer(folder)
    return tokenizer.apply_chat_template([{"role": "user", "content": prompt}])


def test_a_bar_shows_how_much_of_a_long_prompt_is_read(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with ReadingBar(100) as bar:
        for read in (0, 100):
            bar(read, 250)
    assert re.search(r"Reading the prompt: +\d+%.*/250", capsys.readouterr().err)
    with ReadingBar(100) as bar:
        bar(0, 100)
        bar(100, 100)
    assert capsys.readouterr().err == ""
