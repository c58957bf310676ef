"""The cost of Python and of Metal's compiler, as the benchmark finds it for a machine with a GPU."""

import json
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import host
import mlx.core as mx
import pytest
from host import LONG_PROMPT, KernelTexts, kernel_texts, main
from random_models import random_model

from mlx_mmfree.models import Decoder, find
from mlx_mmfree.ops.backend import choice, compilation, dispatch, launch, self_check
from tests.emulator.emulator import Emulator
from tests.graph import stand_in

pytestmark = pytest.mark.metal


def tiny(model_type: str) -> dict[str, Any]:
    return {"model_type": model_type, **find(model_type).tiny}


@pytest.fixture(autouse=True)
def untimed() -> Iterator[None]:
    """Nothing is chosen by timing emulated kernels."""
    with choice.use(choice.DEFAULT):
        yield


# to decode, to read a long prompt, of a chat with such prompts, and with prompts of every length
TEXTS = {"hgrn_bit": (7, 11, 17, 33), "bitnet": (4, 5, 9, 25)}


@pytest.fixture(params=TEXTS)
def model(request: pytest.FixtureRequest) -> Decoder:
    return random_model(tiny(request.param))


@pytest.fixture
def counted(model: Decoder) -> KernelTexts:
    """Counted where nothing is emulated."""
    return kernel_texts(model)


@pytest.mark.exhaustive
def test_texts_are_those_of_all_launches(
    model: Decoder, counted: KernelTexts, emulated: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No check at the first use of a kernel adds a text: here, none is made."""
    monkeypatch.setattr(self_check, "_difference", lambda *arguments: self_check._Finding(None))

    def texts_of(length: int, state: Any) -> tuple[set[str], Any]:
        emulated.records.clear()
        hidden, state = model.hidden(mx.ones((1, length), mx.int32), state)
        mx.eval(model.logits(hidden[:, -1:]), state)
        return {record.kernel for record in emulated.records}, state

    prompt, state = texts_of(LONG_PROMPT, None)
    decode, _ = texts_of(1, state)
    assert (counted.decode, counted.prompt) == (len(decode), len(prompt))
    assert counted.chat == len(decode | prompt)
    short, _ = texts_of(3, None)
    assert counted.chat < len(decode | prompt | short) < counted.every_length


@pytest.mark.parametrize("model_type", TEXTS)
def test_numbers_of_texts(model_type: str) -> None:
    assert astuple(kernel_texts(random_model(tiny(model_type)))) == TEXTS[model_type]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("model_type", TEXTS)
def test_graphs_of_a_gpu(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are stand-ins here, which are launched while the graph is built or traced."""
    launched = []

    def record(kernel: Any, **call: Any) -> list[mx.array]:
        launched.append(kernel)
        return stand_in(call["output_shapes"], call["output_dtypes"], *call["inputs"])

    monkeypatch.setattr(launch, "launch", record)
    monkeypatch.setattr(dispatch, "metal_unavailable", lambda: None)
    monkeypatch.setattr(compilation, "_CPU", mx.Device(mx.gpu))
    monkeypatch.setattr(self_check, "_difference", lambda *arguments: self_check._Finding(None))
    monkeypatch.setattr(host, "kernel_texts", lambda model: None)
    cost = host.graph_cost("tiny", tiny(model_type), rounds=1)
    assert cost.seconds > 0 and (cost.compiled_seconds or 0) > 0
    assert len(launched) >= cost.layers * 4 * 5


@pytest.mark.exhaustive
def test_what_is_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(tiny("hgrn_bit")))
    assert main(["--quick", "--json", "--config", str(config)]) == 0
    shown = json.loads(capsys.readouterr().out)
    [graph] = shown["graphs"]
    assert graph["layers"] == tiny("hgrn_bit")["num_hidden_layers"] and graph["seconds"] > 0
    assert graph["compiled_seconds"] is None or graph["compiled_seconds"] > 0
    texts = graph["kernel_texts"]
    assert texts["decode"] <= texts["chat"] <= texts["every_length"]
    assert shown["starts"]["mmfree --help"] > 0
    assert main(["--quick", "--config", str(config)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert " us a layer" in lines[0] and " for a chat (" in lines[1]
    assert lines[-1].endswith("ms  import mlx.nn")


def test_a_configuration_that_is_nowhere_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--config", "no-such-shape"]) == 2
    assert "--config must be one of bitnet-2b-4t, bitnet-b1.58-3b, " in capsys.readouterr().err
