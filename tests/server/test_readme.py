"""The commands of the README files work against a server that is running."""

import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mmfree.hub import save_model
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.models import hgrn_bit
from tests.readme.documents import MAIN, ROOT, sections
from tests.server.conftest import GOLDENS
from tests.server.process import ServerProcess

pytestmark = pytest.mark.serve

SHOWN = "http://127.0.0.1:8080"
PAGE = ROOT / "mlx_mmfree" / "server" / "README.md"


def curl_lines(file: Path) -> list[str]:
    return [line for part in sections(file) for line in part.commands() if line.startswith("curl ")]


@pytest.fixture(scope="module")
def base() -> Iterator[ServerProcess]:
    with ServerProcess() as server:
        yield server


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    mx.random.seed(5)
    config = hgrn_bit.Config(
        vocab_size=518, hidden_size=32, num_hidden_layers=2, intermediate_size=48
    )
    save_model(folder, pack_linears(hgrn_bit.build(config)), GOLDENS / "tokenizer_bpe")
    with ServerProcess("--model", folder, "--max-tokens", "8") as server:
        yield server


@pytest.mark.parametrize("file", [MAIN, PAGE], ids=["main", "server"])
def test_curl(file: Path, base: ServerProcess, chat: ServerProcess) -> None:
    lines = curl_lines(file)
    assert lines
    for line in lines:
        server = chat if "/chat/" in line else base
        assert SHOWN in line
        command = shlex.split(line.replace(SHOWN, server.url))
        command[1:1] = ["--silent", "--show-error", "--fail", "--noproxy", "*"]
        finished = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert finished.returncode == 0, finished.stderr
        assert '"finish_reason":"' in finished.stdout
