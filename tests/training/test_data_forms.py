"""Data as people have it: files, tables, lists and texts, splits of the Hub, Alpaca and ShareGPT."""

import datetime
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_mmfree import demo
from mlx_mmfree.cli import main as command
from mlx_mmfree.errors import TrainingError
from mlx_mmfree.hub import Tokenizer
from mlx_mmfree.training.corpus.tokenize import open_token_file
from mlx_mmfree.training.fine_tuning.data import read_data
from mlx_mmfree.training.fine_tuning.rollouts import Problems
from mlx_mmfree.training.fine_tuning.settings import FineTuneSettings
from mlx_mmfree.training.samples import Samples
from tests.hub.hub_client import HubClient
from tests.hub.hub_server import HubServer
from tests.training.test_fine_tune import GOLDENS
from tests.training.test_samples import _changed_template

LINES = [{"prompt": f"Who is {n}?", "completion": f"The {n}."} for n in range(5)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(GOLDENS / "tokenizer_bpe")


def _write(file: Path, lines: list[dict[str, Any]]) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(map(json.dumps, lines)))
    return str(file)


def _write_parquet(file: Path, lines: list[dict[str, Any]]) -> str:
    import pyarrow as pa
    from pyarrow.parquet import write_table

    file.parent.mkdir(parents=True, exist_ok=True)
    write_table(pa.Table.from_pylist(lines), file, row_group_size=2)
    return str(file)


def _read(data: str, tokenizer: Tokenizer, **values: Any) -> dict[str, Samples[Any]]:
    return read_data(FineTuneSettings(data=data, **values), tokenizer)


def _tokens(samples: Samples[Any]) -> list[tuple[list[int], int]]:
    return [(text.tokens.tolist(), text.prompt) for s in samples.samples for text in s.texts]


def test_a_file_is_the_training_samples(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = _read(str(Path(_write(tmp_path / "data/train.jsonl", LINES)).parent), tokenizer)
    alone = _read(_write(tmp_path / "mine.jsonl", LINES), tokenizer)
    assert folder.keys() == alone.keys() == {"train"}
    assert _tokens(alone["train"]) == _tokens(folder["train"]) and len(alone["train"].samples) == 5


TURNS = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "Who?"},
    {"from": "gpt", "value": "The cat."},
]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "The cat."},
]


@pytest.mark.parametrize(
    "line",
    [
        {"conversations": TURNS},
        {"conversations": TURNS[1:], "system": "Be brief."},
        {"messages": TURNS},
        {"conversations": MESSAGES},
    ],
)
def test_turns_become_messages(tmp_path: Path, tokenizer: Tokenizer, line: dict[str, Any]) -> None:
    want = _read(_write(tmp_path / "want.jsonl", [{"messages": MESSAGES}]), tokenizer)["train"]
    got = _read(_write(tmp_path / "got.jsonl", [line]), tokenizer)["train"]
    assert _tokens(got) == _tokens(want)
    assert "ShareGPT's turns of 1 converted to messages" in got.summary()
    assert "ShareGPT" not in want.summary() and "not read" not in got.summary()


def test_turns_of_pairs_become_messages(tmp_path: Path, tokenizer: Tokenizer) -> None:
    turns, messages = (
        {name: lines[1:2], "chosen": lines[2], "rejected": {**lines[2], last: "A dog."}}
        for name, lines, last in (
            ("conversations", TURNS, "value"),
            ("prompt", MESSAGES, "content"),
        )
    )
    got, want = (
        _read(_write(tmp_path / f"{n}.jsonl", [line]), tokenizer, train_mode="dpo")["train"]
        for n, line in enumerate((turns, messages))
    )
    assert _tokens(got) == _tokens(want) and got.converted == 1 and want.converted == 0


def test_turns_of_problems_become_messages(tmp_path: Path, tokenizer: Tokenizer) -> None:
    line = {"conversations": TURNS[:2], "answer": "The cat."}
    [problem] = _read(_write(tmp_path / "a.jsonl", [line]), tokenizer, train_mode="grpo")[
        "train"
    ].samples
    assert problem.prompt == MESSAGES[:2]


def test_turns_of_nobody_known_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    line = {"conversations": [{"from": "narrator", "value": "Once"}]}
    with pytest.raises(TrainingError, match=r"line 1: a turn must be from human, .*'narrator'"):
        _read(_write(tmp_path / "a.jsonl", [line]), tokenizer)


