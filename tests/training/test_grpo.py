"""Learning from rewards: what is written, what is learned, exact resume, and what is refused."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.errors import TrainingError
from mlx_mmfree.generation import stream_generate
from mlx_mmfree.hub import Tokenizer
from mlx_mmfree.models import Decoder
from mlx_mmfree.training.data_parallel import DataParallel
from mlx_mmfree.training.fine_tuning.data import read_data
from mlx_mmfree.training.fine_tuning.fine_tune import (
    fine_tune,
    held_out_metrics,
    plan_fine_tune,
    prepare,
)
from mlx_mmfree.training.fine_tuning.rollouts import Problems, Rollouts, written
from mlx_mmfree.training.fine_tuning.settings import FineTuneSettings
from mlx_mmfree.training.losses.grpo_loss import GroupBatch, answer_token_log_probabilities
from mlx_mmfree.training.results import Callback, read_log
from tests.tolerances import TOLERANCE, relative_error
from tests.training.test_fine_tune import GOLDENS, _build, _Kill, _Killed, _losses, _settings

pytestmark = pytest.mark.usefixtures("without_curve")

# more vowels are better, which a program checks
REWARD = """
def vowels(completions):
    return [sum(letter in "aeiou" for letter in text) for text in completions]
"""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(GOLDENS / "tokenizer_bpe")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "rewards.py").write_text(REWARD)
    for name, first, last in (("train", 0, 7), ("valid", 20, 23), ("test", 30, 34)):
        lines = [{"prompt": f"Who is {n}?", "answer": "The cat."} for n in range(first, last)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def _grpo(data: Path, **values: Any) -> FineTuneSettings:
    defaults: dict[str, Any] = {
        "train_mode": "grpo",
        "mask_prompt": False,
        "reward_functions_file": str(data.parent / "rewards.py"),
        "num_generations": 3,
        "max_completion_length": 5,
    }
    return _settings(data, **(defaults | values))


def _run(
    settings: FineTuneSettings, tokenizer: Tokenizer, callbacks: tuple[Callback, ...] = ()
) -> Decoder:
    model = _build("bitnet")
    prepare(model, settings)
    fine_tune(model, tokenizer, read_data(settings, tokenizer), settings, callbacks=callbacks)
    return model


@pytest.mark.exhaustive
def test_rewards_rise(data: Path, tokenizer: Tokenizer) -> None:
    settings = _grpo(data, iters=15, steps_per_eval=15, num_generations=8, beta=0.0)
    model = _run(settings, tokenizer)
    log = read_log(data.parent / "run/log.jsonl")
    before, after = (record["valid_reward"] for record in log if "valid_reward" in record)
    assert after > 2 * before and after == -log[-1]["valid_loss"]
    rewards = [record["reward"] for record in log if "reward" in record]
    assert np.mean(rewards[-3:]) > 2 * np.mean(rewards[:3])
    assert all(0 < record["completion_tokens"] <= 5 for record in log if "reward" in record)
    metrics = held_out_metrics(model, read_data(settings, tokenizer)["test"], settings)
    assert metrics["reward"] == -metrics["loss"] > before


def test_answers_without_a_reward_count_zero(data: Path, tokenizer: Tokenizer) -> None:
    (data.parent / "rewards.py").write_text(
        "def score(prompts, completions, trainer_state, **columns):\n"
        "    step = 1 + trainer_state.global_step\n"
        "    return [step if prompt == 'Who is 0?' else None for prompt in prompts]\n"
    )
    lines = [json.dumps({"prompt": f"Who is {n}?"}) for n in (0, 1, 2, 3)]
    (data / "train.jsonl").write_text("\n".join(lines))
    settings = _grpo(data, iters=3, batch_size=4, steps_per_report=1)
    _run(settings, tokenizer)
    log = [record for record in read_log(data.parent / "run/log.jsonl") if "reward" in record]
    assert [record["reward"] for record in log] == [0.25, 0.5, 0.75]
    assert [record["without_reward"] for record in log] == [0.75] * 3


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow, id="each step"),
        pytest.param(
            {"num_iterations": 3, "grad_accumulation_steps": 2, "save_every": 1}, id="several steps"
        ),
        pytest.param(
            {"num_iterations": 2, "beta": 0.0, "grpo_loss_type": "bnpo", "save_every": 3},
            marks=pytest.mark.slow,
            id="without a reference",
        ),
    ],
)
def test_a_killed_run_resumes_to_the_same_bits(
    data: Path, tokenizer: Tokenizer, options: dict[str, Any]
) -> None:
    options = {"dropout": 0.3, **options}
    whole = _grpo(data, adapter_path=str(data.parent / "whole"), **options)
    want = _run(whole, tokenizer)
    settings = _grpo(data, **options)
    for step in (3, 5):
        with pytest.raises(_Killed):
            _run(settings, tokenizer, (_Kill(step),))
    got = _run(settings, tokenizer)
    assert _losses(settings) == _losses(whole)
    assert _metrics(settings) == _metrics(whole)
    wanted = dict(tree_flatten(want.parameters()))
    for name, value in tree_flatten(got.parameters()):
        assert mx.array_equal(value, wanted[name]), name
    files = [
        sorted(file.name for file in Path(s.adapter_path).rglob("rollouts/*"))
        for s in (whole, settings)
    ]
    assert files[0] == files[1] and len(files[0]) == ("num_iterations" in options)


def _metrics(settings: FineTuneSettings) -> list[Any]:
    records = read_log(Path(settings.adapter_path) / "log.jsonl")
    names = ("reward", "reward_std", "completion_tokens")
    return [[record[name] for name in names] for record in records if "reward" in record]


def _problems(settings: FineTuneSettings, tokenizer: Tokenizer) -> Problems:
    problems = read_data(settings, tokenizer)["train"]
    assert isinstance(problems, Problems)
    return problems


@pytest.mark.exhaustive
def test_answers_are_those_of_the_model_with_its_adapter(data: Path, tokenizer: Tokenizer) -> None:
    settings = _grpo(data, temperature=1e-6, max_completion_length=9)
    model = _run(settings, tokenizer)
    model.train()
    problems = _problems(settings, tokenizer)
    asked = [problem for problem in problems.samples for _ in range(2)]
    answers = written(model, problems, asked, settings)
    assert model.training
    model.eval()
    for problem, answer in zip(asked, answers, strict=True):
        prompt = problem.tokens.tolist()
        alone = list(stream_generate(model, tokenizer, prompt, max_tokens=9))
        assert answer.tokens == [each.token for each in alone]
        assert answer.text == "".join(each.text for each in alone)
    hot = _grpo(data, temperature=2.0, max_completion_length=9)
    drawn = written(model, problems, asked, hot, 5)
    assert (
        drawn == written(model, problems, asked, hot, 5) != written(model, problems, asked, hot, 6)
    )
    # one group, and what each row draws is its own
    assert drawn[0] != drawn[1]
    assert drawn[:3] == written(model, problems, asked[:3], hot, 5)


def test_several_steps_learn_from_one_set_of_answers(data: Path, tokenizer: Tokenizer) -> None:
    settings = _grpo(data, num_iterations=2, temperature=0.7)
    model = _build("bitnet")
    prepare(model, settings)
    reference = _build("llama")
    rollouts = Rollouts(model, _problems(settings, tokenizer), settings, (0, 1), reference)
    [batch], [again], [other] = ([*rollouts(step)] for step in (0, 1, 2))
    assert batch is again is not other
    assert isinstance(batch, GroupBatch) and batch.terms == 2 * 3
    for known, author in ((batch.old, model.eval()), (batch.reference, reference)):
        want = answer_token_log_probabilities(author, batch, 0.7)
        assert relative_error(mx.array(known), want) <= TOLERANCE[mx.float32]
    groups = batch.advantages.reshape(2, 3)
    assert np.abs(groups.sum(axis=1)).max() < 1e-5


@pytest.mark.exhaustive
def test_a_plan_knows_the_longest_answers(data: Path, tokenizer: Tokenizer) -> None:
    short, long = (_grpo(data, max_completion_length=length) for length in (5, 40))
    plans = []
    for settings in (short, long):
        model = _build("bitnet")
        prepare(model, settings)
        plans.append(
            plan_fine_tune(model, read_data(settings, tokenizer), settings, DataParallel())
        )
    assert plans[0].total < plans[1].total


@pytest.mark.exhaustive
def test_other_rewards_are_another_run(data: Path, tokenizer: Tokenizer) -> None:
    settings = _grpo(data, iters=2)
    _run(settings, tokenizer)
    (data.parent / "rewards.py").write_text(REWARD.replace("aeiou", "xyz"))
    with pytest.raises(TrainingError, match="other values of reward_file"):
        _run(settings, tokenizer)


def test_a_prompt_without_an_answer_names_its_line(data: Path, tokenizer: Tokenizer) -> None:
    (data / "train.jsonl").write_text('{"question": "Who?"}\n')
    settings = _grpo(data, reward_functions_file=None)
    with pytest.raises(TrainingError, match=r"train.jsonl' line 1: it must have 'answer' for the"):
        read_data(settings, tokenizer)
    (data / "train.jsonl").write_text('{"completion": "Who?", "answer": 1}\n')
    with pytest.raises(TrainingError, match=r"line 1: it must have its prompt under 'prompt' or"):
        read_data(settings, tokenizer)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_generations": 1}, "'num_generations' must be at least 2"),
        ({"pack": True}, "'pack' must be left out with 'train_mode' grpo"),
        ({"loss_type": "ipo"}, "'loss_type' must come with 'train_mode' dpo"),
        ({"train_mode": "dpo"}, "must come with 'train_mode' grpo but got 'dpo'"),
        (
            {"train_mode": "dpo", "beta": 0.0, "reward_functions_file": None},
            "'beta' must be positive",
        ),
    ],
)
def test_what_does_not_go_together(data: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        _grpo(data, **options)
