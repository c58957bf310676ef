"""`mmfree cache_prompt`, and what `mmfree generate` makes of its file and of a draft model."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mmfree.cli import main
from mlx_mmfree.cli.parts.prompts import PromptWriter
from mlx_mmfree.hub import load, load_tokenizer, save_model
from mlx_mmfree.models import llama

BARE = "--ignore-chat-template"
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "prompt.safetensors"


def cache(folder: Path, file: Path, *arguments: str) -> int:
    given = ["--model", str(folder), "--prompt-cache-file", str(file)]
    return main(["cache_prompt", *given, *arguments])


def generated(capsys: Captured, folder: Path, *arguments: str) -> str:
    capsys.readouterr()
    assert main(["generate", "--model", str(folder), "-m", "8", "--verbose", "F", *arguments]) == 0
    return capsys.readouterr().out


def refusal(capsys: Captured, folder: Path, *arguments: str) -> str:
    capsys.readouterr()
    assert main(["generate", "--model", str(folder), *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.splitlines()[-1].startswith("error: ")
    return shown.err


@pytest.mark.parametrize("kind", ["folder", "attention_folder"])
def test_a_cached_prompt_is_continued(
    kind: str, file: Path, capsys: Captured, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(kind)
    assert cache(folder, file, "-p", "The dog ran", BARE) == 0
    count = len(load_tokenizer(folder).encode("The dog ran"))
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith(f"Prompt: {count} tokens, ")
    assert second.startswith("State: ") and second.endswith(f" kB in '{file}'")
    assert third.startswith("Peak memory: ")
    got = generated(capsys, folder, "-p", " home", BARE, "--prompt-cache-file", str(file))
    assert got == generated(capsys, folder, "-p", "The dog ran home", BARE)


def test_a_message_is_cut_where_the_prompt_ends(folder: Path, file: Path, capsys: Captured) -> None:
    system = ("--system-prompt", "Be kind.")
    assert cache(folder, file, "-p", "A long text.", *system) == 0
    rest = ("-p", "\nIn short?", "--prefill-response", "Well")
    got = generated(capsys, folder, *rest, "--prompt-cache-file", str(file))
    want = generated(capsys, folder, "-p", "A long text.\nIn short?", *rest[2:], *system)
    assert got == want
    assert "Give it when the prompt is cached" in refusal(
        capsys, folder, *rest, *system, "--prompt-cache-file", str(file)
    )


def test_settings_come_from_the_file(attention_folder: Path, file: Path, capsys: Captured) -> None:
    settings = ("--max-kv-size", "9", "--kv-bits", "8", "--quantized-kv-start", "3")
    text = "The dog ran and ran and ran"
    assert cache(attention_folder, file, "-p", text, BARE, *settings) == 0
    cached = ("--prompt-cache-file", str(file), BARE)
    got = generated(capsys, attention_folder, "-p", " home", *cached)
    assert got == generated(capsys, attention_folder, "-p", text + " home", BARE, *settings)
    assert got != generated(capsys, attention_folder, "-p", text + " home", BARE)
    assert got == generated(capsys, attention_folder, "-p", " home", *cached, "--kv-bits", "8")
    error = refusal(capsys, attention_folder, "-p", " home", *cached, "--kv-bits", "4")
    assert "--kv-bits must be as when the prompt was cached, 8, but got 4" in error


def test_unknown_settings_are_refused(attention_folder: Path, file: Path, capsys: Captured) -> None:
    assert cache(attention_folder, file, "-p", "The dog") == 0
    for settings in ('{"verbose": 1}', '{"quantized_kv_start": null}'):
        tensors, metadata = mx.load(str(file), return_metadata=True)
        metadata = {**metadata, "mmfree_key_values": settings}
        mx.save_safetensors(str(file), dict(tensors), metadata)
        error = refusal(capsys, attention_folder, "--prompt-cache-file", str(file))
        assert "settings must be this version's" in error


def test_another_model_is_refused(
    folder: Path, attention_folder: Path, file: Path, capsys: Captured
) -> None:
    assert cache(folder, file, "-p", "The dog") == 0
    error = refusal(capsys, attention_folder, "--prompt-cache-file", str(file))
    assert "must come from the model that goes on with it" in error
    assert "there is no file" in refusal(
        capsys, folder, "--prompt-cache-file", "nowhere.safetensors"
    )


def test_one_prompt_alone_goes_on(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("One\nTwo\n")
    for flag in ("--prompt-cache-file", "--draft-model"):
        error = refusal(capsys, folder, "--data", str(prompts), flag, str(folder))
        assert "must come with one prompt but got --data" in error


def test_nothing_to_cache(folder: Path, file: Path, capsys: Captured) -> None:
    assert cache(folder, file, "-p", "") == 2
    assert "--prompt must not be empty" in capsys.readouterr().err
    assert cache(folder, file) == 2
    assert "the following arguments are required: --prompt/-p" in capsys.readouterr().err
    assert not file.exists()


def test_flags_without_effect_are_noted(
    folder: Path, attention_folder: Path, capsys: Captured
) -> None:
    flags = ("--max-kv-size", "9", "--kv-bits", "8")
    want = generated(capsys, folder, "-p", "The dog")
    assert main(["generate", "--model", str(folder), "-m", "8", "-p", "The dog", *flags]) == 0
    shown = capsys.readouterr()
    assert shown.out == want
    assert shown.err.startswith("note: the model has no attention")
    assert "These flags have no effect: --max-kv-size, --kv-bits." in shown.err
    assert main(["generate", "--model", str(attention_folder), "-m", "8", *flags]) == 0
    assert "note:" not in capsys.readouterr().err


def test_impossible_flags(attention_folder: Path, capsys: Captured) -> None:
    for flags, message in (
        (("--max-kv-size", "4"), "--max-kv-size must be larger than 4"),
        (("--kv-bits", "7"), "--kv-bits must be one of 2, 3, 4, 5, 6, 8 but got 7"),
        (("--kv-bits", "8", "--kv-group-size", "64"), "got 64 for 32. Use 32"),
    ):
        assert message in refusal(capsys, attention_folder, *flags)


@pytest.mark.parametrize("kind", ["folder", "attention_folder"])
def test_a_draft_model_changes_the_speed_alone(
    kind: str, attention_folder: Path, capsys: Captured, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(kind)
    want = generated(capsys, folder, "-p", "The dog", "-m", "12")
    drafted = ("-p", "The dog", "-m", "12", "--draft-model", str(attention_folder))
    assert generated(capsys, folder, *drafted, "--num-draft-tokens", "2") == want
    assert main(["generate", "--model", str(folder), *drafted, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["text"] + "\n" == want
    assert set(result["draft"]) == {"proposed", "accepted", "acceptance_rate"}
    assert "from_draft" not in result and "token" not in result
    assert main(["generate", "--model", str(folder), *drafted]) == 0
    assert " tokens accepted, " in capsys.readouterr().err.splitlines()[-1]
    if kind == "attention_folder":
        assert result["draft"]["acceptance_rate"] == 1


def test_drafts_from_the_text_change_the_speed_alone(folder: Path, capsys: Captured) -> None:
    want = generated(capsys, folder, "-p", "The dog", "-m", "40")
    drafted = ("-p", "The dog", "-m", "40", "--ngram-drafts")
    assert generated(capsys, folder, *drafted) == want
    assert main(["generate", "--model", str(folder), *drafted, "--json"]) == 0
    assert "acceptance_rate" in json.loads(capsys.readouterr().out)["draft"]
    flags = ("--ngram-drafts", "--draft-model", str(folder))
    assert "not allowed with" in refusal(capsys, folder, "-p", "A", *flags)


def test_a_draft_of_another_family_is_refused(
    folder: Path, tmp_path: Path, capsys: Captured
) -> None:
    _, tokenizer = load(folder)
    draft = tmp_path / "draft"
    save_model(draft, llama.build(llama.Config(600, 32, 1, 32, 2, 1, 16)), tokenizer)
    error = refusal(capsys, folder, "--draft-model", str(draft))
    assert "must have the model's vocabulary of 518 tokens but has 600" in error


@pytest.mark.parametrize(("model_type", "count"), [("bitnet", 1), ("llama", 0)])
def test_a_cached_conversation_begins_as_a_whole_one(
    folder: Path, tmp_path: Path, model_type: str, count: int
) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "config.json").write_text(json.dumps({"model_type": model_type}))
    (copy / "chat_template.jinja").write_text("User: {{ messages[0].content }}<|eot_id|>Answer: ")
    write = PromptWriter(load_tokenizer(copy))
    ids = [*write.opening("The dog"), *write.continuation(" ran")]
    assert ids.count(512) == count
    assert load_tokenizer(copy).decode(ids) == load_tokenizer(copy).decode(write("The dog ran"))


def test_a_file_that_cannot_be_written_is_refused_before_the_prompt_is_read(
    folder: Path, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "file").touch()
    for path, reason in ((tmp_path, "is a folder"), (tmp_path / "file" / "x", "no folder")):
        arguments = ["--model", str(folder), "-p", "A", "--prompt-cache-file", str(path)]
        assert main(["cache_prompt", *arguments]) == 2
        shown = capsys.readouterr()
        assert "--prompt-cache-file must be a file that can be written" in shown.err
        assert reason in shown.err and shown.out == ""
