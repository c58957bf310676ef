"""Commands in two processes: `generate --tensor-parallel`, `lora`."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mmfree.cli import main
from mlx_mmfree.hub import save_model
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.training.results import read_log
from tests.hub.checkpoints import GOLDENS, tiny_transformer
from tests.process_group import MMFREE, finish, start_group
from tests.training.conftest import config, run_values  # noqa: F401

SEEDS = """
from mlx_mmfree.cli.parts.process_group import common_seed
from tests.process_group import connect
group = connect()
print(common_seed(group), common_seed(group))
"""


@pytest.fixture(scope="module")
def split_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a transformer that two processes can share."""
    target = tmp_path_factory.mktemp("checkpoint") / "split"
    model = pack_linears(tiny_transformer("bitnet", vocab_size=518))
    save_model(target, model, GOLDENS / "tokenizer_bpe")
    return target


@pytest.mark.exhaustive
def test_the_first_process_prints_what_one_would(
    split_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["generate", "--model", str(split_folder), "-p", "The dog", "-m", "8", "--verbose", "F"]
    assert main(flags) == 0
    wanted = capsys.readouterr().out
    processes = start_group(tmp_path, 2, *MMFREE, *flags, "--tensor-parallel")
    assert finish(processes) == [(wanted, ""), ("", "")]
    assert [process.returncode for process in processes] == [0, 0]


def test_the_seed_is_the_same_in_all_processes(tmp_path: Path) -> None:
    [(first, _), (second, _)] = finish(start_group(tmp_path, 2, "-c", SEEDS))
    assert first == second
    one, other = first.split()
    assert one != other


def test_one_process_is_refused(split_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", str(split_folder), "--tensor-parallel"]) == 2
    error = capsys.readouterr().err
    assert "[generate] --tensor-parallel must be used in several processes but got one." in error
    assert "mlx.launch -n 2 --backend ring -- mmfree generate --tensor-parallel" in error


@pytest.mark.parametrize(
    ("backend", "remedy"), [("mpi", "Open MPI"), ("nccl", "CUDA"), ("jaccl", "macOS")]
)
@pytest.mark.parametrize("name", ["train", "lora", "generate"])
def test_a_backend_that_mlx_lacks_is_refused(
    name: str,
    backend: str,
    remedy: str,
    config: Path,  # noqa: F811
    split_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(mx.distributed, "is_available", lambda backend: backend in ("any", "ring"))
    flags = {
        "train": ["--config", str(config)],
        "lora": ["--train", "--data", str(config.parent), "--model", str(split_folder)],
        "generate": ["--tensor-parallel", "--model", str(split_folder)],
    }
    adapter = ["--adapter-path", str(config.parent / "adapter")] if name == "lora" else []
    assert main([name, *flags[name], *adapter, "--backend", backend]) == 2
    error = capsys.readouterr().err
    wanted = f"[{name}] --backend must be one that MLX has here (any, ring) but got '{backend}'."
    assert wanted in error and remedy in error


def test_a_backend_that_connects_nobody_is_refused(
    config: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "--config", str(config), "--backend", "ring"]) == 2
    error = capsys.readouterr().err
    assert "[train] --backend must connect the processes but 'ring' failed: [ring] You" in error
    assert "Start them with 'mlx.launch -n 2 --backend ring -- mmfree train ...'." in error


@pytest.mark.exhaustive
def test_lora_is_written_and_told_by_the_first_process(split_folder: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"The number {n} is {n}."}) for n in range(4)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    flags = ["lora", "--model", str(split_folder), "--train", "--data", str(tmp_path)]
    flags += ["--batch-size", "4", "--iters", "3", "--adapter-path", str(tmp_path / "adapter")]
    processes = start_group(tmp_path, 2, *MMFREE, *flags)
    [(first, _), second] = finish(processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert second == ("", "")
    assert first.count("train: 4 samples, ") == 1
    assert f"Wrote the adapter to {tmp_path / 'adapter'}." in first
    assert (tmp_path / "adapter" / "adapters.safetensors").exists()
    records = read_log(tmp_path / "adapter" / "log.jsonl")
    assert records[0]["processes"] == 2
    assert records[-1]["step"] == 3


@pytest.mark.exhaustive
def test_rows_must_be_shared_out(split_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": "The number 1 is 1."}))
    flags = ["lora", "--model", str(split_folder), "--train", "--data", str(tmp_path)]
    flags += ["--batch-size", "3", "--adapter-path", str(tmp_path / "adapter")]
    processes = start_group(tmp_path, 2, *MMFREE, *flags)
    for _, errors in finish(processes):
        assert errors == (
            "error: --batch-size must be a multiple of the number of processes, 2, but "
            "got 3. Change one of the two.\n"
        )
    assert [process.returncode for process in processes] == [2, 2]
