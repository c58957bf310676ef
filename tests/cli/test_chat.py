"""`mmfree chat`: commands, settings, Ctrl-C, and what a terminal shows."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.history import FileHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from mlx_mmfree import demo
from mlx_mmfree.cli import main
from mlx_mmfree.cli.parts.terminal import Interruption, MessageReader
from mlx_mmfree.generation import Chat, with_key_values
from mlx_mmfree.generation.decode import Decoding
from mlx_mmfree.hub import load, save_model
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.models import llama
from mlx_mmfree.models.parts.ternary_linears import TernaryLinears

ROOT = Path(__file__).parents[2]
GOLDENS = ROOT / "tests" / "data" / "goldens"
GREEDY = ("--temp", "0")

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
    # its answers do not end by themselves: the best logit is above the logit of the end of a turn
    model.head.weight[-1] = mx.zeros(config.hidden_size)
    save_model(target, model, GOLDENS / "tokenizer_bpe")
    return target


@pytest.fixture(params=["recurrent", "attention"])
def any_folder(request: pytest.FixtureRequest, folder: Path, attention_folder: Path) -> Path:
    return folder if request.param == "recurrent" else attention_folder


LIMIT = "stopped at the limit of 6 tokens"


def talk(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    content = "".join(f"{line}\n" for line in lines).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def expected(folder: Path, questions: list[str], **options: str) -> list[str]:
    chat = Chat(*load(folder), max_tokens=6, **options)
    return ["".join(r.text for r in chat.answer(question)) for question in questions]


def test_turns_and_commands(
    any_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    first, second = expected(any_folder, ["Hello", "again"], system_prompt="Be kind.")
    lines = ["Hello", "", "again", "/stats", "/clear", "Hello", "/help", "/what", "/bye", "never"]
    talk(monkeypatch, *lines)
    arguments = ["--model", str(any_folder), "-m", "6", "--system-prompt", "Be kind.", *GREEDY]
    assert main(["chat", *arguments]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    end = f" [{LIMIT}]\n"
    head = (
        f"You are talking with {any_folder}. Type a message and press Enter. /help shows the commands, "
        "and /exit leaves.\n"
    )
    assert shown.out.startswith(f"{head}{first}{end}{second}{end}Conversation: ")
    assert f"A new conversation begins.\n{first}{end}  /reset " in shown.out
    known = "/reset, /regen, /system, /save, /load, /set, /stats, /help, /exit"
    assert f"no command '/what'. The commands are {known}. " in shown.out
    assert "/exit. To send a message" in shown.out
    assert "answers: 2\nMemory of the conversation: " in shown.out
    assert all(
        name in shown.out for name in ("Last question: ", "Last answer: 6 ", "Peak memory: ")
    )


def test_what_attention_keeps(
    attention_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    model, tokenizer = load(attention_folder)
    chat = Chat(with_key_values(model, max_kv_size=24), tokenizer, max_tokens=6)
    for question in ("Tell me of the dog", "and of the cat"):
        assert list(chat.answer(question))
    talk(monkeypatch, "Tell me of the dog", "and of the cat", "/stats")
    flags = ["--model", str(attention_folder), "-m", "6", "--max-kv-size", "24"]
    assert main(["chat", *flags, *GREEDY]) == 0
    shown = capsys.readouterr().out
    assert chat.messages[-1]["content"] in shown
    assert f"Memory of the conversation: {chat.state_bytes / 1e6:.3f} MB" in shown
    assert chat.size > 48


def test_a_base_model_is_reported_to_be_one(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, tmp_path: Path
) -> None:
    texts = expected(demo.path(), ["Once upon a time", "and then"])
    talk(monkeypatch, "Once upon a time", "and then")
    assert main(["chat", "-m", "6", *GREEDY]) == 0
    head, note, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("You are talking with the model in the package.")
    assert "This is a base model, which has no chat template" in note
    assert "\n".join(lines) == "\n".join(f"{text} [{LIMIT}]" for text in texts) + "\n"
    talk(monkeypatch)
    assert main(["chat", "--system-prompt", "Be kind."]) == 2
    assert "--system-prompt must be left out" in capsys.readouterr().err


def test_a_refused_question_leaves_the_conversation(
    attention_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    folder = shutil.copytree(attention_folder, tmp_path / "copy")
    (folder / "chat_template.jinja").write_text(
        "{% if messages[-1].content == 'bad' %}{{ raise_exception('no') }}{% endif %}"
        "{{ messages | tojson }}"
    )
    talk(monkeypatch, "bad", "/stats")
    assert main(["chat", "--model", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert (
        "\nerror: [chat template] the chat template refuses the messages: no\nConversation: 0 tokens"
        in shown
    )


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
        interruption.has_tokens = True
        signal.raise_signal(signal.SIGINT)
        assert interruption.is_noted
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def press_ctrl_c_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes as the decoding step of this number begins."""
    step = Decoding.step
    steps = iter(range(10**6))

    def stepping(self: Decoding, *, is_last: bool = False) -> list[int]:
        if next(steps) == count:
            signal.raise_signal(signal.SIGINT)
        return step(self, is_last=is_last)

    monkeypatch.setattr(Decoding, "step", stepping)


