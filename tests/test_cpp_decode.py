"""The program in C++ prints the tokens that Python prints."""

import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mmfree import demo, load
from mlx_mmfree.generation import generate_tokens
from mlx_mmfree.generation.export import export_step
from mlx_mmfree.models import Decoder
from tests.hub.checkpoints import tiny_transformer

SOURCES = Path(__file__).parents[1] / "examples" / "cpp_decode"
MLX = Path(mx.__file__).parent

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


def run(*command: str | Path, status: int = 0) -> str:
    finished = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=300
    )
    assert finished.returncode == status, finished.stdout + finished.stderr
    return finished.stderr if status else finished.stdout


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, built as its README says, or by the compiler alone where there is no CMake."""
    folder = tmp_path_factory.mktemp("build")
    if shutil.which("cmake"):
        python = f"-DPython_EXECUTABLE={sys.executable}"
        run("cmake", "-S", SOURCES, "-B", folder, python, "-DCMAKE_BUILD_TYPE=Debug")
        run("cmake", "--build", folder)
        return folder / "decode"
    library = MLX / "lib"
    flags = [f"-I{MLX / 'include'}", f"-L{library}", "-lmlx", f"-Wl,-rpath,{library}"]
    run("c++", "-std=c++20", SOURCES / "main.cpp", *flags, "-o", folder / "decode")
    return folder / "decode"


def decoded(model: Decoder, prompt: list[int], count: int) -> str:
    """The output of Python, with the model's fastest kernels."""
    return " ".join(map(str, generate_tokens(model, prompt, max_tokens=count)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("beside", [False, True], ids=["inside", "beside"])
def test_the_packaged_model_writes_the_same(program: Path, beside: bool, tmp_path: Path) -> None:
    model, tokenizer = load(demo.path())
    export_step(tmp_path / "step", model, tokenizer, weights_beside=beside)
    prompt = tokenizer.encode("Lily had a red")
    assert len(prompt) > 2
    printed = run(program, tmp_path / "step", "24", *map(str, prompt))
    assert printed == decoded(model, prompt, 24) + "\n"


@pytest.mark.exhaustive
def test_attention_writes_the_same(program: Path, tmp_path: Path) -> None:
    _, tokenizer = load(demo.path())
    model = tiny_transformer(vocab_size=tokenizer.vocab_size)
    export_step(tmp_path / "step", model, tokenizer, context=30)
    prompt = [5, 1, 700]
    printed = run(program, tmp_path / "step", "12", *map(str, prompt))
    assert printed == decoded(model, prompt, 12) + "\n"


@pytest.mark.exhaustive
def test_mistakes_are_reported_in_a_line(program: Path, tmp_path: Path) -> None:
    model, tokenizer = load(demo.path())
    export_step(tmp_path / "step", model, tokenizer)
    for arguments, status, message in (
        (["2"], 2, "usage: decode FOLDER COUNT TOKEN..."),
        (["2", "1", "2048"], 1, "token 2048 is not in the vocabulary"),
        (["2", "-1"], 1, "a whole number was expected but got '-1'"),
        (["2", "4294967296"], 1, "a whole number was expected"),
    ):
        message_shown = run(program, tmp_path / "step", *arguments, status=status)
        assert message in message_shown and message_shown.count("\n") == 1
    assert "Failed to open" in run(program, tmp_path / "none", "1", "1", status=1)