def _csv(*lines: str) -> str:
    return "".join(f"{line}\n" for line in lines)


ALPACA = [
    {"instruction": "Add.", "input": "1 + 1", "output": "2"},
    {"instruction": "Who?", "input": "", "output": "The cat."},
]
AS_PROMPTS = [
    {"prompt": "Add.\n1 + 1", "completion": "2"},
    {"prompt": "Who?", "completion": "The cat."},
]


@pytest.mark.parametrize("kind", [".jsonl", ".json"])
def test_alpaca_in_lines_and_in_a_list(tmp_path: Path, tokenizer: Tokenizer, kind: str) -> None:
    want = _read(_write(tmp_path / "want.jsonl", AS_PROMPTS), tokenizer)["train"]
    file = tmp_path / f"train{kind}"
    file.write_text(
        json.dumps(ALPACA, indent=1) if kind == ".json" else "\n".join(map(json.dumps, ALPACA))
    )
    for data in (file, tmp_path):
        got = _read(str(data), tokenizer)["train"]
        assert _tokens(got) == _tokens(want) and not got.unread
    masked = _read(str(file), tokenizer, mask_prompt=True)["train"]
    assert all(prompt > 0 for _, prompt in _tokens(masked))


def test_alpaca_with_a_system_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    line = {**ALPACA[1], "system": "Be brief."}
    got = _read(_write(tmp_path / "got.jsonl", [line]), tokenizer)["train"]
    want = _read(_write(tmp_path / "want.jsonl", [{"messages": MESSAGES}]), tokenizer)["train"]
    assert _tokens(got) == _tokens(want)


def test_turns_in_a_list_become_messages(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "chats.json").write_text(json.dumps([{"id": "1", "conversations": TURNS}] * 2))
    got = _read(str(tmp_path / "chats.json"), tokenizer)["train"]
    assert len(got.samples) == got.converted == 2 and got.unread == {"id"}


@pytest.mark.parametrize("name", ["train.csv", "train.tsv", "train.csv.xz"])
def test_a_table_in_a_folder_with_names_of_its_own(
    tmp_path: Path, tokenizer: Tokenizer, name: str
) -> None:
    want = _read(_write(tmp_path / "want.jsonl", LINES), tokenizer)["train"]
    separator = "\t" if ".tsv" in name else ","
    rows = [separator.join((f'"{line["prompt"]}"', line["completion"])) for line in LINES]
    text = _csv(separator.join(("question", "reply")), *rows).encode()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_bytes(lzma.compress(text) if ".xz" in name else text)
    names = {"prompt_feature": "question", "completion_feature": "reply"}
    assert _tokens(_read(str(tmp_path / "data"), tokenizer, **names)["train"]) == _tokens(want)
    with pytest.raises(
        TrainingError, match=r"line 2: .* but has 'question', 'reply'\. Name other keys by --pr"
    ):
        _read(str(tmp_path / "data"), tokenizer)


