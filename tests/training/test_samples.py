"""Reading fine-tuning samples: formats, masks, truncation, bad lines."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlx_mmfree.errors import TrainingError
from mlx_mmfree.hub import Tokenizer
from mlx_mmfree.training.corpus.splits import find_splits
from mlx_mmfree.training.samples import Features, Sample, Samples, read_samples

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
TOOLS = [{"type": "function", "function": {"name": "look"}}]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "The cat."},
]
SYSTEM, USER, CAT = CHAT
MORE, DOG = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "The dog."}
THINKING = (
    "{% for m in messages %}{{ m.thinking }}|{{ m.content.split('</think>')[-1] }}{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(GOLDENS / "tokenizer_bpe")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer without a chat template."""
    return Tokenizer.from_folder(
        _changed_template(tmp_path_factory.mktemp("tokenizer") / "plain", None)
    )


def _changed_template(folder: Path, template: str | None) -> Path:
    shutil.copytree(GOLDENS / "tokenizer_bpe", folder)
    file = folder / "tokenizer_config.json"
    entries = json.loads(file.read_text())
    entries.pop("chat_template")
    file.write_text(
        json.dumps(entries if template is None else {**entries, "chat_template": template})
    )
    return folder


def _read(tmp_path: Path, tokenizer: Tokenizer, *lines: Any, **options: Any) -> Samples:
    file = tmp_path / "train.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("\n".join(texts), encoding="utf-8")
    return read_samples(file, tokenizer, **options)


