"""Reading preferences: their formats, what is learned of them, and bad lines."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_mmfree.errors import TrainingError
from mlx_mmfree.hub import Tokenizer
from mlx_mmfree.training.fine_tuning.preferences import Pair, pair_batch, read_pairs
from mlx_mmfree.training.samples import Features, Samples
from tests.training.test_samples import _changed_template

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
QUESTION = {"role": "user", "content": "Who?"}
WHY = {"role": "user", "content": "Why?"}
SYSTEM = {"role": "system", "content": "Be brief."}
CAT, DOG = ({"role": "assistant", "content": f"The {name}."} for name in ("cat", "dog"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(GOLDENS / "tokenizer_bpe")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer without a chat template."""
    folder = tmp_path_factory.mktemp("tokenizer") / "plain"
    return Tokenizer.from_folder(_changed_template(folder, None))


def _read(tmp_path: Path, tokenizer: Tokenizer, *lines: Any, **options: Any) -> Samples[Pair]:
    file = tmp_path / "train.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return read_pairs(file, tokenizer, **options)


def test_a_token_without_a_row_is_named_with_its_line(tmp_path: Path, tokenizer: Tokenizer) -> None:
    line = {"prompt": "Who?", "chosen": "The cat.", "rejected": "z"}
    rows = tokenizer.encode("z", add_special_tokens=False)[0]
    with pytest.raises(TrainingError, match=rf"line 1: .*, 0 to {rows - 1}, but got"):
        _read(tmp_path, tokenizer, line, vocab_size=rows)


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": "Who?", "chosen": "The cat.", "rejected": "The dog."},
        {"prompt": [QUESTION], "chosen": [CAT], "rejected": [DOG]},
        {"prompt": [QUESTION], "chosen": "The cat.", "rejected": "The dog."},
        {"prompt": "Who?", "chosen": [CAT], "rejected": [DOG]},
        {"chosen": [QUESTION, CAT], "rejected": [QUESTION, DOG]},
        {"prompt": [QUESTION], "chosen": [QUESTION, CAT], "rejected": [QUESTION, DOG]},
        {"prompt": "Who?", "chosen": [QUESTION, CAT], "rejected": [QUESTION, DOG]},
        {"question": "Who?", "chosen": "The cat.", "rejected": "The dog."},
        {"instruction": "Who?", "input": "", "chosen": "The cat.", "rejected": "The dog."},
        {"input": "Who?", "system": "", "chosen": [CAT], "rejected": "The dog."},
        {"prompt": "Who?", "question": None, "chosen": CAT, "rejected": DOG},
        {"chosen": {"messages": [QUESTION, CAT]}, "rejected": {"messages": [QUESTION, DOG]}},
    ],
    ids=lambda line: " ".join(f"{key}-{type(value).__name__}" for key, value in line.items()),
)
def test_conversations(tmp_path: Path, tokenizer: Tokenizer, line: dict[str, Any]) -> None:
    [pair] = _read(tmp_path, tokenizer, line).samples
    for sample, answer in zip(pair.texts, (CAT, DOG), strict=True):
        wanted = tokenizer.apply_chat_template([QUESTION, answer], add_generation_prompt=False)
        assert sample.tokens.tolist() == wanted
        begun = tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True)
        assert sample.tokens[: sample.prompt].tolist() == begun
    assert pair.reference is None


