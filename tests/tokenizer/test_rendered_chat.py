"""Conversations as published checkpoints lay them out: one first token, the ends of a turn."""

import json
import shutil
from pathlib import Path
from typing import Any

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


def published(folder: Path, template: str, *, special: list[str], bos: bool, **config: Any) -> Path:
    """A byte-level tokenizer whose special tokens, template and configuration are those given."""
    shutil.copytree(BPE, folder)
    library = LibraryTokenizer.from_file(str(folder / "tokenizer.json"))
    data = json.loads(library.to_str())
    names = ["<|begin_of_text|>", *special] if bos else special
    data["added_tokens"] = [
        {"id": 512 + n, "content": name, "special": True, "normalized": False}
        | {"single_word": False, "lstrip": False, "rstrip": False}
        for n, name in enumerate(names)
    ]
    if not bos:
        data["post_processor"] = None
    (folder / "tokenizer.json").write_text(json.dumps(data))
    settings = {"chat_template": template, "eos_token": config.pop("eos_token")}
    if bos:
        settings["bos_token"] = "<|begin_of_text|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, values in config.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


def test_llama3_stops_at_the_end_of_a_turn(tmp_path: Path) -> None:
    folder = published(
        tmp_path / "llama3",
        LLAMA3,
        special=["<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        bos=True,
        eos_token="<|end_of_text|>",
        config={"bos_token_id": 512, "eos_token_id": 513},
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token_ids == {513, 516}
    ids = tokenizer.apply_chat_template(TALK)
    assert [n for n in ids if n >= 512] == [512, *[514, 515, 516] * 3, 514, 515]


def test_bitnet_gets_the_first_token_that_its_template_leaves_out(tmp_path: Path) -> None:
    special = ["<|end_of_text|>", "<|eot_id|>"]
    config = {"bos_token_id": 512, "eos_token_id": 513}
    folder = published(
        tmp_path / "2b-4t", BITNET, special=special, bos=True, eos_token=special[0], config=config
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token_ids == {513, 514}
    text = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert text == "User: Hi<|eot_id|>Assistant: Well<|eot_id|>User: Bye<|eot_id|>Assistant: "
    ids = tokenizer.apply_chat_template(TALK)
    assert tokenizer.decode(ids) == "<|begin_of_text|>" + text
    assert ids == tokenizer.encode(text)
    # ends that the configurations list are kept beside those of the template
    (folder / "generation_config.json").write_text('{"eos_token_id": [511, 513]}')
    assert Tokenizer.from_folder(folder).eos_token_ids == {511, 513, 514}


def test_chatml_has_no_first_token(tmp_path: Path) -> None:
    folder = published(
        tmp_path / "qwen",
        CHATML,
        special=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        bos=False,
        eos_token="<|endoftext|>",
        config={"bos_token_id": 512, "eos_token_id": 512},
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token_ids == {512, 514}
    text = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert tokenizer.decode(tokenizer.apply_chat_template(TALK)) == text


def test_falcon3_stops_at_its_end_of_text(tmp_path: Path) -> None:
    folder = published(
        tmp_path / "falcon3",
        FALCON3,
        special=["<|user|>", "<|assistant|>", "<|endoftext|>"],
        bos=False,
        eos_token="<|endoftext|>",
        generation_config={"bos_token_id": 514, "eos_token_id": 514},
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token_ids == {514}
    ids = tokenizer.apply_chat_template(TALK)
    assert [n for n in ids if n >= 512] == [512, 513, 514, 512, 513]


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("template", [LLAMA3, BITNET])
def test_first_token_at_most_once(template: str, add_bos: bool, tmp_path: Path) -> None:
    folder = shutil.copytree(BPE, tmp_path / "copy")
    file = folder / "tokenizer_config.json"
    changes = {"chat_template": template, "add_bos_token": add_bos}
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.apply_chat_template(TALK)
    assert ids.count(512) == (add_bos or template == LLAMA3)
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
