"""Models in lm-evaluation-harness."""

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree import demo
from mlx_mmfree.cli import main
from mlx_mmfree.errors import UsageError
from mlx_mmfree.evaluation import score_continuations
from mlx_mmfree.evaluation.harness import _windows, check_installed, harness_model
from mlx_mmfree.generation import RepetitionPenalty, generate
from mlx_mmfree.hub import Tokenizer, load, save_model
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.models import hgrn_bit
from tests.hub.checkpoints import edit_json, tiny_transformer

DATA = Path(__file__).parents[1] / "data"
PAIRS = DATA / "blimp" / "pairs.jsonl"
SPM = DATA / "goldens" / "tokenizer_spm"

TASKS = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{validation: "{file}"}}
  cache_dir: "{cache}"
validation_split: validation
num_fewshot: 0
"""
BLIMP = """\
output_type: multiple_choice
target_delimiter: ""
doc_to_text: ""
doc_to_target: 0
doc_to_choice: "{{[good, bad]}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
ROLLING = """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{good}}"
metric_list: [{metric: bits_per_byte}]
"""
ANSWERS = """\
output_type: generate_until
doc_to_text: "{{good}}"
doc_to_target: "{{bad}}"
generation_kwargs: {until: ["."], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a chat template and a SentencePiece vocabulary."""
    mx.random.seed(2)
    config = hgrn_bit.Config(
        vocab_size=640, hidden_size=32, num_hidden_layers=1, intermediate_size=48
    )
    target = tmp_path_factory.mktemp("chat") / "model"
    save_model(target, pack_linears(hgrn_bit.build(config)), SPM)
    return target


@pytest.fixture
def few_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the package's thousands of tasks, which take long to list."""
    import lm_eval.tasks

    manager = partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", manager)


