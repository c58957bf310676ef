"""The work of every model that writes texts, done by each of `FAMILIES`."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.cli import main
from mlx_mmfree.errors import CheckpointError
from mlx_mmfree.generation import Chat, batch_generate, generate
from mlx_mmfree.generation.scheduling import Request, Scheduler
from mlx_mmfree.generation.sessions import Sessions
from mlx_mmfree.hub import Tokenizer, convert, load, load_model, open_checkpoint, save_model
from mlx_mmfree.hub.adapters.adapter import attach
from mlx_mmfree.hub.adapters.adapter_folder import read_adapter
from mlx_mmfree.hub.checkpoint.parameter_reader import ParameterReader
from mlx_mmfree.hub.conversion.to_folder import FloatFormats
from mlx_mmfree.hub.conversion.verify import verify
from mlx_mmfree.hub.publish.upload import plan_upload
from mlx_mmfree.models import Decoder
from tests.generation.scheduling.running import run, tokens_of
from tests.hub.checkpoints import logits
from tests.models.families import FAMILIES
from tests.tolerances import TOLERANCE, relative_error

PROMPT = "The dog is"
PROMPTS = [PROMPT, "Once upon a time there", "x"]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("family") / "model"
    FAMILIES[request.param](folder)
    return folder


@pytest.fixture(scope="module")
def loaded(folder: Path) -> tuple[Decoder, Tokenizer]:
    return load(folder, dtype=mx.float32)


def likeliest(model: Decoder, ids: list[int], count: int) -> list[int]:
    """The likeliest tokens, of which each is found by reading everything at once."""
    ids = list(ids)
    for _ in range(count):
        ids.append(mx.argmax(model(mx.array([ids]))[0][0, -1]).item())
    return ids[-count:]


@pytest.mark.sample(2)
def test_generate_and_save(folder: Path, loaded: Any, tmp_path: Path) -> None:
    model, tokenizer = loaded
    want = tokenizer.decode(likeliest(model, tokenizer.encode(PROMPT), 6))
    assert generate(model, tokenizer, PROMPT, max_tokens=6) == want
    save_model(tmp_path / "saved", load_model(folder))
    assert mx.array_equal(logits(load_model(tmp_path / "saved")), logits(load_model(folder)))


def test_batch_and_draft(loaded: Any) -> None:
    model, tokenizer = loaded
    alone = [generate(model, tokenizer, prompt, max_tokens=6) for prompt in PROMPTS]
    assert batch_generate(model, tokenizer, PROMPTS, max_tokens=6).texts == alone
    drafted = generate(model, tokenizer, PROMPT, max_tokens=6, draft_model=model)
    assert drafted == alone[0]


def test_sessions_go_on_from_what_was_read(loaded: Any, tmp_path: Path) -> None:
    model, tokenizer = loaded
    sessions = Sessions(model, memory_bytes=10**8, folder=tmp_path)
    ids = tokenizer.encode(PROMPT)
    for _ in range(2):
        scheduler = Scheduler(model, tokenizer, prefill_step_size=8, sessions=sessions)
        (events,) = run(scheduler, [Request(ids, max_tokens=6)])
        ids = [*ids, *(token for token in tokens_of(events) if token is not None)]
    assert ids[-6:] == likeliest(model, ids[:-6], 6)
    assert sessions.stats().hits == 1


@pytest.mark.sample(2)
def test_chat(folder: Path, loaded: Any, monkeypatch: Any, capsys: Any) -> None:
    model, tokenizer = loaded
    chat = Chat(model, tokenizer, max_tokens=4)
    answers = ["".join(each.text for each in chat.answer(text)) for text in ("Hello", "again")]
    prompt = tokenizer.apply_chat_template(chat.messages[:1])
    assert answers[0] == generate(model, tokenizer, prompt, max_tokens=4)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello\nagain\n")))
    flags = ["--dtype", "float32", "--temp", "0", "--max-tokens", "4"]
    assert main(["chat", "--model", str(folder), *flags]) == 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in answers)


def test_perplexity(folder: Path, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "text.txt"
    file.write_text(" ".join(PROMPTS) * 3)
    flags = ["--data", str(file), "--json"]
    assert main(["perplexity", "--model", str(folder), *flags]) == 0
    assert 1 < json.loads(capsys.readouterr().out)["perplexity"] < 1e6


@pytest.mark.sample(2)
def test_convert_verify_and_upload(folder: Path, tmp_path: Path) -> None:
    source = open_checkpoint(folder)
    report = convert(source, tmp_path / "m")
    assert report.logits_difference is not None and report.logits_difference <= 1e-4
    plan = plan_upload(tmp_path / "m", "me/model")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(plan.files)
    weights = tmp_path / "m" / "model.safetensors"
    tensors = mx.load(str(weights))
    name = next(n for n in sorted(tensors) if n.endswith("down_proj.weight"))
    changed = tensors[name]
    changed[0, 0] = changed[0, 0] ^ 1 if changed.dtype == mx.uint32 else changed[0, 0] + 1
    mx.eval(tensors)
    weights.unlink()
    mx.save_safetensors(str(weights), tensors | {name: changed})
    with pytest.raises(CheckpointError, match=r"\[(verify|load)\] tensor"):
        verify(
            ParameterReader(source),
            ParameterReader(open_checkpoint(weights.parent)),
            FloatFormats(),
        )


@pytest.mark.exhaustive
def test_an_adapter_is_trained_and_used(folder: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "data").mkdir()
    lines = [{"prompt": f"Number {n}?", "completion": "The cat."} for n in range(4)]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    flags_of_model = ["--model", str(folder), "--adapter-path", str(tmp_path / "adapter")]
    flags = ["--train", "--steps", "2", "--batch-size", "2", "--learning-rate", "1e-2"]
    assert main(["lora", *flags_of_model, "--data", str(tmp_path / "data"), *flags]) == 0
    model = load_model(folder)
    before = logits(model)
    learned = logits(attach(model, read_adapter(tmp_path / "adapter")))
    assert relative_error(learned, before) > 1e-3
    assert main(["fuse", *flags_of_model, "--output", str(tmp_path / "fused")]) == 0
    fused, _ = load(tmp_path / "fused")
    assert relative_error(logits(fused), learned) <= TOLERANCE[mx.float16]
    capsys.readouterr()


@pytest.mark.eval
def test_the_harness_scores_continuations(loaded: Any) -> None:
    from lm_eval.api.instance import Instance

    from mlx_mmfree.evaluation.harness import harness_model

    model, tokenizer = loaded
    adapter = harness_model(model, tokenizer)
    asked = Instance("loglikelihood", {}, ("The dog", " is old"), 0)
    ((score, is_greedy),) = adapter.loglikelihood([asked], disable_tqdm=True)
    whole, context = tokenizer.encode("The dog is old"), tokenizer.encode("The dog")
    found = mx.log(mx.softmax(model(mx.array([whole]))[0][0], axis=-1))
    want = sum(found[n - 1, whole[n]].item() for n in range(len(context), len(whole)))
    assert score == pytest.approx(want, abs=1e-3) and not is_greedy