def test_a_token_without_a_row_is_named_with_its_line(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The tokenizer may have more tokens than the model."""
    last = tokenizer.eos_token_id
    assert last == tokenizer.vocab_size - 1
    for line in ({"text": "a"}, {"messages": CHAT}, {"prompt": "a", "completion": "b"}):
        message = rf"line 1: .*, 0 to {last - 1}, but got {last} at position"
        with pytest.raises(TrainingError, match=message):
            _read(tmp_path, tokenizer, line, vocab_size=last)
        assert len(_read(tmp_path, tokenizer, line, vocab_size=last + 1).samples) == 1


def _one(tmp_path: Path, tokenizer: Tokenizer, line: Any, **options: Any) -> Sample:
    [sample] = _read(tmp_path, tokenizer, line, **options).samples
    return sample


def test_text_ends_with_the_end_of_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    sample = _one(tmp_path, tokenizer, {"text": "The cat sat."})
    want = [*tokenizer.encode("The cat sat."), min(tokenizer.eos_token_ids)]
    assert (sample.tokens.tolist(), sample.prompt) == (want, 0)


def test_chat_is_what_the_template_writes(tmp_path: Path, tokenizer: Tokenizer) -> None:
    sample = _one(tmp_path, tokenizer, {"messages": CHAT})
    want = tokenizer.apply_chat_template(CHAT, add_generation_prompt=False)
    assert (sample.tokens.tolist(), sample.prompt) == (want, 0)


def test_masked_prompt_of_a_chat_ends_where_the_answer_begins(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    sample = _one(tmp_path, tokenizer, {"messages": CHAT}, mask_prompt=True)
    prompt = tokenizer.apply_chat_template(CHAT[:-1], add_generation_prompt=True)
    assert sample.tokens[: sample.prompt].tolist() == prompt
    assert tokenizer.decode(sample.tokens[sample.prompt :].tolist()) == "The cat.<|eot_id|>"


def test_a_single_answer_is_learned_whole(tmp_path: Path, tokenizer: Tokenizer) -> None:
    sample = _one(tmp_path, tokenizer, {"messages": [CAT]}, mask_prompt=True)
    want = tokenizer.apply_chat_template([CAT], add_generation_prompt=False)
    assert (sample.tokens.tolist(), sample.prompt) == (want, 0)


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ({"messages": [*CHAT, MORE]}, CHAT),
        ({"messages": [*CHAT, {"role": "tool", "content": "4"}, MORE]}, CHAT),
        ({"messages": [*CHAT, MORE, DOG, MORE]}, [*CHAT, MORE, DOG]),
        ({"prompt": [SYSTEM, USER], "completion": [CAT, MORE]}, CHAT),
        ({"prompt": [SYSTEM], "completion": [USER, CAT, MORE]}, CHAT),
    ],
)
def test_turns_after_the_last_answer_are_cut_off(
    tmp_path: Path, tokenizer: Tokenizer, line: dict[str, Any], left: list[Any]
) -> None:
    found = _read(tmp_path, tokenizer, line, mask_prompt=True)
    [got], want = found.samples, _one(tmp_path, tokenizer, {"messages": left}, mask_prompt=True)
    assert (got.tokens.tolist(), got.prompt) == (want.tokens.tolist(), want.prompt)
    assert found.shortened == 1 and "turns after the last answer of 1 cut off" in found.summary()
    whole = _read(tmp_path, tokenizer, line)
    assert not whole.shortened and whole.samples[0].length > got.length


@pytest.mark.parametrize(
    "line",
    [
        {"messages": [SYSTEM, USER]},
        {"messages": [USER, {"role": "tool", "content": "4"}]},
        {"prompt": [USER, CAT], "completion": [MORE]},
    ],
)
def test_a_sample_without_an_answer_is_left_out(
    tmp_path: Path, tokenizer: Tokenizer, line: dict[str, Any]
) -> None:
    found = _read(tmp_path, tokenizer, line, {"messages": CHAT}, mask_prompt=True)
    assert (len(found.samples), found.unanswered, found.dropped) == (1, 1, 0)
    assert "; 1 left out, without an answer of the assistant" in found.summary()
    with pytest.raises(TrainingError, match="at least one sample with something to learn"):
        _read(tmp_path, tokenizer, line, mask_prompt=True).check_some()
    assert len(_read(tmp_path, tokenizer, line).samples) == 1


@pytest.mark.parametrize("messages", [["Who?"], [{"content": "Who?"}], [USER, None]])
def test_what_is_no_message_is_not_left_out(
    tmp_path: Path, tokenizer: Tokenizer, messages: list[Any]
) -> None:
    with pytest.raises(TrainingError, match="must be a list of at least one object with 'role'"):
        _read(tmp_path, tokenizer, {"messages": messages}, mask_prompt=True)


def test_an_answer_that_is_written_another_way_is_learned_from_there_on(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}assistant:<think>{% endif %}"
    )
    tokenizer = Tokenizer.from_folder(_changed_template(tmp_path / "other", template))
    sample = _one(tmp_path, tokenizer, {"messages": CHAT}, mask_prompt=True)
    learned = tokenizer.decode(sample.tokens[sample.prompt :].tolist())
    assert learned.endswith("The cat. ") and "<think>" not in learned
    assert len(learned) < len("assistant: The cat. ")


def test_prompt_and_completion_are_a_chat(tmp_path: Path, tokenizer: Tokenizer) -> None:
    line = {"prompt": "Who?", "completion": "The cat."}
    got = _one(tmp_path, tokenizer, line, mask_prompt=True)
    want = _one(tmp_path, tokenizer, {"messages": CHAT[1:]}, mask_prompt=True)
    assert (got.tokens.tolist(), got.prompt) == (want.tokens.tolist(), want.prompt)


def test_prompt_and_completion_without_a_template_are_concatenated(
    tmp_path: Path, plain: Tokenizer
) -> None:
    line = {"prompt": "Who sat?", "completion": " The cat."}
    sample = _one(tmp_path, plain, line, mask_prompt=True)
    prompt, answer = plain.encode("Who sat?"), plain.encode(" The cat.", add_special_tokens=False)
    assert sample.tokens.tolist() == [*prompt, *answer, min(plain.eos_token_ids)]
    assert sample.prompt == len(prompt)
    assert _one(tmp_path, plain, line).prompt == 0


@pytest.mark.parametrize(
    ("prompt", "completion", "tokens", "masked"),
    [
        ([USER], [CAT], 27, 21),
        ([SYSTEM, USER], [CAT], 45, 39),
        ([USER, CAT, MORE], [DOG], 54, 47),
        ([USER], [CAT, MORE, DOG], 54, 21),
    ],
)
def test_prompt_and_completion_may_be_messages(
    prompt: list[Any],
    completion: list[Any],
    tokens: int,
    masked: int,
    tmp_path: Path,
    tokenizer: Tokenizer,
) -> None:
    """The numbers come from the SFTTrainer of trl 1.16.0 with transformers 5.24.0."""
    line = {"prompt": prompt, "completion": completion}
    got = _one(tmp_path, tokenizer, line, mask_prompt=True)
    whole = tokenizer.apply_chat_template([*prompt, *completion], add_generation_prompt=False)
    assert got.tokens.tolist() == whole
    assert (got.length, got.prompt) == (tokens, masked)
    assert _one(tmp_path, tokenizer, line).prompt == 0


@pytest.mark.parametrize(
    "line", [{"prompt": [USER], "completion": "The cat."}, {"prompt": "Who?", "completion": [CAT]}]
)
def test_one_of_prompt_and_completion_may_be_messages(
    line: dict[str, Any], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    got = _one(tmp_path, tokenizer, line, mask_prompt=True)
    want = _one(tmp_path, tokenizer, {"prompt": "Who?", "completion": "The cat."}, mask_prompt=True)
    assert (got.tokens.tolist(), got.prompt) == (want.tokens.tolist(), want.prompt)


@pytest.mark.parametrize("text", ["The cat.", "The cat.<|eot_id|>"])
def test_a_text_that_spells_its_first_token_has_it_once(
    text: str, tmp_path: Path, tokenizer: Tokenizer, plain: Tokenizer
) -> None:
    want = _one(tmp_path, tokenizer, {"text": text}).tokens.tolist()
    assert want.count(tokenizer.bos_token_id) == 1
    spelled = "<|begin_of_text|>" + text
    assert _one(tmp_path, tokenizer, {"text": spelled}).tokens.tolist() == want
    line = {"prompt": spelled, "completion": " Yes."}
    ids = _one(tmp_path, plain, line).tokens.tolist()
    assert ids.count(plain.bos_token_id) == 1


def test_a_sentencepiece_text_spells_special_tokens(tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDENS / "tokenizer_spm", tmp_path / "spm")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": None}))
    tokenizer = Tokenizer.from_folder(folder)
    first, last = tokenizer.bos_token_id, tokenizer.eos_token_id
    sample = _one(tmp_path, tokenizer, {"text": "<s>The cat.</s>"})
    ids = sample.tokens.tolist()
    assert (ids[0], ids[-1], ids.count(first), ids.count(last)) == (first, last, 1, 1)
    assert ids[:-1] == tokenizer.encode("The cat.")
    assert ids == _one(tmp_path, tokenizer, {"text": "<s><s>The cat."}).tokens.tolist()
    # a completion goes on after its prompt, with no space that it does not have
    line = {"prompt": "The", "completion": " cat."}
    sample = _one(tmp_path, tokenizer, line, mask_prompt=True)
    assert tokenizer.decode(sample.tokens[1:-1].tolist()) == "The cat."
    assert sample.prompt == len(tokenizer.encode("The"))


def test_the_end_of_text_stands_after_the_completion_alone(tmp_path: Path) -> None:
    folder = _changed_template(tmp_path / "ends", None)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"add_eos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.from_folder(folder)
    end = tokenizer.eos_token_id
    assert tokenizer.encode("Who sat?")[-1] == end
    line = {"prompt": "Who sat?", "completion": " The cat."}
    for completion in (" The cat.", " The cat." + tokenizer.id_to_piece(end)):
        sample = _one(tmp_path, tokenizer, line | {"completion": completion}, mask_prompt=True)
        ids = sample.tokens.tolist()
        assert ids.count(end) == 1 and ids[-1] == end
        assert sample.prompt == len(tokenizer.encode("Who sat?")) - 1


def test_tools_reach_the_template(tmp_path: Path) -> None:
    template = (
        "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    tokenizer = Tokenizer.from_folder(_changed_template(tmp_path / "tools", template))
    sample = _one(tmp_path, tokenizer, {"messages": CHAT, "tools": TOOLS}, mask_prompt=True)
    assert "[look]" in tokenizer.decode(sample.tokens.tolist())
    without = _one(tmp_path, tokenizer, {"messages": CHAT}, mask_prompt=True)
    assert sample.prompt - without.prompt == len(sample.tokens) - len(without.tokens) > 0


def test_variables_of_the_template_reach_it(tmp_path: Path) -> None:
    template = "{{ style }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer.from_folder(_changed_template(tmp_path / "style", template))
    line = {"messages": CHAT, "chat_template_kwargs": {"style": "short"}}
    assert "short" in tokenizer.decode(_one(tmp_path, tokenizer, line).tokens.tolist())
    for wrong in ("short", {"messages": []}):
        with pytest.raises(TrainingError, match="'chat_template_kwargs' must be an object without"):
            _read(tmp_path, tokenizer, line | {"chat_template_kwargs": wrong})


def test_reasoning_that_the_template_leaves_out_are_counted(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(_changed_template(tmp_path / "thinking", THINKING))
    lines = [
        {"messages": [USER, CAT | answer]}
        for answer in (
            {"reasoning": "A cat?"},
            {"content": "The cat.", "thinking": " A cat? "},
            {"content": "<think>A dog?</think>The cat."},
            {"content": "The cat."},
        )
    ]
    found = _read(tmp_path, tokenizer, *lines)
    assert found.without_reasoning == 1
    assert found.summary().endswith("; the chat template leaves out the reasoning of 1")
    silent = Tokenizer.from_folder(
        _changed_template(tmp_path / "silent", THINKING.replace("{{ m.thinking }}", ""))
    )
    assert _read(tmp_path, silent, *lines).without_reasoning == 3


def test_keys_that_are_not_read_are_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    line = {"messages": CHAT, "tools": None, "id": 3, "source": "x", "text": None, "prompt": "Who?"}
    found = _read(tmp_path, tokenizer, line, {"text": "The cat.", "tools": TOOLS})
    assert found.unread == {"id", "source", "prompt", "tools"}
    assert found.summary().endswith("; not read: 'id', 'prompt', 'source', 'tools'")
    many = {f"key{n}": 1 for n in range(12)}
    assert _read(tmp_path, tokenizer, line | many).summary().endswith("'key4' and 7 more")


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": None, "completion": None, "messages": None, "text": "The cat."},
        {"prompt": "Who?", "completion": None, "text": "The cat."},
        {"messages": None, "text": "The cat."},
    ],
)
def test_a_key_that_holds_null_is_absent(
    line: dict[str, Any], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    want = _one(tmp_path, tokenizer, {"text": "The cat."})
    assert _one(tmp_path, tokenizer, line).tokens.tolist() == want.tokens.tolist()


def test_other_names_of_the_keys(tmp_path: Path, tokenizer: Tokenizer) -> None:
    features = Features(prompt="question", completion="answer", text="story")
    line = {"question": "Who?", "answer": "The cat.", "story": "long"}
    got = _one(tmp_path, tokenizer, line, features=features)
    want = _one(tmp_path, tokenizer, {"prompt": "Who?", "completion": "The cat."})
    assert got.tokens.tolist() == want.tokens.tolist()


def test_long_samples_are_cut_and_counted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    short, long = {"text": "The cat."}, {"text": "The cat sat. " * 30}
    found = _read(tmp_path, tokenizer, short, long, max_length=20)
    assert [len(sample.tokens) <= 20 for sample in found.samples] == [True, True]
    assert (found.truncated, found.dropped) == (1, 0)
    assert found.summary().endswith("; 1 cut to the maximum length")


def test_a_sample_with_nothing_left_to_learn_is_left_out(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    line = {"prompt": "Who sat? " * 20, "completion": "The cat."}
    found = _read(tmp_path, tokenizer, line, max_length=20, mask_prompt=True)
    assert (found.samples, found.truncated, found.dropped) == ([], 1, 1)
    assert found.summary().endswith("1 left out, with nothing to learn")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', "it must be JSON"),
        ("[" * 100_000, "it must be nested at most 64 deep"),
        ("[1, 2]", "it must be a JSON object but is list"),
        ({}, "but has no keys"),
        ({"prompt": "Who?"}, "must have 'prompt' and 'completion', or 'messages', or 'text'"),
        ({"text": 3}, "'text' must be text but is int"),
        ({"text": None}, r"'text', or .* but has 'text' \(null\)"),
        (
            {"prompt": 3, "completion": "x"},
            "'prompt' must be text or a list of messages but is int",
        ),
        (
            {"prompt": [], "completion": {}},
            "'completion' must be text or a list of messages but is",
        ),
        ({"prompt": [USER], "completion": []}, "'completion' must hold a message but is empty"),
        ({"messages": [USER], "tools": "look"}, "the text in 'tools' must be JSON but is not"),
        ({"prompt": "Who?", "completion": None}, r"but has 'prompt', 'completion' \(null\)"),
        ({"messages": []}, "'messages' must be a list of messages"),
        ({"messages": "hello"}, "'messages' must be a list of messages"),
        ({"messages": [3]}, "must be a list of at least one object"),
        ({"text": "\ud800"}, "half of a surrogate pair"),
        ('{"text": "' + "x" * 4_000_000 + '"}', "must have at most 4,000,000 bytes but has more"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_bad_lines_are_named(tmp_path: Path, tokenizer: Tokenizer, line: Any, message: str) -> None:
    with pytest.raises(TrainingError, match=r"train\.jsonl' line 3: .*" + message):
        _read(tmp_path, tokenizer, {"text": "The cat."}, "", line)


def test_a_text_has_no_prompt_to_mask(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(TrainingError, match=r"line 1: it must have a prompt for 'mask_prompt'"):
        _read(tmp_path, tokenizer, {"text": "The cat."}, mask_prompt=True)


def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "train.jsonl"
    file.write_bytes(2 * '\ufeff{"text": "The cat."}\n'.encode())
    want = tokenizer.encode_parts(["The cat."])[0] + [min(tokenizer.eos_token_ids)]
    assert [sample.tokens.tolist() for sample in read_samples(file, tokenizer).samples] == [
        want,
        want,
    ]
    file.write_bytes('{"text": "The cat."}\n'.encode("utf-16"))
    with pytest.raises(TrainingError, match=r"line 1: it must be UTF-8 but is UTF-16"):
        read_samples(file, tokenizer)


def test_bytes_that_are_no_text_are_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "train.jsonl").write_bytes(b'{"text": "\xff"}')
    with pytest.raises(TrainingError, match=r"train\.jsonl' line 1: it must be UTF-8 but is not"):
        read_samples(tmp_path / "train.jsonl", tokenizer)


def test_columns_that_are_not_used_may_hold_anything(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert _read(tmp_path, tokenizer, '{"text": "The cat.", "score": NaN}').samples


@pytest.mark.parametrize("name", ["valid", "validation", "val", "dev", "eval"])
@pytest.mark.parametrize("kind", [".jsonl", ".parquet", ".csv", ".tsv", ".json", ".jsonl.xz"])
def test_validation_under_its_usual_names(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / f"{name}{kind}").touch()
    assert find_splits(tmp_path) == {"valid": [tmp_path / f"{name}{kind}"]}


def test_splits_that_exist(tmp_path: Path) -> None:
    for name in ("train.jsonl", "test.jsonl", "other.jsonl"):
        (tmp_path / name).touch()
    assert sorted(find_splits(tmp_path)) == ["test", "train"]
    (tmp_path / "train.csv").touch()
    with pytest.raises(TrainingError, match=r"one file for train but holds 'train\.jsonl' and 'tr"):
        find_splits(tmp_path)
    with pytest.raises(TrainingError, match="is neither"):
        find_splits(tmp_path / "absent")
