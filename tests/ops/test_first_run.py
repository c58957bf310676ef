"""First uses of a Mac: a text of each packed format, a fine-tuning and an answer of the server.

On an Apple GPU the kernels run there; elsewhere they run in the emulator, and the models are tiny.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mmfree import load, load_model, save_model
from mlx_mmfree.cli import main
from mlx_mmfree.generation import generate_tokens
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.models import Decoder, find
from mlx_mmfree.ops.backend.dispatch import use_backend
from tests.tolerances import TOLERANCE, relative_error

# the emulator compiles each kernel, which takes minutes
pytestmark = [pytest.mark.metal, pytest.mark.slow, pytest.mark.usefixtures("metal")]

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
FORMATS = [
    "bitcpm_llama_bin",
    "bitnet_packed",
    "gguf_maple_q2_0",
    "gguf_qwen35_pq2_0_rotated",
    "gguf_qwen35_ptq1_0_rotated",
    "gguf_qwen3_q1_0",
    "gguf_qwen3_q2_0",
    "hgrn_default",
    "mlx_qwen35_2bit_g128",
    "mlx_qwen3_1bit_g128",
    "onebit_llama_fp16",
]
ROUNDED = 0.05
"""The most by which texts differ that round otherwise; a wrong kernel differs by about 1."""


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """The emulator computes each launch at once, which MLX allows outside compiled functions alone."""
    if mx.metal.is_available():
        yield
        return
    mx.disable_compile()
    yield
    mx.enable_compile()


def tiny() -> Decoder:
    architecture = find("hgrn_bit")
    config = architecture.config.from_hub({**architecture.tiny, "vocab_size": 1024})
    return pack_linears(architecture.build(config))


def written(folder: Path) -> Path:
    """A tiny packed MatMul-free model with a tokenizer."""
    save_model(folder, tiny(), GOLDENS / "tokenizer_bpe")
    return folder


@pytest.mark.parametrize("name", FORMATS)
def test_a_text_of_each_format(name: str) -> None:
    folder = GOLDENS / name
    model = load_model(next(iter(folder.glob("*.gguf")), folder))
    tokens = mx.array([[1, 7, 3, 5, 0]])
    got, _ = model(tokens)
    mx.eval(got)
    with use_backend("reference"):
        want, _ = model(tokens)
    # sums in another order round some 8-bit activations otherwise, each by 1/127 of the largest one
    assert relative_error(got, want) <= max(TOLERANCE[got.dtype], ROUNDED)
    assert len([*generate_tokens(model, [1, 7, 3], max_tokens=3)]) == 3


def test_a_fine_tuning_of_20_steps(tmp_path: Path) -> None:
    folder, data = written(tmp_path / "model"), tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_text(json.dumps({"text": "Once upon a time there was a frog."}))
    flags = ["--model", str(folder), "--data", str(data), "--output", str(tmp_path / "adapters")]
    assert main(["lora", "--train", *flags, "--iters", "20", "--batch-size", "1"]) == 0
    lines = (tmp_path / "adapters" / "log.jsonl").read_text().splitlines()
    losses = [record["loss"] for line in lines if "loss" in (record := json.loads(line))]
    assert losses[-1] < losses[0]


@pytest.mark.serve
def test_an_answer_of_the_server(tmp_path: Path) -> None:
    from starlette.testclient import TestClient

    from mlx_mmfree.generation.sessions import Sessions
    from mlx_mmfree.server.app import make_app
    from mlx_mmfree.server.run import make_service
    from mlx_mmfree.server.settings import ServedModel, Settings

    model, tokenizer = load(written(tmp_path / "model"))
    sessions = Sessions(model, memory_bytes=10**8)
    served = ServedModel("tiny", model, tokenizer, sessions.for_model(model))
    service = make_service([served], Settings(), sessions)
    with TestClient(make_app(service), base_url="http://127.0.0.1:8080") as client:
        body = {"prompt": "Once upon", "max_tokens": 3, "temperature": 0}
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 3
