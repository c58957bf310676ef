"""`mmfree tokenize`: from files, and from a dataset of the Hub whose files come one by one."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_mmfree import demo
from mlx_mmfree.cli.tokenize import build_parser, main
from mlx_mmfree.training.corpus.tokenize import open_token_file
from tests.hub.checkpoints import GOLDENS
from tests.hub.hub_client import HubClient
from tests.hub.hub_server import HubServer

TOKENIZER = str(GOLDENS / "tokenizer_bpe")


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "a.txt").write_text("One day.\n<|endoftext|>\nThe end.\n")
    return str(tmp_path / "a.txt")


def test_it_writes_what_it_says(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--data", text, "--output", str(tmp_path / "out"), "--processes", "1"]) == 0
    file = open_token_file(tmp_path / "out/train.tokens")
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "Read 1 file.",
        f"Wrote '{tmp_path}/out/train.tokens': {len(file.tokens)} tokens of 2 documents, 16 bytes of "
        "text, in 16 bits each.",
    ]
    # without a model, the tokenizer is the bundled one's
    name = "tokenizer.json"
    assert (tmp_path / "out/tokenizer" / name).read_bytes() == (demo.path() / name).read_bytes()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--valid-fraction", "1"], "--valid-fraction must be at least 0 and below 1 but got 1.0"),
        (["--valid-fraction", "1e-9"], "--valid-fraction must hold out one of the documents"),
        (["--vocab-size", "9", "--model", "x"], "--vocab-size must come without --model"),
        (["--output", "{text}"], "--output must be a new or empty folder"),
        (["--data", "absent"], "--data must be a file, a folder or a Hub dataset"),
        (
            ["--data", "{jsonl}"],
            "line 1: --text-column must name a key with a text but 'text' does",
        ),
        (
            ["--include", "*.md", "--data", "{folder}"],
            "a file that matches *.md, but holds a.jsonl",
        ),
        (["--processes", "0"], "--processes: must be a whole number from 1"),
    ],
)
def test_mistakes_are_one_line(
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    message: str,
) -> None:
    (tmp_path / "a.jsonl").write_text('{"content": "a"}')
    paths = {"text": text, "jsonl": tmp_path / "a.jsonl", "folder": tmp_path}
    given = [flag.format(**paths) for flag in flags]
    assert main(["--data", text, "--output", str(tmp_path / "out"), *given]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_every_flag_is_described() -> None:
    assert all(action.help for action in build_parser()._actions)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    data = tmp_path / "dataset"
    (data / "data").mkdir(parents=True)
    for n, name in enumerate(("train-1", "train-0", "test-0")):
        (data / f"data/{name}.jsonl").write_text(json.dumps({"text": f"number {n}"}))
    (data / "train.txt").write_text("the same")
    (data / "README.md").write_text("no")
    with HubServer(dict.fromkeys(("me/data", "me/gated", "me/broken"), data)) as server:
        yield server


def test_a_dataset_of_the_hub(hub: HubServer, tmp_path: Path) -> None:
    flags = ["tokenize", "--data", "me/data", "--output", str(tmp_path / "out")]
    flags += ["--model", TOKENIZER, "--processes", "1"]
    with HubClient(hub.url, tmp_path / "home") as client:
        status, _, error = client.call("command", *flags)
        assert status == 2 and "of one kind but holds .jsonl and .txt" in error
        assert hub.downloaded() == []
        status, out, error = client.call("command", *flags, "--include", "data/train-*")
        assert status == 0, error
        assert "Read 2 files." in out
        assert hub.downloaded() == ["train-0.jsonl", "train-1.jsonl"]
        # what is in the cache is not fetched again
        flags[4] = str(tmp_path / "again")
        assert client.call("command", *flags, "--include", "data/train-*")[0] == 0
        assert hub.downloaded() == ["train-0.jsonl", "train-1.jsonl"]
    one, two = (tmp_path / name / "train.tokens" for name in ("out", "again"))
    assert one.read_bytes() == two.read_bytes()
    assert open_token_file(one).header.documents == 2


def test_datasets_that_cannot_be_listed_say_why(hub: HubServer, tmp_path: Path) -> None:
    flags = ["tokenize", "--output", str(tmp_path / "out"), "--data"]
    with HubClient(hub.url, tmp_path / "home") as client:
        for name, message in (
            ("me/absent", "'me/absent' is neither a local folder nor a repository of the Hub"),
            ("me/gated", "Ask for access on https://huggingface.co/datasets/me/gated"),
            ("me/broken", "the Hub did not hand out 'me/broken'"),
        ):
            status, _, error = client.call("command", *flags, name)
            assert status == 2 and error.count("\n") == 1 and message in error, error
        hub.close()
        status, _, error = client.call("command", *flags, "me/data")
        assert status == 2 and "and the Hub cannot be reached. Check the spelling." in error, error
