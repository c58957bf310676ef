"""`mmfree chat` with lines from a file, and in a terminal of its own."""

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mmfree import demo
from mlx_mmfree.cli import main
from mlx_mmfree.cli.chat import Interruption
from mlx_mmfree.generation import Chat, with_key_values
from mlx_mmfree.hub import load, save_model
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.models import llama
from mlx_mmfree.models.ternary_linears import TernaryLinears

ROOT = Path(__file__).parents[2]
GOLDENS = ROOT / "tests" / "data" / "goldens"
PROMPT = b">> "
TIME_LIMIT_S = 60
# Ctrl-C reaches the program whose controlling terminal it is pressed in.
SCRIPT = (
    "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "from mlx_mmfree.cli import main; sys.exit(main(sys.argv[1:]))"
)

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="session")
def attention_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a random transformer with a chat template."""
    mx.random.seed(5)
    config = llama.Config(
        vocab_size=518,
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linears=TernaryLinears(),
        initializer_range=0.3,
    )
    target = tmp_path_factory.mktemp("attention") / "tiny"
    model = pack_linears(llama.build(config))
    # its answers do not end by themselves: the best logit is above that of the end of a turn
    model.head.weight[-1] = mx.zeros(config.hidden_size)
    save_model(target, model, GOLDENS / "tokenizer_bpe")
    return target


@pytest.fixture(params=["recurrent", "attention"])
def any_folder(request: pytest.FixtureRequest, folder: Path, attention_folder: Path) -> Path:
    return folder if request.param == "recurrent" else attention_folder


def talk(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    content = "".join(f"{line}\n" for line in lines).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def expected(folder: Path, questions: list[str], **options: str) -> list[str]:
    chat = Chat(*load(folder), max_tokens=6, **options)
    return [shade("".join(r.text for r in chat.answer(question))) for question in questions]


def shade(text: str) -> str:
    """A text as the terminal is given it."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text)


def test_turns_and_commands(
    any_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    first, second = expected(any_folder, ["Hello", "again"], system_prompt="Be kind.")
    lines = ["Hello", "", "again", "/stats", "/reset", "Hello", "/help", "/what", "/exit", "never"]
    talk(monkeypatch, *lines)
    arguments = ["--model", str(any_folder), "-m", "6", "--system-prompt", "Be kind."]
    assert main(["chat", *arguments]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    end = " [--max-tokens]\n"
    head = f"Chat with {any_folder}. /help lists the commands.\n"
    assert shown.out.startswith(f"{head}{first}{end}{second}{end}Conversation: ")
    assert f"The conversation is forgotten.\n{first}{end}  /reset " in shown.out
    assert shown.out.endswith("must be one of /reset, /stats, /help, /exit.\n")
    for line in ("answers: 2\n", "State: ", "Last question: ", "Last answer: 6 ", "Peak memory: "):
        assert line in shown.out


def test_what_attention_keeps(
    attention_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    model, tokenizer = load(attention_folder)
    chat = Chat(with_key_values(model, max_kv_size=24), tokenizer, max_tokens=6)
    for question in ("Tell me of the dog", "and of the cat"):
        assert list(chat.answer(question))
    talk(monkeypatch, "Tell me of the dog", "and of the cat", "/stats")
    assert main(["chat", "--model", str(attention_folder), "-m", "6", "--max-kv-size", "24"]) == 0
    shown = capsys.readouterr().out
    assert shade(chat.messages[-1]["content"]) in shown
    assert f"State: {chat.state_bytes / 1e6:.3f} MB" in shown
    assert chat.size > 48


def test_a_base_model_is_said_to_be_one(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, tmp_path: Path
) -> None:
    texts = expected(demo.path(), ["Once upon a time", "and then"])
    talk(monkeypatch, "Once upon a time", "and then")
    assert main(["chat", "-m", "6"]) == 0
    head, note, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("Chat with the model in the package.")
    assert "has no chat template: it is a base model" in note
    assert "\n".join(lines) == "\n".join(f"{text} [--max-tokens]" for text in texts) + "\n"
    talk(monkeypatch)
    assert main(["chat", "--system-prompt", "Be kind."]) == 2
    assert "--system-prompt must be left out" in capsys.readouterr().err


def test_a_refused_question_leaves_the_conversation(
    attention_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in attention_folder.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(
        "{% if messages[-1].content == 'bad' %}{{ raise_exception('no') }}{% endif %}"
        "{{ messages | tojson }}"
    )
    talk(monkeypatch, "bad", "/stats")
    assert main(["chat", "--model", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "\nerror: The chat template refuses the messages: no\nConversation: 0 tokens" in shown


@pytest.mark.parametrize("flags", [["--temp", "-1"], ["--max-tokens", "0"], ["--seed", "x"]])
def test_mistakes(flags: list[str], folder: Path, capsys: Captured) -> None:
    assert main(["chat", "--model", str(folder), *flags]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1


def test_interruption_is_noted_once_tokens_come() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interruption() as interruption:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        interruption.tokens_come = True
        signal.raise_signal(signal.SIGINT)
        assert interruption.is_noted
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


class Screen:
    """A program in a terminal of its own."""

    def __init__(self, *arguments: str):
        self._terminal, child = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *arguments],
            cwd=ROOT,
            stdin=child,
            stdout=child,
            stderr=child,
            env=os.environ | {"TERM": "dumb"},
            start_new_session=True,
        )
        os.close(child)
        self._shown = b""

    def wait_for(self, text: bytes, more: int = 0, key: bytes = b"") -> bytes:
        """Reads until `text` and so many further bytes are shown; returns and forgets them.

        A `key` is pressed again where nothing comes: before the program waits for keys it is lost.
        """
        deadline = time.monotonic() + TIME_LIMIT_S
        while text not in self._shown or self._shown.index(text) + len(text) + more > len(
            self._shown
        ):
            wait_s = deadline - time.monotonic()
            ready, _, _ = select.select([self._terminal], [], [], 2 if key else max(wait_s, 0))
            if not ready and key and wait_s > 0:
                self.type(key)
                continue
            assert ready, self._shown
            self._shown += os.read(self._terminal, 4096)
        end = self._shown.index(text) + len(text) + more
        shown, self._shown = self._shown[:end], self._shown[end:]
        return shown

    def type(self, keys: bytes) -> None:
        os.write(self._terminal, keys)

    def leave(self) -> int:
        """Presses Ctrl-D, which is lost before the program waits for keys, until the program ends."""
        deadline = time.monotonic() + TIME_LIMIT_S
        while self.process.poll() is None and time.monotonic() < deadline:
            self.type(b"\x04")
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(1)
        return self.process.wait(0)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)


@pytest.fixture
def screen(attention_folder: Path) -> Iterator[Screen]:
    opened = Screen("chat", "--model", str(attention_folder), "-m", "100000")
    yield opened
    opened.close()


def test_control_c_stops_the_answer_and_not_the_program(screen: Screen) -> None:
    screen.wait_for(PROMPT)
    # between its prompt and its wait for keys, `input` would note Ctrl-C at the next key only
    time.sleep(0.2)
    screen.type(b"\x03")
    screen.wait_for(b"/exit or Ctrl-D", key=b"\x03")
    screen.wait_for(PROMPT)
    for _ in range(2):
        screen.type(b"Tell me\n")
        screen.wait_for(b"Tell me", more=200)
        screen.type(b"\x03")
        screen.wait_for(b"[stopped]")
        screen.wait_for(PROMPT)
    screen.type(b"/stats\n")
    assert b"answers: 2" in screen.wait_for(b"Peak memory")
    screen.wait_for(PROMPT)
    assert screen.leave() == 0