@pytest.mark.parametrize(
    ("line", "sizes"),
    [
        ({"prompt": [QUESTION], "chosen": [CAT], "rejected": [DOG]}, (27, 28, 21)),
        ({"prompt": [SYSTEM, QUESTION], "chosen": [CAT], "rejected": [DOG]}, (45, 46, 39)),
        ({"chosen": [SYSTEM, QUESTION, CAT], "rejected": [SYSTEM, QUESTION, DOG]}, (45, 46, 39)),
        (
            {"system": "Be brief.", "question": "Who?", "chosen": [CAT], "rejected": [DOG]},
            (45, 46, 39),
        ),
        (
            {"system": "Be brief.", "input": "Who?", "chosen": "The cat.", "rejected": "The dog."},
            (45, 46, 39),
        ),
        (
            {
                "system": "Be brief.",
                "chosen": [SYSTEM, QUESTION, CAT],
                "rejected": [SYSTEM, QUESTION, DOG],
            },
            (45, 46, 39),
        ),
        (
            {
                "system": "Be brief.",
                "prompt": "Who?",
                "chosen": [QUESTION, CAT],
                "rejected": [QUESTION, DOG],
            },
            (45, 46, 39),
        ),
        ({"prompt": [QUESTION], "chosen": [CAT, WHY, DOG], "rejected": [DOG]}, (54, 28, 21)),
    ],
)
def test_tokens_of_pairs(
    line: dict[str, Any], sizes: tuple[int, int, int], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """The numbers come from the DPOTrainer of trl 1.16.0 with transformers 5.24.0.

    They are the tokens of the chosen and of the rejected text, and of the prompt of both.
    """
    [pair] = _read(tmp_path, tokenizer, line).samples
    assert (pair.chosen.length, pair.rejected.length, pair.chosen.prompt) == sizes
    assert pair.rejected.prompt == pair.chosen.prompt


@pytest.mark.parametrize(
    "line",
    [
        {"chosen": [QUESTION, CAT, WHY], "rejected": [QUESTION, DOG]},
        {
            "prompt": "Who?",
            "chosen": [CAT, WHY, {"role": "tool", "content": "4"}],
            "rejected": [DOG],
        },
        {"prompt": [QUESTION], "chosen": [CAT], "rejected": [DOG, WHY]},
    ],
)
def test_turns_after_the_answers_are_cut_off(
    line: dict[str, Any], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    found = _read(tmp_path, tokenizer, line)
    [pair], want = found.samples, {"prompt": [QUESTION], "chosen": [CAT], "rejected": [DOG]}
    [wanted] = _read(tmp_path, tokenizer, want).samples
    assert [(s.tokens.tolist(), s.prompt) for s in pair.texts] == [
        (s.tokens.tolist(), s.prompt) for s in wanted.texts
    ]
    assert found.shortened == 1


@pytest.mark.parametrize(
    "line",
    [
        {"chosen": [QUESTION, CAT, WHY], "rejected": [QUESTION, CAT, WHY, DOG]},
        {"chosen": [QUESTION, WHY], "rejected": [QUESTION, DOG]},
        {"prompt": "Who?", "chosen": [CAT], "rejected": [WHY]},
    ],
)
def test_a_pair_without_an_answer_is_left_out(
    line: dict[str, Any], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    found = _read(tmp_path, tokenizer, line)
    assert (found.samples, found.unanswered) == ([], 1)
    with pytest.raises(TrainingError, match="at least one sample with something to learn"):
        found.check_some()


def test_an_instruction_may_have_an_input(tmp_path: Path, plain: Tokenizer) -> None:
    answers = {"chosen": " The cat.", "rejected": " The dog."}
    line = {"instruction": "Who sat?", "input": "A cat sat."}
    [pair] = _read(tmp_path, plain, line | answers).samples
    [want] = _read(tmp_path, plain, {"prompt": "Who sat?\nA cat sat."} | answers).samples
    assert pair.chosen.tokens.tolist() == want.chosen.tokens.tolist()


def test_keys_that_are_not_read_are_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    line = {
        "prompt": "Who?",
        "question": "Why?",
        "chosen": "A",
        "rejected": "B",
        "score": 3,
        "id": None,
    }
    assert _read(tmp_path, tokenizer, line).summary().endswith("; not read: 'question', 'score'")


def test_several_messages_of_an_answer_are_learned(tmp_path: Path, tokenizer: Tokenizer) -> None:
    more = [CAT, {"role": "user", "content": "Why?"}, DOG]
    [pair] = _read(
        tmp_path, tokenizer, {"prompt": [QUESTION], "chosen": more, "rejected": [DOG]}
    ).samples
    assert pair.chosen.prompt == pair.rejected.prompt
    assert "cat" in tokenizer.decode(pair.chosen.tokens[pair.chosen.prompt :].tolist())


def test_texts_without_a_template_are_concatenated(tmp_path: Path, plain: Tokenizer) -> None:
    line = {"prompt": "Who?", "chosen": " The cat.", "rejected": " The dog sat."}
    [pair] = _read(tmp_path, plain, line).samples
    prompt = plain.encode("Who?")
    answer = plain.encode(" The cat.", add_special_tokens=False)
    assert pair.chosen.tokens.tolist() == [*prompt, *answer, min(plain.eos_token_ids)]
    assert pair.chosen.prompt == pair.rejected.prompt == len(prompt)


def test_what_texts_share_is_their_prompt(tmp_path: Path, plain: Tokenizer) -> None:
    line = {"chosen": "Who? The cat.", "rejected": "Who? The dog sat."}
    [pair] = _read(tmp_path, plain, line).samples
    shared = pair.chosen.prompt
    assert shared == pair.rejected.prompt > 0
    assert pair.chosen.tokens[:shared].tolist() == pair.rejected.tokens[:shared].tolist()
    assert pair.chosen.tokens[shared] != pair.rejected.tokens[shared]


def test_other_keys(tmp_path: Path, plain: Tokenizer) -> None:
    features = Features(prompt="question", chosen="good", rejected="bad")
    line = {"question": "Who?", "good": "Cat.", "bad": "Dog."}
    assert len(_read(tmp_path, plain, line, features=features).samples) == 1


def test_long_answers_are_cut_and_counted(tmp_path: Path, plain: Tokenizer) -> None:
    lines = [
        {"prompt": "Who?", "chosen": "The cat." * 9, "rejected": "The dog."},
        {"prompt": "Who?" * 9, "chosen": "The cat.", "rejected": "The dog."},
    ]
    found = _read(tmp_path, plain, *lines, max_length=12)
    assert (len(found.samples), found.truncated, found.dropped) == (1, 2, 1)
    assert found.samples[0].length == 12
    assert found.summary().startswith("1 sample, ")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            {"prompt": "Who?", "chosen": "Cat."},
            "must have 'chosen' and 'rejected' but has 'prompt'",
        ),
        ({"prompt": "Who?", "chosen": 3, "rejected": "Dog."}, "'chosen' must be text but is int"),
        (
            {"prompt": 3, "chosen": "Cat.", "rejected": "Dog."},
            "'prompt' must be text or a list of messages but is int",
        ),
        ({"prompt": 3, "chosen": [CAT], "rejected": [DOG]}, "must be text or a list of messages"),
        ({"prompt": [QUESTION], "chosen": [], "rejected": [DOG]}, "must be different texts"),
        ({"chosen": [CAT], "rejected": [CAT]}, "must be different texts"),
        ({"prompt": [QUESTION], "chosen": 3, "rejected": [DOG]}, "must be different texts"),
        ({"chosen": [CAT], "rejected": "Dog."}, "'chosen' must be text but is list"),
        (
            {"prompt": "Who?", "chosen": None, "rejected": "Dog."},
            r"but has 'prompt', 'chosen' \(null\)",
        ),
        (
            {"query": "Who?", "chosen": "Cat.", "rejected": "Dog."},
            "must have its prompt under 'prompt', 'question'",
        ),
        (
            {"query": "Who?", "chosen": [CAT], "rejected": [DOG]},
            "or in both answers, but has 'query'. Name the",
        ),
        (
            {"question": "Who?", "input": "Why?", "chosen": "Cat.", "rejected": "Dog."},
            "must have one prompt but",
        ),
        (
            {"system": 3, "question": "Who?", "chosen": "Cat.", "rejected": "Dog."},
            "'system' must be text but is int",
        ),
    ],
)
def test_bad_lines(tmp_path: Path, tokenizer: Tokenizer, line: Any, reason: str) -> None:
    with pytest.raises(TrainingError, match=rf"train.jsonl' line 1: .*{reason}"):
        _read(tmp_path, tokenizer, line)


def test_batches_hold_chosen_answers_first(tmp_path: Path, tokenizer: Tokenizer) -> None:
    lines = [{"prompt": f"{n}?", "chosen": "A" * n, "rejected": "B"} for n in (1, 9)]
    pairs = _read(tmp_path, tokenizer, *lines).samples
    batch = pair_batch(pairs)
    rows = [pairs[0].chosen, pairs[1].chosen, pairs[0].rejected, pairs[1].rejected]
    for row, sample in zip(batch.inputs, rows, strict=True):
        assert row[: sample.length - 1].tolist() == sample.tokens[:-1].tolist()
    assert batch.reference is None and batch.terms == 2
    assert batch.tokens == sum(sample.length - sample.prompt for sample in rows)
