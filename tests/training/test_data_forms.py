"""Data as people have it: a file alone, parquet, splits of datasets of the Hub, turns of ShareGPT."""

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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


@pytest.mark.parquet
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


def test_a_split_of_a_dataset(tmp_path: Path) -> None:
    for number in (0, 1):
        name = f"data/train_sft-0000{number}-of-00002-0abc.parquet"
        _write_parquet(tmp_path / "set" / name, LINES[2 * number : 2 * number + 2])
    _write_parquet(tmp_path / "set/data/train_gen-00000-of-00001.parquet", LINES)
    for place in ("main", "other"):
        _write(tmp_path / f"set/{place}/test.jsonl", LINES[:3])
    flags = ["--train", "--dry-run", "--output", str(tmp_path / "run"), "--batch-size", "1"]
    with (
        HubServer({"me/set": tmp_path / "set"}) as server,
        HubClient(server.url, tmp_path / "home") as client,
    ):
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
            ("me/set:train", "must name a split with JSON lines or parquet but the dataset holds"),
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
