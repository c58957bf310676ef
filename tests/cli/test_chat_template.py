"""`--chat-template FILE`: a template for a model without one, which its adapters keep."""

import json
from pathlib import Path

import pytest

from mlx_mmfree import demo
from mlx_mmfree.cli import serve
from mlx_mmfree.cli.fuse import main as fuse
from mlx_mmfree.cli.generate import main as generate
from mlx_mmfree.cli.lora import main as lora
from mlx_mmfree.hub import load_tokenizer
from mlx_mmfree.hub.adapters.adapter_folder import adapter_template
from mlx_mmfree.hub.publish.upload import plan_upload

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
OTHER = TEMPLATE.replace("assistant: ", "she said ")
QUESTION = "Who?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two templates, conversations, and an adapter trained with one of them."""
    folder = tmp_path_factory.mktemp("chats")
    (folder / "chat.jinja").write_text(TEMPLATE)
    (folder / "other.jinja").write_text(OTHER)
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "The King."}]
    (folder / "chats.json").write_text(json.dumps([{"messages": turns}] * 2))
    assert lora(_lora(folder, "--chat-template", str(folder / "chat.jinja"))) == 0
    return folder


def _lora(folder: Path, *more: str) -> list[str]:
    run = ["--train", "--data", str(folder / "chats.json"), "--output", str(folder / "adapter")]
    return [*run, "--steps", "1", "--batch-size", "1", "--num-layers", "1", *more]


def _prompt_tokens(capsys: pytest.CaptureFixture[str], *flags: str) -> int:
    capsys.readouterr()
    assert generate(["--prompt", QUESTION, "--max-tokens", "1", "--json", *flags]) == 0
    return int(json.loads(capsys.readouterr().out)["prompt_tokens"])


def test_it_is_kept_beside_the_adapter(folder: Path) -> None:
    for path in (folder / "adapter", folder / "adapter/last"):
        assert (path / "chat_template.jinja").read_text() == TEMPLATE
    assert adapter_template(folder / "adapter") == TEMPLATE
    plan = plan_upload(folder / "adapter", "me/adapter", base_model="me/base")
    assert "chat_template.jinja" in plan.files


def _tokens(template: str | None) -> int:
    tokenizer = load_tokenizer(demo.path())
    if template is None:
        return len(tokenizer.encode(QUESTION))
    tokenizer = tokenizer.with_chat_template(template)
    return len(tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}]))


def test_commands_use_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len({_tokens(template) for template in (None, TEMPLATE, OTHER)}) == 3
    adapter = ("--adapter-path", str(folder / "adapter"))
    other = ("--chat-template", str(folder / "other.jinja"))
    assert _prompt_tokens(capsys) == _tokens(None)
    assert _prompt_tokens(capsys, *adapter) == _tokens(TEMPLATE)
    assert _prompt_tokens(capsys, *other) == _tokens(OTHER)
    # the flag goes before what the adapter keeps
    assert _prompt_tokens(capsys, *adapter, *other) == _tokens(OTHER)


def test_it_goes_where_the_adapter_goes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fused = str(tmp_path / "fused")
    assert fuse(["--adapter-path", str(folder / "adapter"), "--output", fused]) == 0
    assert load_tokenizer(fused).chat_templates == {"default": TEMPLATE}
    assert _prompt_tokens(capsys, "--model", fused) == _tokens(TEMPLATE)


def test_it_goes_into_the_format_of_peft(
    folder: Path, attention_folder: Path, tmp_path: Path
) -> None:
    flags = ["--model", str(attention_folder), "--chat-template", str(folder / "chat.jinja")]
    run = _lora(folder, *flags, "--output", str(tmp_path / "run"))
    assert lora(run) == 0
    flags = ["--model", str(attention_folder), "--adapter-path", str(tmp_path / "run")]
    assert fuse([*flags, "--format", "peft", "--output", str(tmp_path / "peft")]) == 0
    assert adapter_template(tmp_path / "peft") == TEMPLATE


def test_each_adapter_of_a_server_has_its_own(folder: Path) -> None:
    flags = ["--adapter", f"one={folder / 'adapter'}"]
    args = serve.build_parser().parse_args(flags)
    tokenizer = load_tokenizer(demo.path())
    base, adapted = serve._tokenizers(args, tokenizer)
    assert not base.has_chat_template and adapted.chat_templates == {"default": TEMPLATE}
    args = serve.build_parser().parse_args([*flags, "--chat-template", "chat.jinja"])
    assert serve._tokenizers(args, tokenizer) == [tokenizer, tokenizer]


def test_errors(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    absent, faulty = tmp_path / "absent.jinja", tmp_path / "faulty.jinja"
    faulty.write_text("{% if %}")
    assert generate(["--chat-template", str(absent)]) == 2
    words = f"--chat-template must be a file with a template in Jinja but '{absent}' cannot be read"
    assert words in capsys.readouterr().err
    assert generate(["--prompt", "Hi", "--chat-template", str(faulty)]) == 2
    assert capsys.readouterr().err.startswith("error: [chat template]")
    assert lora(_lora(folder, "--output", str(tmp_path / "new"))) == 2
    words = "has none. Use a chat model, or train with a template: --chat-template FILE.\n"
    assert capsys.readouterr().err.endswith(words)
    assert not (tmp_path / "new").exists()