def test_tables_of_pairs_and_of_problems(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "a.csv"
    file.write_text(_csv("prompt,chosen,rejected", "Who?,The cat.,A dog."))
    [pair] = _read(str(file), tokenizer, train_mode="dpo")["train"].samples
    assert len(pair.texts) == 2
    file.write_text(_csv("prompt,answer", "Who?,The cat."))
    [problem] = _read(str(file), tokenizer, train_mode="grpo")["train"].samples
    assert problem.prompt == "Who?" and problem.columns["answer"] == "The cat."


def test_a_folder_of_texts(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for name in ("b.md", "a.txt", "valid.txt", "valid-2.md", "test.txt", ".hidden.txt"):
        (tmp_path / name).write_text(f"A story of {name}.")
    want = _read(
        _write(
            tmp_path / "x/want.jsonl", [{"text": f"A story of {n}."} for n in ("a.txt", "b.md")]
        ),
        tokenizer,
    )["train"]
    found = _read(str(tmp_path), tokenizer)
    assert _tokens(found["train"]) == _tokens(want)
    assert {name: len(samples.samples) for name, samples in found.items()} == {
        "train": 2,
        "valid": 2,
        "test": 1,
    }


def test_a_share_to_validate_on(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    data = _write(tmp_path / "a.jsonl", LINES * 2)
    whole = _read(data, tokenizer)["train"]
    found = _read(data, tokenizer, valid_share=0.2)
    train, valid = (_tokens(found[name]) for name in ("train", "valid"))
    assert (len(train), len(valid)) == (8, 2)
    assert sorted(train + valid) == sorted(_tokens(whole))
    _write(tmp_path / "data/train.jsonl", LINES)
    _write(tmp_path / "data/valid.jsonl", LINES[:1])
    assert len(_read(str(tmp_path / "data"), tokenizer, valid_share=0.2)["train"].samples) == 5
    assert "the share to validate on has no effect" in capsys.readouterr().err
    with pytest.raises(TrainingError, match=r"'valid_share' must leave samples .* 0\.5 of 1"):
        _read(_write(tmp_path / "one.jsonl", LINES[:1]), tokenizer, valid_share=0.5)


def test_two_files_for_a_split_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    _write(tmp_path / "train.jsonl", LINES)
    (tmp_path / "train.csv").write_text("text\nOnce\n")
    with pytest.raises(TrainingError, match=r"must hold one file for train but holds .*train\.csv"):
        _read(str(tmp_path), tokenizer)
    (tmp_path / "train.csv").rename(tmp_path / "val.csv")
    _write(tmp_path / "dev.jsonl", LINES)
    with pytest.raises(TrainingError, match=r"for valid but holds 'val\.csv' and 'dev\.jsonl'"):
        _read(str(tmp_path), tokenizer)


def test_a_conversation_without_a_template_names_two_ways_on(tmp_path: Path) -> None:
    base = Tokenizer.from_folder(demo.path())
    data = _write(tmp_path / "a.jsonl", [{"messages": MESSAGES}])
    with pytest.raises(TrainingError, match=r"a chat model, or .* \(--chat-template FILE\)"):
        _read(data, base)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    [sample] = _read(data, base.with_chat_template(template))["train"].samples
    assert base.decode(sample.tokens.tolist()).startswith("system: Be brief.\nuser: Who?")


@pytest.mark.parquet
def test_rows_of_parquet_are_lines(tmp_path: Path, tokenizer: Tokenizer) -> None:
    lines = [{**line, "day": None, "conversations": None, "id": 3} for line in LINES]
    want = _read(_write(tmp_path / "a.jsonl", lines), tokenizer)["train"]
    got = _read(_write_parquet(tmp_path / "a.parquet", lines), tokenizer)["train"]
    assert _tokens(got) == _tokens(want) and got.unread == want.unread == {"id"}
    _write_parquet(tmp_path / "data/train.parquet", [{"conversations": TURNS}])
    of_folder = _read(str(tmp_path / "data"), tokenizer)["train"]
    assert of_folder.converted == 1
    dated = [{"text": "Once.", "day": datetime.date(2025, 1, 2), "bytes": b"\x00", "n": np.nan}]
    assert (
        len(_read(_write_parquet(tmp_path / "b.parquet", dated), tokenizer)["train"].samples) == 1
    )
    (tmp_path / "c.parquet").write_bytes(b"PAR1")
    with pytest.raises(TrainingError, match=r"c\.parquet' must be a readable parquet file"):
        _read(str(tmp_path / "c.parquet"), tokenizer)


def _called(name: str, **arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "Yes.", "tool_calls": [call]}


TEXT, IMAGE = {"type": "text", "text": "See."}, {"type": "image", "image": "a.png"}
RAIN, PRICE = _called("rain", city="Oslo"), _called("price", share="ABC")
ASK, PARTS = {"role": "user", "content": "Go."}, [{"role": "user", "content": [TEXT, IMAGE, TEXT]}]
OPTIONS = [{"chat_template_kwargs": {"a": 1}}, {"chat_template_kwargs": {"b": 2}}]
TOOLS = [
    [{"function": {"name": name, "parameters": {"properties": {key: {"type": "string"}}}}}]
    for name, key in (("rain", "city"), ("price", "share"))
]


@pytest.mark.parquet
@pytest.mark.parametrize(
    ("lines", "options"),
    [
        ([{"messages": [ASK, RAIN]}, {"messages": [ASK, PRICE]}], {}),
        ([{"messages": PARTS, "tools": tools} for tools in TOOLS], {}),
        (
            [
                {"prompt": [ASK], "completion": [call], **o}
                for call, o in zip((RAIN, PRICE), OPTIONS, strict=True)
            ],
            {},
        ),
        (
            [
                {
                    "prompt": [ASK, RAIN, ASK],
                    "chosen": [PRICE],
                    "rejected": [RAIN],
                    "tools": TOOLS[1],
                }
            ],
            {"train_mode": "dpo"},
        ),
        (
            [
                {"prompt": [ASK, RAIN, ASK], "answer": {"type": "integer"}, "tools": TOOLS[0]},
                {"prompt": [ASK, PRICE, ASK], "answer": {"enum": ["a"]}, "tools": TOOLS[1]},
            ],
            {"train_mode": "grpo", "reward_functions": ("json_schema",)},
        ),
    ],
    ids=["arguments", "parts and tools", "prompt and completion", "pairs", "problems"],
)
def test_nulls_of_parquet_columns_are_absent(
    tmp_path: Path, lines: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    template = (
        "{{ tools | tojson }}{{ a }}{{ b }}{% for m in messages %}{% if m.content is string %}"
        "{{ m | tojson }}{% else %}{% for p in m.content %}{{ p.text }}{{ 'image' in p }}{% endfor %}"
        "{% endif %}{% endfor %}"
    )
    tokenizer = Tokenizer.from_folder(_changed_template(tmp_path / "tokenizer", template))
    want = _read(_write(tmp_path / "rows.jsonl", lines), tokenizer, **options)["train"]
    rows = _read(_write_parquet(tmp_path / "rows.parquet", lines), tokenizer, **options)["train"]
    assert _tokens(rows) == _tokens(want) and len(want.samples) == len(lines)
    if isinstance(want, Problems):
        assert [each.prompt for each in want.samples] == [each.prompt for each in rows.samples]


def test_nulls_of_arguments_in_json_lines_are_absent(tmp_path: Path) -> None:
    template = "{{ messages | tojson }}"
    tokenizer = Tokenizer.from_folder(_changed_template(tmp_path / "tokenizer", template))
    given = {"messages": [ASK, _called("rain", city="Oslo", day=None, times=[None, 1])]}
    want = {"messages": [ASK, _called("rain", city="Oslo", times=[None, 1])]}
    got = _read(_write(tmp_path / "a.jsonl", [given]), tokenizer)["train"]
    assert _tokens(got) == _tokens(_read(_write(tmp_path / "b.jsonl", [want]), tokenizer)["train"])


def test_a_fault_is_reported_before_the_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mlx_mmfree.hub.checkpoint.load.OpenedModel.load", None)
    data = _write(tmp_path / "a.jsonl", [LINES[0], {"prompt": "Who?"}])
    assert command(["lora", "--train", "--data", data, "--output", str(tmp_path / "run")]) == 2
    shown = capsys.readouterr()
    assert f"[data] '{data}' line 2: it must have 'prompt' and 'completion'" in shown.err
    assert not shown.out


def test_a_name_of_a_key_that_is_misspelt(tmp_path: Path, tokenizer: Tokenizer) -> None:
    data = _write(tmp_path / "a.jsonl", [{"question": "Who?", "answer": "The cat."}])
    names = {"prompt_feature": "question", "completion_feature": "answr"}
    with pytest.raises(TrainingError, match=r"--text-feature\. Did you mean 'answer'\?"):
        _read(data, tokenizer, **names)
    with pytest.raises(TrainingError, match=r"--rejected-feature\. Did you mean 'answer'\?"):
        _read(data, tokenizer, train_mode="dpo", chosen_feature="answr")


def test_a_fault_of_a_line_has_one_location(tmp_path: Path) -> None:
    data = _write(tmp_path / "a.jsonl", [{"conversations": TURNS}])
    with pytest.raises(TrainingError) as error:
        _read(data, Tokenizer.from_folder(demo.path()))
    assert str(error.value).startswith(f"[data] '{data}' line 1: messages need a chat")
    assert str(error.value).count("[") == 1


@pytest.mark.exhaustive
def test_a_split_of_a_dataset(tmp_path: Path) -> None:
    for number in (0, 1):
        name = f"data/train_sft-0000{number}-of-00002-0abc.parquet"
        _write_parquet(tmp_path / "set" / name, LINES[2 * number : 2 * number + 2])
    _write_parquet(tmp_path / "set/data/train_gen-00000-of-00001.parquet", LINES)
    for folder in ("main", "other"):
        _write(tmp_path / f"set/{folder}/test.jsonl", LINES[:3])
    for name in ("me/table", "me/parts"):
        (tmp_path / name).mkdir(parents=True)
    rows = _csv("prompt,completion", "Who?,The cat.").encode()
    for name in ("me/table/train.csv", "me/table/dev.csv", "me/parts/train-00000-of-00001.csv.xz"):
        (tmp_path / name).write_bytes(lzma.compress(rows) if ".xz" in name else rows)
    folders = {name: tmp_path / name for name in ("me/table", "me/parts")}
    flags = ["--train", "--dry-run", "--output", str(tmp_path / "run"), "--batch-size", "1"]
    with (
        HubServer({"me/set": tmp_path / "set", **folders}) as server,
        HubClient(server.url, tmp_path / "home") as client,
    ):
        for name, splits in (("me/table", ["train", "valid"]), ("me/parts:train", ["train"])):
            status, out, error = client.call("command", "lora", "--data", name, *flags)
            assert status == 0, error
            reported = [line.partition(":") for line in out.splitlines() if ": 1 sample, " in line]
            assert [split for split, _, _ in reported] == splits
        server.requests.clear()
        status, out, error = client.call("command", "lora", "--data", "me/set:train_sft", *flags)
        assert status == 0, error
        assert "train: 4 samples, " in out
        assert sorted(server.downloaded()) == [
            f"train_sft-0000{number}-of-00002-0abc.parquet" for number in (0, 1)
        ]
        status, out, error = client.call("command", "lora", "--data", "me/set:main/test", *flags)
        assert status == 0 and "train: 3 samples, " in out, error
        for name, words in (
            ("me/set:test", "lies in main, other. Name the folder: 'me/set:main/test'"),
            (
                "me/set:train",
                "must name a split with files of .jsonl, .json, .csv, .tsv, .parquet, ",
            ),
        ):
            status, _, error = client.call("command", "lora", "--data", name, *flags)
            assert status == 2 and words in error, error
        status, out, error = client.call(
            *("command", "lora", "--data", "me/set:main/test", *flags),
            *("--prompt-feature", "question"),
        )
        assert status == 2 and "it must have 'question' and 'completion'" in error


@pytest.mark.parquet
def test_train_reads_a_split_of_a_dataset(tmp_path: Path) -> None:
    words = " ".join(f"word{n}" for n in range(40))
    texts = [{"story": f"{n} {words}", "id": n} for n in range(24)]
    for number in (0, 1):
        _write_parquet(tmp_path / f"set/train-{number}.parquet", texts[12 * number :][:12])
    _write(tmp_path / "set/valid.jsonl", texts[:3])
    values = {
        "output": "run",
        "model": {
            "model_type": "hgrn_bit",
            "vocab_size": 300,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "intermediate_size": 32,
        },
        "stages": [{"until": 1, "weights": {"me/set:train": 1}}],
        "valid": ["me/set:valid"],
        "text_column": "story",
        "steps": 2,
        "batch_size": 2,
        "sequence_length": 16,
        "warmup_steps": 1,
    }
    (tmp_path / "train.yaml").write_text(json.dumps(values))
    with (
        HubServer({"me/set": tmp_path / "set"}) as server,
        HubClient(server.url, tmp_path / "home") as client,
    ):
        flags = ["train", "--config", str(tmp_path / "train.yaml")]
        status, _, error = client.call("command", *flags)
        assert status == 0, error
        tokenizer = Tokenizer.from_folder(tmp_path / "run/tokenizer")
        sizes = {
            open_token_file(file).header.documents for file in tmp_path.glob("run/tokens/*.tokens")
        }
        assert sizes == {24, 3} and tokenizer.vocab_size <= 300
        status, _, error = client.call("command", *flags, "--text-column", "text", "--output", "b")
        assert status == 2 and "--text-column must name" in error


def test_pairs_of_answers_are_told_their_mode(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pair = {"prompt": "A?", "chosen": "B", "rejected": "C"}
    with pytest.raises(TrainingError, match=r"For pairs of answers, give --train-mode dpo\."):
        _read(_write(tmp_path / "pairs.jsonl", [pair]), tokenizer)
