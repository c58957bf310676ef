"""`mmfree generate --tensor-parallel` in two processes."""

from pathlib import Path

import pytest

from mlx_mmfree.cli import main
from mlx_mmfree.hub import save_model
from mlx_mmfree.layers import pack_linears
from tests.hub.checkpoints import GOLDENS, tiny_transformer
from tests.process_group import finish, start_group

CALL = "import sys; from mlx_mmfree.cli import main; sys.exit(main(sys.argv[1:]))"

SEEDS = """
import mlx.core as mx
from mlx_mmfree.cli.process_group import common_seed
group = mx.distributed.init(strict=True)
print(common_seed(group), common_seed(group))
"""


@pytest.fixture(scope="module")
def split_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a transformer that two processes can share."""
    target = tmp_path_factory.mktemp("checkpoint") / "split"
    model = pack_linears(tiny_transformer("bitnet", vocab_size=518))
    save_model(target, model, GOLDENS / "tokenizer_bpe")
    return target


def test_the_first_process_prints_what_one_would(
    split_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["generate", "--model", str(split_folder), "-p", "The dog", "-m", "8", "--verbose", "F"]
    assert main(flags) == 0
    wanted = capsys.readouterr().out
    processes = start_group(tmp_path, 2, "-c", CALL, *flags, "--tensor-parallel")
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
    assert "[generate] 'tensor_parallel' must be used in several processes but got one." in error
    assert "mlx.launch -n 2 --backend ring -- mmfree generate --tensor-parallel" in error