def evaluate(folder: Path, task: str, capsys: pytest.CaptureFixture[str], *flags: str) -> Any:
    text = TASKS.format(name="sample", file=PAIRS, cache=folder / "cache")
    (folder / "sample.yaml").write_text(text + task)
    arguments = ["--tasks", "sample", "--include-path", str(folder), *flags]
    assert main(["evaluate", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)["results"]["sample"]


def asked(*args: Any) -> Any:
    return SimpleNamespace(args=args)


def test_missing_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UsageError, match=r"pip install '\.\[eval\]'"):
        check_installed()
    assert main(["evaluate", "--tasks", "anything"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1


@pytest.mark.eval
@pytest.mark.usefixtures("few_tasks")
def test_minimal_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    got = evaluate(tmp_path, BLIMP, capsys, "--batch-size", "16")
    model, tokenizer = load(demo.path())
    pairs = [json.loads(line) for line in PAIRS.read_text(encoding="utf-8").splitlines()]
    texts = [pair[kind] for pair in pairs for kind in ("good", "bad")]
    first = [*tokenizer.eos_token_ids]
    scores = score_continuations(model, [(first, tokenizer.encode(text)) for text in texts])
    # the harness takes the first of two that are as likely in float32, as one pair is
    right = [
        good.log_likelihood >= bad.log_likelihood
        for good, bad in zip(scores[::2], scores[1::2], strict=True)
    ]
    assert got["acc,none"] == pytest.approx(sum(right) / len(right))
    assert got["acc,none"] > 0.5


@pytest.mark.eval
@pytest.mark.usefixtures("few_tasks")
def test_whole_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    got = evaluate(tmp_path, ROLLING, capsys, "--limit", "9", "--output-dir", str(tmp_path / "out"))
    (file,) = (tmp_path / "out").iterdir()
    assert file.name == "evaluation_demo_sample.json"
    assert json.loads(file.read_text())["results"]["sample"] == got
    assert 0.5 < got["bits_per_byte,none"] < 8


@pytest.mark.eval
@pytest.mark.usefixtures("few_tasks")
def test_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    got = evaluate(tmp_path, ANSWERS, capsys, "--limit", "5")
    assert got["exact_match,none"] == 0
    model, tokenizer = load(demo.path())
    adapter = harness_model(model, tokenizer, batch_size=2)
    questions = ["Once upon a time", "The cat", "One day, Lily"]
    options = {"until": [".", "\n"], "max_gen_toks": 12, "do_sample": False}
    texts = adapter.generate_until([asked(q, options) for q in questions], disable_tqdm=True)
    assert texts == [
        generate(model, tokenizer, q, max_tokens=12, stop=[".", "\n"]) for q in questions
    ]
    for options, message in (
        ({"num_beams": 2}, "'generation_kwargs' may have num_beams 1 but got num_beams: 2"),
        ({"penalty_alpha": 0.6}, r"may hold only .*, typical_p, until but got penalty_alpha: 0\.6"),
    ):
        with pytest.raises(UsageError, match=message):
            adapter.generate_until([asked("a", options)], disable_tqdm=True)


@pytest.mark.eval
def test_tokens(chat_folder: Path) -> None:
    model, tokenizer = load(chat_folder)
    adapter = harness_model(model, tokenizer)
    assert (adapter.prefix_token_id, adapter.eot_token_id) == (1, 2)
    assert adapter.tok_encode("Hello") == tokenizer.encode("Hello")
    assert adapter.tok_encode("Hello", add_special_tokens=False) == tokenizer.encode("Hello", False)
    messages = [{"role": "user", "content": "Hello"}]
    text = adapter.apply_chat_template(messages)
    assert adapter.tok_encode(text) == tokenizer.apply_chat_template(messages)
    (answer,) = adapter.generate_until(
        [asked(text, {"until": [], "max_gen_toks": 5})], disable_tqdm=True
    )
    ids = tokenizer.apply_chat_template(messages)
    assert answer == generate(model, tokenizer, ids, max_tokens=5)


@pytest.mark.eval
def test_continuations(chat_folder: Path) -> None:
    model, tokenizer = load(chat_folder)
    adapter = harness_model(model, tokenizer)
    requests = [asked("The dog", " is old"), asked("", "The dog"), asked("The ", "dog")]
    got = adapter.loglikelihood(requests, disable_tqdm=True)
    whole, context = tokenizer.encode("The dog is old"), tokenizer.encode("The dog")
    pairs = [
        (context, whole[len(context) :]),
        ([1], tokenizer.encode("The dog", False)),
        (tokenizer.encode("The"), tokenizer.encode("The dog")[len(tokenizer.encode("The")) :]),
    ]
    want = score_continuations(model, pairs)
    assert got == [pytest.approx(tuple(score), rel=1e-5) for score in want]
    (rolling,) = adapter.loglikelihood_rolling([asked("The dog")], disable_tqdm=True)
    assert rolling == pytest.approx(want[1].log_likelihood, rel=1e-5)


@pytest.mark.eval
@pytest.mark.parametrize("choice", ["", "og"])
def test_a_choice_without_a_token_of_its_own_is_refused(chat_folder: Path, choice: str) -> None:
    model, tokenizer = load(chat_folder)
    context = tokenizer.encode("The dog")
    requests = [(("The d", choice), context, []), (("The d", " is"), context, [3])]
    with pytest.raises(
        UsageError, match=f"a token of its own after its context but '{choice}' has"
    ):
        harness_model(model, tokenizer)._loglikelihood_tokens(requests, disable_tqdm=True)


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama that was made for 16 tokens."""
    target = tmp_path_factory.mktemp("limited") / "model"
    model = tiny_transformer(
        vocab_size=640, max_position_embeddings=16, linears=None, num_hidden_layers=2
    )
    save_model(target, model, SPM)
    edit_json(target / "tokenizer_config.json", add_bos_token=False)
    return target


def test_windows_of_a_long_text() -> None:
    """Windows of lm_eval's `get_rolling_token_windows` with one token of context, made disjoint."""
    assert _windows(9, [0, 1, 2, 3, 4, 5, 6], 3) == [
        ([9], [0, 1, 2]),
        ([2], [3, 4, 5]),
        ([3, 4, 5], [6]),
    ]
    assert _windows(9, [0, 1, 2, 3, 4], 3) == [([9], [0, 1, 2]), ([1, 2], [3, 4])]
    assert _windows(9, [0, 1, 2], 3) == _windows(9, [0, 1, 2], None) == [([9], [0, 1, 2])]
    assert _windows(9, [], 3) == _windows(9, [], None) == []


OPTIONS: list[dict[str, Any]] = [
    {"max_new_tokens": 4},
    {"max_tokens": 4},
    {"max_completion_tokens": 4},
    {"max_gen_toks": 4, "max_new_tokens": 9, "max_tokens": 9},
    {"max_new_tokens": 4, "max_tokens": 9, "until": None},
    {"max_gen_toks": 4, "num_beams": 1, "num_return_sequences": 1},
    {"max_gen_toks": 4, "do_sample": False, "temperature": 1.0, "top_p": 0.5},
    {"max_gen_toks": 4, "temperature": 0.0, "until": ["zzz"]},
    {"max_gen_toks": 4, "repetition_penalty": 4.0, "until": "zzz"},
]


@pytest.mark.eval
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_of_tasks(limited: Path, options: dict[str, Any]) -> None:
    model, tokenizer = load(limited)
    adapter = harness_model(model, tokenizer)
    asking = {"until": [], **options}
    [text] = adapter.generate_until([asked("Once", asking)], disable_tqdm=True)
    ids = tokenizer.encode("Once")
    penalty = options.get("repetition_penalty")
    processors = [RepetitionPenalty(penalty, context_size=99)] if penalty else []
    count = options.get("max_gen_toks", 4)
    assert text == generate(model, tokenizer, ids, max_tokens=count, processors=processors)


@pytest.mark.eval
def test_texts_longer_than_the_model_was_made_for(
    limited: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = load(limited)
    adapter = harness_model(model, tokenizer)
    ids = tokenizer.encode("Once upon a time there was a little girl who had a dog")
    assert len(ids) > 16
    long = asked(tokenizer.decode(ids), {"max_gen_toks": 6})
    [text] = adapter.generate_until([long], disable_tqdm=True)
    assert text == generate(model, tokenizer, ids[-10:], max_tokens=6, is_answer=True)
    assert "the start of 1 texts is left out" in capsys.readouterr().err
    adapter.loglikelihood([asked("Once", " upon"), asked(long.args[0], " and")], disable_tqdm=True)
    assert "the start of 1 texts is left out" in capsys.readouterr().err
    adapter.loglikelihood_rolling([asked(long.args[0])], disable_tqdm=True)
    assert capsys.readouterr().err == ""
    for options in ({"max_gen_toks": 16}, {}):
        with pytest.raises(UsageError, match=r"'max_tokens' must be less than 16, .* of (16|256)"):
            adapter.generate_until([asked("Once", options)], disable_tqdm=True)


@pytest.mark.eval
@pytest.mark.interop
@pytest.mark.filterwarnings("default")
def test_metrics_are_those_of_the_harness_with_transformers(limited: Path) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
        return [Instance(kind, {}, each, n) for n, each in enumerate(arguments)]

    theirs = HFLM(pretrained=str(limited), device="cpu", dtype="float32", batch_size=3)
    ours = harness_model(*load(limited), batch_size=3)
    text = " ".join(["Once upon a time there was a little girl who had a dog."] * 4)
    texts = requests("loglikelihood_rolling", (text,), ("Once",), (text[:70],))
    want = theirs.loglikelihood_rolling(texts, disable_tqdm=True)
    assert ours.loglikelihood_rolling(texts, disable_tqdm=True) == pytest.approx(want, abs=2e-3)
    pairs = requests("loglikelihood", (text, " and"), ("Once", " upon a time"), ("", "Once"))
    want = theirs.loglikelihood(pairs, disable_tqdm=True)
    got = ours.loglikelihood(pairs, disable_tqdm=True)
    assert [each[0] for each in got] == pytest.approx([each[0] for each in want], abs=2e-3)
    assert [each[1] for each in got] == [each[1] for each in want]
    for options in OPTIONS:
        asking = {"until": [], **{key: v for key, v in options.items() if v is not None}}
        answers = requests("generate_until", (text, asking))
        want = theirs.generate_until(answers, disable_tqdm=True)
        assert ours.generate_until(answers, disable_tqdm=True) == want, options


@pytest.mark.eval
@pytest.mark.usefixtures("few_tasks")
def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--tasks", "no_such_task", "--include-path", str(tmp_path)]) == 2
    assert "must be names that lm-evaluation-harness knows but got 'no_such_task'" in (
        capsys.readouterr().err
    )
    assert main(["evaluate", "--tasks", "x", "--include-path", str(tmp_path / "none")]) == 2
    assert "--include-path must be a folder" in capsys.readouterr().err
    assert main(["evaluate", "--tasks", "x", "--top-k", "3"]) == 2
    assert "--top-p and --top-k must come with --temp" in capsys.readouterr().err
    nameless = SimpleNamespace(eos_token_id=None, bos_token_id=None)
    with pytest.raises(UsageError, match="must name an end-of-text token"):
        _ = harness_model(load(demo.path())[0], nameless).prefix_token_id


def test_a_tokenizer_names_its_end_of_text() -> None:
    assert Tokenizer.from_folder(SPM).eos_token_id == 2
    assert load(demo.path())[1].eos_token_id in load(demo.path())[1].eos_token_ids
