"""Prompts to answer, and the groups of answers that a model writes to them while it learns."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.core as mx
import numpy as np

from ...errors import TrainingError
from ...files.tensors import read_arrays
from ...files.writing import new_file
from ...generation.answers.completion import end_tokens
from ...generation.sampling import make_sampler
from ...generation.scheduling import Request, Scheduler
from ...hub import Tokenizer
from ...hub.checkpoint.save import write_tensors
from ...models import Decoder
from ...ops.device import untimed
from ..batches import SampleBatches, evaluation_batches
from ..corpus.rows import read_rows
from ..losses import grpo_loss
from ..optimizer_step import mixed_seed
from ..results import Callback
from ..run_folder import writing
from ..samples import Sample, SampleEncoder, Samples, as_messages, with_rows
from .preferences import PromptReader
from .rewards import Rewards
from .settings import FineTuneSettings


@dataclass(frozen=True)
class Problem:
    """A prompt to answer.

    Attributes:
        tokens: The ids of the prompt, int32 `(n,)`.
        prompt: It as the data has it: a text or a list of messages.
        columns: All that the data has of it.
    """

    tokens: np.ndarray
    prompt: Any
    columns: Mapping[str, Any]

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def texts(self) -> tuple[Sample, ...]:
        return (Sample(self.tokens, self.length),)


@dataclass
class Problems(Samples[Problem]):
    """The problems of one file.

    Attributes: as `Samples`, and
        tokenizer: Turns answers into text.
        rewards: Says how good they are.
    """

    tokenizer: Tokenizer = field(kw_only=True)
    rewards: Rewards = field(kw_only=True)

    def content(self) -> Iterator[bytes]:
        yield from super().content()
        for problem in self.samples:
            yield json.dumps(problem.columns, sort_keys=True).encode()

    def summary(self) -> str:
        words = f"{len(self.samples):,} prompts, {sum(p.length for p in self.samples):,} tokens"
        left_out = f"; {self.dropped} left out, with no space for an answer" if self.dropped else ""
        if self.converted:
            left_out += f"; ShareGPT's turns of {self.converted} converted to messages"
        return f"{words}, rewards by {', '.join(self.rewards.names)}{left_out}"


def rewards_of(settings: FineTuneSettings) -> Rewards:
    """The source of the rewards of a run.

    Raises:
        TrainingError: As `Rewards`.
    """
    return Rewards(
        settings.reward_functions_file,
        settings.reward_functions,
        settings.reward_weights,
        answer=settings.answer_feature,
        timeout_s=settings.reward_timeout_s,
        steps=settings.iters,
    )


def read_problems(
    path: Path,
    tokenizer: Tokenizer,
    settings: FineTuneSettings,
    rewards: Rewards,
    *,
    vocab_size: int | None = None,
) -> Problems:
    """Reads and encodes the rows of a file of prompts, see `read_rows`.

    The prompt is found as `read_pairs` finds it. All else of a line is for the functions that give
    rewards.

    Args:
        path: The file.
        tokenizer: The tokenizer of the model.
        settings: The run.
        rewards: What gives rewards.
        vocab_size: The tokens that the model has rows for; the tokenizer may have more.

    Raises:
        TrainingError: A line cannot be used. The message names the file and the line.
    """
    reader = PromptReader(tokenizer, settings.features)
    encoder = SampleEncoder(tokenizer, True, settings.features)

    found = Problems(tokenizer=tokenizer, rewards=rewards)

    def problem_of(line: dict[str, Any]) -> Problem:
        line, is_changed = as_messages(line, settings.prompt_feature)
        found.converted += is_changed
        prompt = reader.required(line)
        rewards.check(line)
        encoded = with_rows(encoder.unanswered(prompt, line), vocab_size)
        return Problem(np.array(encoded.tokens, np.int32), prompt, line)

    for problem in read_rows(path, problem_of, text_key=settings.text_feature):
        if 0 < problem.length < settings.max_seq_length:
            found.samples.append(problem)
        else:
            found.dropped += 1
    return found


class Answer(NamedTuple):
    """A model's answer to a prompt.

    Attributes:
        tokens: Its ids, with the end's.
        text: Its text.
    """

    tokens: list[int]
    text: str


def written(
    model: Decoder,
    problems: Problems,
    asked: Sequence[Problem],
    settings: FineTuneSettings,
    *seed: int,
) -> list[Answer]:
    """An answer to each of some problems, all in one batch. Prompts that are alike are read once.

    Args:
        model: Writes them.
        problems: Has the tokenizer.
        asked: The problems.
        settings: The run.
        seed: Numbers that decide what is drawn.

    Raises:
        NumericalError: The logits of the model are not finite.
    """
    was_training = model.training
    model.eval()
    scheduler = Scheduler(model, problems.tokenizer, max_rows=len(asked))
    sampler, end = make_sampler(settings.temperature), end_tokens(problems.tokenizer)
    found: dict[int, tuple[list[int], list[str]]] = {}
    # a resumed run must choose the same kernels
    with untimed():
        for number, problem in enumerate(asked):
            request = Request(
                problem.tokens.tolist(),
                min(settings.max_completion_length, settings.max_seq_length - problem.length),
                sampler,
                end=end,
                seed=mixed_seed(settings.seed, *seed, number),
                is_answer=problems.tokenizer.has_chat_template,
            )
            found[scheduler.submit(request)] = [], []
        while scheduler.has_work:
            for event in scheduler.step():
                if event.error is not None:
                    raise event.error
                tokens, texts = found[event.request]
                if event.token is not None:
                    tokens.append(event.token)
                texts.append(event.text)
    model.train(was_training)
    return [Answer(tokens, "".join(texts)) for tokens, texts in found.values()]


def rewards_for(
    problems: Problems, asked: Sequence[Problem], answers: Sequence[Answer]
) -> np.ndarray:
    """The rewards of some answers, float64 `(n,)`. One is NaN if no function applies."""
    texts, columns = [answer.text for answer in answers], [each.columns for each in asked]
    tokens = [answer.tokens for answer in answers]
    return problems.rewards([each.prompt for each in asked], texts, columns, tokens)


def mean_reward(
    model: Decoder, problems: Problems, settings: FineTuneSettings, most_batches: int
) -> float:
    """The mean reward of one answer to each problem of so many batches; -1 takes all."""
    batches = evaluation_batches(
        problems.samples, settings.batch_size, most_batches, settings.seed, cast(Any, list)
    )
    rewards = []
    for number, batch in enumerate(batches):
        asked = cast(list[Problem], batch)
        answers = written(model, problems, asked, settings, number)
        rewards.append(rewards_for(problems, asked, answers))
    return float(np.nan_to_num(np.concatenate(rewards)).mean())


_FOLDER = "rollouts"
_REWARDS = "rewards"


class Rollouts(Callback):
    """Gives each step its batches: groups of answers that the model writes, and how good they are.

    Of a set of answers from which several steps learn, a checkpoint keeps a copy in the run's folder.

    Args:
        model: The model that learns.
        problems: What it answers.
        settings: The run.
        share: Rank of this process and number of processes. Each has its own prompts of a batch.
        reference: The reference model; `None`: there is none.
    """

    def __init__(
        self,
        model: Decoder,
        problems: Problems,
        settings: FineTuneSettings,
        share: tuple[int, int],
        reference: Decoder | None,
    ):
        problems.check_some()
        if settings.num_iterations > 1 and share[1] > 1:
            raise TrainingError(
                "[grpo] 'num_iterations' must be 1 where several processes train together but got "
                f"{settings.num_iterations}."
            )
        self._model, self._problems, self._settings = model, problems, settings
        self._rank, self._reference = share[0], reference
        self._folder = Path(settings.adapter_path) / _FOLDER
        self._in_order = SampleBatches(
            problems.samples,
            settings.batch_size,
            settings.seed,
            shard=share,
            make=cast(Any, list),
        )
        self._first = self._last_saved = -1
        self._batches: list[grpo_loss.GroupBatch] = []
        self._rewards = np.zeros((0, 0), np.float32)

    def __call__(self, step: int) -> list[grpo_loss.GroupBatch]:
        first = step - step % self._settings.num_iterations
        if self._first < 0:
            self._last_saved = first
        if self._first != first:
            self._first = first
            if step == first or not self._restore():
                self._write()
        # those that are done when answers are next asked for
        self._problems.rewards.step = step + 1
        return self._batches

    def metrics(self) -> dict[str, float]:
        """The mean reward of the last answers, their deviation in a group, and their mean length.

        If no function applied to some of them, their share is `without_reward`.
        """
        tokens = sum(batch.tokens for batch in self._batches) / self._rewards.size
        rewards, missing = np.nan_to_num(self._rewards), np.isnan(self._rewards)
        return {
            "reward": float(rewards.mean()),
            "reward_std": float(grpo_loss.sample_deviations(rewards).mean()),
            "completion_tokens": tokens,
            **({"without_reward": float(missing.mean())} if missing.any() else {}),
        }

    def on_save(self, step: int) -> None:
        first = step - step % self._settings.num_iterations
        if step != first:
            self._folder.mkdir(exist_ok=True)
            arrays = {_REWARDS: mx.array(self._rewards)}
            for number, batch in enumerate(self._batches):
                given = {name: array for name, array in vars(batch).items() if array is not None}
                arrays |= {f"{number}.{name}": mx.array(array) for name, array in given.items()}
            with writing(self._folder), new_file(self._file(first)) as new:
                write_tensors(new, arrays)
        # the checkpoint before this one is there until this one is whole
        for file in self._folder.glob("*.safetensors"):
            if int(file.stem) < self._last_saved:
                file.unlink()
        self._last_saved = first

    def _file(self, first: int) -> Path:
        return self._folder / f"{first:07}.safetensors"

    def _restore(self) -> bool:
        """Takes up the answers that a checkpoint has kept, if there are any."""
        file = self._file(self._first)
        if not file.exists():
            return False
        arrays = {name: np.array(array) for name, array in read_arrays(file).items()}
        self._rewards = arrays.pop(_REWARDS)
        parts: list[dict[str, np.ndarray]] = [{} for _ in range(self._parts)]
        for name, array in arrays.items():
            number, _, field_name = name.partition(".")
            parts[int(number)][field_name] = array
        self._batches = [grpo_loss.GroupBatch(**cast(Any, part)) for part in parts]
        return True

    @property
    def _parts(self) -> int:
        return self._settings.grad_accumulation_steps

    def _write(self) -> None:
        """Lets the model answer the prompts of a step."""
        settings = self._settings
        number = self._first // settings.num_iterations * self._parts
        parts = [cast(Any, self._in_order.batch(number + part)) for part in range(self._parts)]
        count = settings.num_generations
        asked = [problem for part in parts for problem in part for _ in range(count)]
        answers = written(self._model, self._problems, asked, settings, self._first, self._rank)
        self._problems.rewards.step = self._first
        rewards = rewards_for(self._problems, asked, answers).reshape(-1, count)
        # as a checkpoint keeps them
        self._rewards = rewards.astype(np.float32)
        is_scaled = settings.scale_rewards == "group"
        counted = np.nan_to_num(rewards)
        advantages = grpo_loss.group_advantages(counted, scaled=is_scaled).reshape(-1)
        samples = [_answered(problem, *each) for problem, each in zip(asked, answers, strict=True)]
        rows = len(asked) // len(parts)
        self._batches = []
        for start in range(0, len(asked), rows):
            part = slice(start, start + rows)
            batch = grpo_loss.group_batch(samples[part], advantages[part], **settings.group_options)
            self._batches.append(self._known(batch))

    def _known(self, batch: grpo_loss.GroupBatch) -> grpo_loss.GroupBatch:
        """The batch with the log-probabilities that its loss compares with."""
        settings = self._settings
        was_training = self._model.training
        self._model.eval()
        old = self._model if settings.num_iterations > 1 else None
        with untimed():
            known = grpo_loss.with_log_probabilities(
                batch, old, self._reference, settings.temperature
            )
        self._model.train(was_training)
        return known


def _answered(problem: Problem, tokens: list[int], text: str) -> Sample:
    whole = np.concatenate([problem.tokens, np.array(tokens, np.int32)])
    return Sample(whole, problem.length)


def largest_group_batch(
    problems: Problems, settings: FineTuneSettings, share: tuple[int, int]
) -> grpo_loss.GroupBatch:
    """A batch of this process that is as large as the largest of the run, for a plan."""
    longest = max(problems.samples, key=lambda problem: problem.length)
    capacity = min(settings.max_completion_length, settings.max_seq_length - longest.length)
    rows = settings.batch_size // share[1] * settings.num_generations
    answers = [_answered(longest, [0] * capacity, "")] * rows
    batch = grpo_loss.group_batch(answers, np.zeros(rows), **settings.group_options)
    zeros = np.zeros(batch.weights.shape, np.float32)
    return grpo_loss.GroupBatch(
        **{
            **vars(batch),
            "old": zeros if settings.num_iterations > 1 else None,
            "reference": zeros if settings.uses_reference else None,
        }
    )