@pytest.mark.parametrize(("count", "answers"), [(0, 1), (3, 2)])
def test_control_c_stops_the_answer_and_not_the_program(
    count: int,
    answers: int,
    attention_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    (first,) = expected(attention_folder, ["Tell me"])
    talk(monkeypatch, "Tell me", "more", "/stats")
    press_ctrl_c_after(count, monkeypatch)
    assert main(["chat", "--model", str(attention_folder), "-m", "6", *GREEDY]) == 0
    _, shown = capsys.readouterr().out.split("\n", 1)
    begun, rest = shown.split(" [stopped]\n")
    assert first.startswith(begun) and first != begun and bool(begun) == bool(count)
    assert f" [{LIMIT}]\nConversation: " in rest and f"answers: {answers}\n" in rest


def test_control_c_at_the_prompt_says_how_to_leave(
    attention_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    lines = iter([KeyboardInterrupt, "/stats", EOFError])

    def read(prompt: str) -> str:
        line = next(lines)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    assert main(["chat", "--model", str(attention_folder)]) == 0
    assert "(/exit or Ctrl-D leaves the chat)\nConversation: 0" in capsys.readouterr().out


def test_a_real_signal_ends_an_answer(attention_folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "mlx_mmfree", "chat", "--model", attention_folder, "-m", "1000000"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"Tell me\n/stats\n")
    process.stdin.flush()
    # its answer would not end within hours
    process.stdout.readline()
    assert len(process.stdout.read(20)) == 20
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate()
    assert process.returncode == 0
    assert b" [stopped]\n" in out and b"answers: 1\n" in out


def test_settings_change_the_next_answers(
    attention_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    greedy = expected(attention_folder, ["Hello"])[0]
    talk(
        monkeypatch,
        "/set temp 0",
        "/set max-tokens 6",
        "Hello",
        "/reset",
        "/set temp 5",
        "/set seed 1",
        "Hello",
        "/set temp",
        "/set temp 0 1",
        "/set top-p 7",
        "/set max-tokens x",
        "/set foo 3",
        "/set",
    )
    assert main(["chat", "--model", str(attention_folder), "--no-history"]) == 0
    shown = capsys.readouterr().out
    assert f"temp is now 0.0.\nmax-tokens is now 6.\n{greedy} [{LIMIT}]\n" in shown
    assert shown.count(greedy) == 1
    assert shown.count("Write /set NAME VALUE. The settings are: temp 5.0, top-p 0.9") == 2
    assert "Write /set NAME VALUE. There is no setting 'foo'. The settings are: temp 5.0" in shown
    assert "\nThe settings are: temp 5.0" in shown
    assert "error: top-p must be above 0" in shown
    assert "error: max-tokens: must be a whole number" in shown


def test_quotes_hold_a_message_of_several_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    talk(monkeypatch, '"""one', "  two", 'three"""', '"""four"""', '"""', "five ", '"""')
    read = MessageReader(">> ")
    assert [read() for _ in range(3)] == ["one\n  two\nthree", "four", "five"]
    assert read.is_quoted
    with pytest.raises(EOFError):
        read()


def test_a_quoted_message_is_no_command(
    attention_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    first, second = expected(attention_folder, ["/stats", "/exit"])
    talk(monkeypatch, '"""/stats"""', '""""""', '"""/exit"""', "/stats")
    assert main(["chat", "--model", str(attention_folder), "-m", "6", *GREEDY]) == 0
    _, shown = capsys.readouterr().out.split("\n", 1)
    answers = "".join(f"{answer} [{LIMIT}]\n" for answer in (first, second))
    assert shown.startswith(f"{answers}Conversation: ") and shown.count("Conversation:") == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_an_editor_takes_a_pasted_text_as_one_and_keeps_history(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("TERM", "xterm")
    for name in ("stdin", "stdout"):
        monkeypatch.setattr(sys, name, Terminal())
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        keys.send_text("\x1b[200~one\ntwo\nthree\x1b[201~\r")
        assert MessageReader(">> ")() == "one\ntwo\nthree"
        keys.send_text("four\x1b\rfive\r")
        assert MessageReader(">> ")() == "four\nfive"
        keys.send_text("kept nowhere\r")
        assert MessageReader(">> ", keeps_history=False)() == "kept nowhere"
        keys.send_text("\x03")
        with pytest.raises(KeyboardInterrupt):
            MessageReader(">> ")()
        keys.send_text("\x04")
        with pytest.raises(EOFError):
            MessageReader(">> ")()
    file = tmp_path / "mlx_mmfree" / "chat_history"
    assert file.stat().st_mode & 0o777 == 0o600
    assert [*FileHistory(str(file)).load_history_strings()] == ["four\nfive", "one\ntwo\nthree"]


def test_a_terminal_shows_whole_words_and_the_speed(
    attention_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk(monkeypatch, "Hello")
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", "30")
    assert main(["chat", "--model", str(attention_folder), "-m", "6", *GREEDY]) == 0
    shown = screen.getvalue()
    assert re.search(
        r"\n\[6 tokens, [\d.]+ a\ssecond;\sstopped\sat\sthe\slimit\sof\s6\stokens\]\n", shown
    )
    # the folder is wider than a line
    assert shown.startswith("You are talking with\n/")


def test_a_conversation_is_saved_loaded_and_answered_anew(
    attention_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    first, second = expected(attention_folder, ["Hello", "again"], system_prompt="Be kind.")
    file = tmp_path / "talk.json"
    lines = ["/regen", "/system Be kind.", "Hello", f"/save {file}", f"/save {file}", "again"]
    lines += ["/regen", f"/load {file}", "again", "/load absent.json", "/save"]
    talk(monkeypatch, *lines, "/set temperature 0", "/set top_p 0.5")
    assert main(["chat", "--model", str(attention_folder), "-m", "6", *GREEDY]) == 0
    shown = capsys.readouterr().out
    end = f" [{LIMIT}]\n"
    assert "There is no message to answer yet.\nA new conversation begins.\n" in shown
    assert f"{first}{end}Wrote '{file}'.\nNothing was written.\n{second}{end}{second}{end}" in shown
    assert f"The conversation of '{file}' goes on.\n{second}{end}error: " in shown
    assert "Write /save FILE.\ntemp is now 0.0.\ntop-p is now 0.5.\n" in shown
    messages = json.loads(file.read_text())["messages"]
    assert [each["role"] for each in messages] == ["system", "user", "assistant"]


def test_a_text_of_a_base_model_is_saved_and_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    file, other = tmp_path / "talk.json", tmp_path / "other.json"
    other.write_text('{"messages": [{"role": "robot", "content": "Hi"}]}')
    lines = ["Once upon a time", f"/save {file}", "and then", "/regen", f"/load {file}", "and then"]
    talk(monkeypatch, *lines, "/system Be kind.", f"/load {other}", f"/load {tmp_path / 'absent'}")
    assert main(["chat", "-m", "4", *GREEDY]) == 0
    shown = capsys.readouterr().out
    loaded = f"The conversation of '{file}' goes on."
    answered, _, after = shown.partition(f"Wrote '{file}'.\n")[2].partition(f"{loaded}\n")
    answers = [*answered.splitlines(), after.splitlines()[0]]
    assert len(answers) == 3 and len(set(answers)) == 1 and answers[0]
    assert "error: [chat] /system must come with a chat model" in shown
    assert f"error: [chat] '{other}' must hold" in shown
    assert f"error: [chat] there is no file '{tmp_path / 'absent'}'. Name one that /save" in shown
