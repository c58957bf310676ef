"""Models of 1 and 2 bits that write text go every way that a model goes."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import yaml

from mlx_mmfree.cli import main
from mlx_mmfree.errors import CheckpointError
from mlx_mmfree.generation import Chat, batch_generate, generate
from mlx_mmfree.generation.decode import generate_tokens
from mlx_mmfree.generation.sessions import Sessions
from mlx_mmfree.hub import Tokenizer, convert, load, load_model, open_checkpoint, save_model
from mlx_mmfree.hub.adapters.adapter import attach
from mlx_mmfree.hub.adapters.adapter_folder import read_adapter
from mlx_mmfree.hub.checkpoint.parameter_reader import ParameterReader
from mlx_mmfree.hub.conversion.to_folder import FloatFormats
from mlx_mmfree.hub.conversion.verify import verify
from mlx_mmfree.hub.publish.runtimes import MLX_LM, opening
from mlx_mmfree.hub.publish.upload import plan_upload
from mlx_mmfree.layers.lora import remove_adapters
from mlx_mmfree.layers.matrix import matrices
from mlx_mmfree.models import Decoder
from tests.hub.checkpoints import GOLDENS, TOKENS, logits, tiny_transformer
from tests.hub.test_bitcpm import fake_quantised
from tests.hub.test_maple import ternary
from tests.tolerances import TOLERANCE, relative_error

PROMPTS = ["Hello there", "One two three four five six seven"]
TEMPLATE = (
    "{% for message in messages %}<|start_header_id|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)


def bonsai() -> Decoder:
    """Embedding, head and linears of 1 bit, with a scale for each 128 inputs."""
    sizes = {"vocab_size": 520, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    model = tiny_transformer("qwen3", **sizes, linears=None)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            groups = mx.unflatten(module.weight, 1, (-1, 128))
            sizes_of = mx.mean(mx.abs(groups), axis=2, keepdims=True).astype(mx.float16)
            module.weight = mx.flatten(mx.where(groups < 0, -sizes_of, sizes_of), 1)
    nn.quantize(model, 128, 1)
    return model


FAMILIES: dict[str, tuple[Callable[[], Decoder], str, str]] = {
    "bonsai": (bonsai, "1-bit", "q1_0"),
    "minicpm": (lambda: fake_quantised("minicpm"), "ternary", "q2_0"),
    "maple": (ternary, "ternary", "q2_0"),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ways") / family
    save_model(path, FAMILIES[family][0](), GOLDENS / "tokenizer_bpe")
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    return path


@pytest.fixture(scope="module")
def pair(folder: Path) -> tuple[Decoder, Any]:
    return load(folder, dtype=mx.float32)


@pytest.mark.sample(2)
def test_batches_drafts_and_sessions_give_the_same_text(pair: tuple[Decoder, Any]) -> None:
    model, tokenizer = pair
    alone = [generate(model, tokenizer, prompt, max_tokens=8) for prompt in PROMPTS]
    assert len(set(alone)) == 2
    assert batch_generate(model, tokenizer, PROMPTS, max_tokens=8).texts == alone
    drafted = generate(model, tokenizer, PROMPTS[0], max_tokens=8, draft_model=model)
    assert drafted == alone[0]
    ids = tokenizer.encode(PROMPTS[1])
    sessions = Sessions(model, memory_bytes=2**24)
    _, state = model(mx.array([ids[:-2]]))
    sessions.keep(ids[:-2], state)
    known = sessions.find(ids)
    assert known.count == len(ids) - 2
    rest = generate_tokens(model, ids[known.count :], state=known.state, max_tokens=8)
    want = generate_tokens(model, ids, max_tokens=8)
    assert list(rest) == list(want)


@pytest.mark.parametrize("thinks", [True, False])
def test_chat(pair: tuple[Decoder, Any], thinks: bool) -> None:
    model, tokenizer = pair
    variables = {} if thinks else {"enable_thinking": False}
    chat = Chat(model, tokenizer, max_tokens=5, variables=variables)
    asked = [{"role": "user", "content": "Who are you?"}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, **variables)
    assert ("<think>" in tokenizer.decode(ids)) != thinks
    got = "".join(response.text for response in chat.answer("Who are you?"))
    assert got == generate(model, tokenizer, ids, max_tokens=5, is_answer=True)
    assert list(chat.answer("And I?")) and chat.turns == 2


@pytest.mark.serve
def test_serve(pair: tuple[Decoder, Any]) -> None:
    from starlette.testclient import TestClient

    from mlx_mmfree.server.app import make_app
    from mlx_mmfree.server.run import make_service
    from mlx_mmfree.server.settings import ServedModel, Settings

    model, tokenizer = pair
    sessions = Sessions(model, memory_bytes=2**24)
    served = ServedModel("m", model, tokenizer, sessions, model)
    app = make_app(make_service([served], Settings(), sessions))
    asked = {"messages": [{"role": "user", "content": "Who?"}], "temperature": 0, "max_tokens": 6}
    with TestClient(app, base_url="http://127.0.0.1:8080") as client:
        body = {"prompt": PROMPTS, "temperature": 0, "max_tokens": 8}
        choices = client.post("/v1/completions", json=body).json()["choices"]
        want = [generate(model, tokenizer, prompt, max_tokens=8) for prompt in PROMPTS]
        assert [choice["text"] for choice in choices] == want
        counts = []
        for thinks in (True, False):
            changes = {"chat_template_kwargs": {"enable_thinking": thinks}}
            answer = client.post("/v1/chat/completions", json=asked | changes)
            assert answer.status_code == 200, answer.text
            counts.append(answer.json()["usage"]["prompt_tokens"])
        assert counts[0] < counts[1]


@pytest.mark.sample(2)
def test_perplexity(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, file = "One day there was a girl. She had a red ball and a dog.", tmp_path / "text.txt"
    file.write_text(text)
    assert main(["perplexity", "--model", str(folder), "--data", str(file), "--json"]) == 0
    got = json.loads(capsys.readouterr().out)["perplexity"]
    model, tokenizer = load(folder)
    ids = mx.array([tokenizer.encode(text)])
    nats = nn.losses.cross_entropy(model(ids[:, :-1])[0], ids[:, 1:]).mean()
    # floats have 16 bits
    assert math.log(got) == pytest.approx(nats.item(), rel=5e-3)


@pytest.mark.eval
def test_lm_eval(pair: tuple[Decoder, Any]) -> None:
    from mlx_mmfree.evaluation import score_continuations
    from mlx_mmfree.evaluation.harness import harness_model

    model, tokenizer = pair
    adapter = harness_model(model, tokenizer, batch_size=2)
    requests = [SimpleNamespace(args=(PROMPTS[0], end)) for end in (" dog", " cat and more")]
    got = [score for score, _ in adapter.loglikelihood(requests)]
    begin = tokenizer.encode(PROMPTS[0])
    parts = [(begin, tokenizer.encode(r.args[1], add_special_tokens=False)) for r in requests]
    want = [score.log_likelihood for score in score_continuations(model, parts)]
    np.testing.assert_allclose(got, want, rtol=1e-4)


def test_upload_has_a_card(family: str, folder: Path) -> None:
    plan = plan_upload(folder, "me/model")
    assert plan.card is not None
    matter = yaml.safe_load(plan.card.split("---")[1])
    other = {"1-bit": "ternary", "ternary": "1-bit"}[FAMILIES[family][1]]
    assert FAMILIES[family][1] in matter["tags"] and other not in matter["tags"]
    assert matter["pipeline_tag"] == "text-generation"


@pytest.mark.sample(2)
def test_verify_finds_a_damaged_tensor(family: str, folder: Path, tmp_path: Path) -> None:
    source, target = open_checkpoint(folder), tmp_path / "m"
    report = convert(source, target)
    assert report.is_lossless and report.logits_difference == 0
    weights = target / "model.safetensors"
    tensors = mx.load(str(weights))
    name = next(n for n in sorted(tensors) if n.endswith("down_proj.weight"))
    assert ("switch_mlp" in name) == (family == "maple")
    words = tensors[name].flatten()
    words[0] = words[0] ^ 1
    mx.eval(tensors)
    weights.unlink()
    mx.save_safetensors(str(weights), tensors | {name: words.reshape(tensors[name].shape)})
    with pytest.raises(CheckpointError, match=r"\[verify\] tensor .*down_proj"):
        verify(ParameterReader(source), ParameterReader(open_checkpoint(target)), FloatFormats())


@pytest.mark.exhaustive
def test_lora(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = "\n".join(json.dumps({"text": f"Number {n}. The cat."}) for n in range(4))
    for name in ("train", "valid"):
        (tmp_path / f"{name}.jsonl").write_text(lines)
    model_flags = ["--model", str(folder), "--adapter-path", str(tmp_path / "a")]
    flags = ["--steps", "4", "--batch-size", "2", "--learning-rate", "1e-3"]
    assert main(["lora", "--train", "--data", str(tmp_path), *model_flags, *flags]) == 0
    model = load_model(folder)
    before, packed = logits(model), weights_in_codes(model)
    ids = mx.array([Tokenizer.from_folder(folder).encode("Number 1. The cat.")])
    nats = loss(model, ids)
    attached = attach(model, read_adapter(tmp_path / "a"))
    want = logits(attached)
    assert relative_error(want, before) > 1e-3
    assert loss(attached, ids) < nats
    assert main(["fuse", *model_flags, "--output", str(tmp_path / "fused")]) == 0
    fused = load_model(tmp_path / "fused")
    assert relative_error(logits(fused), want) <= TOLERANCE[mx.float16]
    in_codes = weights_in_codes(fused)
    assert in_codes.keys() == packed.keys() and len(in_codes) >= 14
    assert all(mx.array_equal(in_codes[path], codes) for path, codes in packed.items())
    capsys.readouterr()
    asked = ["--prompt", "Number", "--max-tokens", "4", "--json", "--temp", "0"]
    texts = []
    for each in (model_flags, ["--model", str(tmp_path / "fused")]):
        assert main(["generate", *each, *asked]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] and texts[0] == texts[1]


def loss(model: Decoder, ids: mx.array) -> float:
    """The mean cross-entropy of the tokens after the first, in nats."""
    taken = nn.losses.cross_entropy(model(ids[:, :-1])[0].astype(mx.float32), ids[:, 1:])
    return taken.mean().item()


def weights_in_codes(model: Decoder) -> dict[str, mx.array]:
    """The packed words of all matrices, without their adapters."""
    found = matrices(remove_adapters(model))
    return {path: each.layer.weight for path, each in found.items() if not each.is_plain}


@pytest.mark.exhaustive
def test_gguf_both_ways(family: str, folder: Path, tmp_path: Path) -> None:
    kind: Any = FAMILIES[family][2]
    report = convert(open_checkpoint(folder), tmp_path / "g", to="gguf", gguf_type=kind)
    assert report.is_lossless
    convert(open_checkpoint(tmp_path / "g"), tmp_path / "back")
    want = logits(load_model(folder, dtype=mx.float32))
    for name in ("g", "back"):
        model, tokenizer = load(tmp_path / name, dtype=mx.float32)
        assert relative_error(logits(model), want) <= TOLERANCE[mx.float32]
        assert tokenizer.encode(PROMPTS[0])


@pytest.mark.sample(2)
@pytest.mark.usefixtures("unfused")
def test_stock_mlx_lm_opens_what_is_written(family: str, folder: Path, tmp_path: Path) -> None:
    from mlx_lm.utils import load_model as load_by_mlx_lm

    report = convert(open_checkpoint(folder), tmp_path / "m")
    found = opening(report.openings, MLX_LM)
    assert found is not None
    if family == "maple":
        assert found.opens is False
        return
    assert found.opens and "--trust-remote-code" not in found.note
    theirs, _ = load_by_mlx_lm(tmp_path / "m")
    theirs.set_dtype(mx.float32)
    want = logits(load_model(tmp_path / "m", dtype=mx.float32))
    assert relative_error(theirs(TOKENS), want) <= TOLERANCE[mx.float32]
