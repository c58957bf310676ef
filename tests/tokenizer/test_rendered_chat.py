"""Conversations as published checkpoints lay them out: one first token, the ends of a turn."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import Tokenizer as LibraryTokenizer

from mlx_mmfree.tokenizer.tokenizer import Tokenizer

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
BPE, SPM = GOLDENS / "tokenizer_bpe", GOLDENS / "tokenizer_spm"
TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Well"},
    {"role": "user", "content": " Bye "},
]

LLAMA3 = (
    "{% for m in messages %}{% set c = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' "
    "+ m['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set c = bos_token + c %}"
    "{% endif %}{{ c }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
BITNET = (
    "{% for m in messages %}{{ m['role'] | capitalize + ': ' + m['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FALCON3 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>\n' + m.content + '\n' }}"
    "{% elif m.role == 'assistant' %}{{ '<|assistant|>\n' + m.content + eos_token + '\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Published:
    """How a published checkpoint lays out a conversation.

    Attributes:
        template: Its chat template.
        special: Its special tokens, with the ids from 512 on.
        ends: The ids that end a turn.
        laid_out: The special ids of `TALK`, in order.
        has_bos: Whether the first special token begins every text.
        files: Further files of its folder by their stems.
    """

    template: str
    special: tuple[str, ...]
    ends: set[int]
    laid_out: list[int]
    has_bos: bool
    files: dict[str, dict[str, int]]

    @property
    def eos_token(self) -> str:
        return next(name for name in self.special if name in ("<|end_of_text|>", "<|endoftext|>"))

    def write(self, folder: Path) -> Path:
        """A byte-level tokenizer with these special tokens, this template and these files."""
        shutil.copytree(BPE, folder)
        library = LibraryTokenizer.from_file(str(folder / "tokenizer.json"))
        data = json.loads(library.to_str())
        data["added_tokens"] = [
            {"id": 512 + n, "content": name, "special": True, "normalized": False}
            | {"single_word": False, "lstrip": False, "rstrip": False}
            for n, name in enumerate(self.special)
        ]
        if not self.has_bos:
            data["post_processor"] = None
        (folder / "tokenizer.json").write_text(json.dumps(data))
        settings = {"chat_template": self.template, "eos_token": self.eos_token}
        if self.has_bos:
            settings["bos_token"] = self.special[0]
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        for name, values in self.files.items():
            (folder / f"{name}.json").write_text(json.dumps(values))
        return folder


PUBLISHED = {
    "llama3": Published(
        LLAMA3,
        special=(
            *("<|begin_of_text|>", "<|end_of_text|>"),
            *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        ),
        ends={513, 516},
        laid_out=[512, *[514, 515, 516] * 3, 514, 515],
        has_bos=True,
        files={"config": {"bos_token_id": 512, "eos_token_id": 513}},
    ),
    # its template leaves out the first token, which its publishers' program adds
    "bitnet": Published(
        BITNET,
        special=("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"),
        ends={513, 514},
        laid_out=[512, 514, 514, 514],
        has_bos=True,
        files={
            "config": {
                "model_type": "bitnet",
                "rope_theta": 500000.0,
                "bos_token_id": 512,
                "eos_token_id": 513,
            }
        },
    ),
    # it has no first token, though its configuration names one
    "qwen": Published(
        CHATML,
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        ends={512, 514},
        laid_out=[*[513, 514] * 3, 513],
        has_bos=False,
        files={"config": {"bos_token_id": 512, "eos_token_id": 512}},
    ),
    "falcon3": Published(
        FALCON3,
        special=("<|user|>", "<|assistant|>", "<|endoftext|>"),
        ends={514},
        laid_out=[512, 513, 514, 512, 513],
        has_bos=False,
        files={"generation_config": {"bos_token_id": 514, "eos_token_id": 514}},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_conversation_is_laid_out_as_published(name: str, tmp_path: Path) -> None:
    case = PUBLISHED[name]
    tokenizer = Tokenizer.from_folder(case.write(tmp_path / name))
    assert tokenizer.eos_token_ids == case.ends
    ids = tokenizer.apply_chat_template(TALK)
    assert [n for n in ids if n >= 512] == case.laid_out
    text = tokenizer.apply_chat_template(TALK, tokenize=False)
    is_begun_by_hand = case.has_bos and not text.startswith(case.special[0])
    assert tokenizer.decode(ids) == (case.special[0] if is_begun_by_hand else "") + text


def test_a_first_token_that_the_template_leaves_out_is_put_before_its_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(PUBLISHED["bitnet"].write(tmp_path / "2b-4t"))
    text = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert text == "User: Hi<|eot_id|>Assistant: Well<|eot_id|>User: Bye<|eot_id|>Assistant: "
    assert tokenizer.apply_chat_template(TALK) == tokenizer.encode(text)


def test_ends_that_configurations_list_are_kept_beside_those_of_the_template(
    tmp_path: Path,
) -> None:
    folder = PUBLISHED["bitnet"].write(tmp_path / "2b-4t")
    (folder / "generation_config.json").write_text('{"eos_token_id": [511, 513]}')
    assert Tokenizer.from_folder(folder).eos_token_ids == {511, 513, 514}


@pytest.mark.parametrize("model_type", ["llama", "bitnet", None])
@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("template", [LLAMA3, BITNET])
def test_first_token_at_most_once(
    template: str, add_bos: bool, model_type: str | None, tmp_path: Path
) -> None:
    """The template decides, as in transformers 5.24.0 and mlx-lm, but for one family."""
    folder = shutil.copytree(BPE, tmp_path / "copy")
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    file = folder / "tokenizer_config.json"
    changes = {"chat_template": template, "add_bos_token": add_bos}
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.apply_chat_template(TALK)
    assert ids.count(512) == (template == LLAMA3 or (add_bos and model_type == "bitnet"))
    assert ids[0] == 512 or not ids.count(512)


@pytest.mark.parametrize("folder", [BPE, SPM], ids=lambda folder: folder.name)
def test_the_rest_of_a_conversation(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    talk = [*TALK[:2], {"role": "user", "content": "<|eot_id|></s> again"}]
    chat = tokenizer.render_chat(talk)
    assert chat.text == tokenizer.apply_chat_template(talk, tokenize=False)
    assert chat.ids() == tokenizer.apply_chat_template(talk)
    read = tokenizer.render_chat(TALK[:1])
    assert chat.text.startswith(read.text)
    ids = [*read.ids(), *chat.ids_after(len(read.text))]
    assert tokenizer.decode(ids) == tokenizer.decode(chat.ids())
    # the message's own spellings stay text
    control = set(tokenizer.special_tokens.values())
    assert [n for n in ids if n in control] == [n for n in chat.ids() if n in control]


def test_a_continuation_does_not_begin_anew() -> None:
    spm = Tokenizer.from_folder(SPM)
    assert spm.decode([*spm.encode("The do"), *spm.encode_continuation("g is")]) == "<s> The dog is"
    assert spm.decode([*spm.encode("The"), *spm.encode_continuation(" </s>")]) == "<s> The </s>"
    assert 2 not in spm.encode_continuation("</s>")
