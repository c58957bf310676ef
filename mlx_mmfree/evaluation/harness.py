"""Runs tasks of lm-evaluation-harness (EleutherAI, package `lm_eval`) on this library's models."""

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError, install_extra
from ..generation import Sampler, batch_generate, make_processors, make_sampler
from ..generation.prompts import prompt_tokens
from ..generation.reader import PREFILL_STEP_SIZE
from ..models import Decoder
from ..platform.progress import Progress
from .perplexity import score_continuations

if TYPE_CHECKING:
    from lm_eval.api.model import TemplateLM

_DEFAULT_MAX_TOKENS = 256
_MAX_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the length of an answer; of several, the first counts."""

_SAMPLING = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_KNOWN_OPTIONS = {"until", *_MAX_TOKENS, *_SAMPLING}
_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "diversity_penalty": (0.0,),
    "early_stopping": (True, False),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "typical_p": (1.0,),
}
"""Further options of transformers, with the values that change nothing where nothing else is read."""


class HarnessAdapter:
    """The methods that the harness calls, to be put before its class `TemplateLM`.

    The package may not be installed, so that this class cannot inherit from it. The arguments are
    as in `harness_model`.
    """

    cache_hook: Any

    def __init__(self, model: Decoder, tokenizer: Any, **settings: Any):
        super().__init__()
        self.tokenizer = tokenizer
        self._model = model
        self._batch_size = settings["batch_size"]
        self._max_tokens = settings["max_tokens"]
        self._sampler = settings["sampler"]
        self._template_variables = settings["template_variables"]
        self._prefill_step_size = settings["prefill_step_size"]
        self._renders_chats = False

    @property
    def eot_token_id(self) -> int:
        token: int | None = self.tokenizer.eos_token_id
        if token is None:
            raise UsageError(
                "[evaluate] the tokenizer must name an end-of-text token but names none. Set "
                "'eos_token' in its 'tokenizer_config.json'."
            )
        return token

    @property
    def prefix_token_id(self) -> int:
        first: int | None = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else first

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.folder)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        # only for the record of results; `apply_chat_template` writes the conversation
        return "the tokenizer's own" if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        self._renders_chats = True
        text: str = self.tokenizer.apply_chat_template(
            chat_history, add_generation_prompt, tokenize=False, **self._template_variables
        )
        return text

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        parse_special = True if self._renders_chats else None
        if string and add_special_tokens is not False:
            return prompt_tokens(self.tokenizer, string, self._model.vocab_size, parse_special)
        framed = add_special_tokens is not False
        ids: list[int] = self.tokenizer.encode(string, framed, parse_special)
        return ids

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        for (context, choice), _, continuation in requests:
            # without one, its likelihood would be 1, and it would win
            if not continuation:
                raise UsageError(
                    "[evaluate] a choice must have a token of its own after its context but "
                    f"{choice!r:.60} has none after {context[-60:]!r}, whose last token holds it. "
                    "Begin the choice with a space, or end the context without one."
                )
        if (most := self._model.context_length) is not None:
            # the last token is predicted, not read
            sizes = (len(context) + len(continuation) - 1 for _, context, continuation in requests)
            self._tell_of_cut(sum(size > most for size in sizes))
        with Progress("Likelihoods", len(requests), is_shown=not disable_tqdm) as bar:
            scores = score_continuations(
                self._model,
                [(context, continuation) for _, context, continuation in requests],
                batch_size=self._batch_size,
                prefill_step_size=self._prefill_step_size,
                progress=bar.update,
            )
        return [(score.log_likelihood, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        most, prefix = self._model.context_length, self.prefix_token_id
        texts = [request.args[0] for request in requests]
        windows = [_windows(prefix, self.tok_encode(text, False), most) for text in texts]
        pairs = [
            ((text, ""), *pair) for text, each in zip(texts, windows, strict=True) for pair in each
        ]
        scores = iter(self._loglikelihood_tokens(pairs, disable_tqdm=disable_tqdm))
        return [sum(next(scores)[0] for _ in each) for each in windows]

    def _tell_of_cut(self, count: int) -> None:
        if count:
            print(
                f"[evaluate] the start of {count} texts is left out, which are longer than the "
                f"{self._model.context_length} tokens that the model was made for.",
                file=sys.stderr,
            )

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        texts = [""] * len(requests)
        alike: dict[str, list[int]] = {}
        for n, request in enumerate(requests):
            alike.setdefault(repr(sorted(request.args[1].items())), []).append(n)
        with Progress("Answers", len(requests), is_shown=not disable_tqdm) as bar:
            for group in alike.values():
                for first in range(0, len(group), self._batch_size):
                    chosen = group[first : first + self._batch_size]
                    contexts = [requests[n].args[0] for n in chosen]
                    answers = self._answers(contexts, requests[chosen[0]].args[1])
                    for n, text in zip(chosen, answers, strict=True):
                        texts[n] = text
                        self.cache_hook.add_partial("generate_until", requests[n].args, text)
                    bar.update(len(chosen))
        return texts

    def _answers(self, contexts: list[str], task_options: Mapping[str, Any]) -> list[str]:
        options = {key: value for key, value in task_options.items() if value is not None}
        _check_options(options)
        lengths = (int(options[name]) for name in _MAX_TOKENS if name in options)
        max_tokens = self._max_tokens or next(lengths, _DEFAULT_MAX_TOKENS)
        prompts = [self.tok_encode(context) for context in contexts]
        most = self._model.context_length
        if most is not None:
            if max_tokens >= most:
                raise UsageError(
                    f"[evaluate] 'max_tokens' must be less than {most}, the length that the model was "
                    f"made for, but a task asks for answers of {max_tokens}. Give a smaller number."
                )
            capacity = most - max_tokens
            self._tell_of_cut(sum(len(prompt) > capacity for prompt in prompts))
            prompts = [prompt[-capacity:] for prompt in prompts]
        until = options.get("until") or []
        penalty = float(options.get("repetition_penalty", 1.0))
        return batch_generate(
            self._model,
            self.tokenizer,
            prompts,
            max_tokens=max_tokens,
            sampler=self._sampler or _task_sampler(options),
            processors=make_processors(
                repetition_penalty=penalty,
                # all tokens of the prompt and the answer
                repetition_context_size=max(map(len, prompts)) + max_tokens,
            ),
            stop=[until] if isinstance(until, str) else until,
            batch_size=self._batch_size,
            prefill_step_size=self._prefill_step_size,
            # as transformers decodes what was generated
            is_answer=True,
        ).texts


def _windows(prefix: int, ids: list[int], most: int | None) -> list[tuple[list[int], list[int]]]:
    """The contexts and continuations in which a whole text is scored, each token once.

    Where the model was made for so many tokens, each window has as many, so that the context of the
    last one, which is shorter, is longer.
    """
    step = len(ids) if most is None else most
    windows = []
    for start in range(0, len(ids), max(step, 1)):
        stop = min(start + step, len(ids))
        context = [prefix] if start == 0 else ids[stop - step - 1 : start]
        windows.append((context, ids[start:stop]))
    return windows


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuses options of a task that would change its answers in a way that is not implemented."""
    for name, value in options.items():
        allowed = _WITHOUT_EFFECT.get(name, ())
        if name in _KNOWN_OPTIONS or value in allowed:
            continue
        rule = f"have {name} {' or '.join(map(str, allowed))}" if allowed else ""
        known = ", ".join(sorted({*_KNOWN_OPTIONS, *_WITHOUT_EFFECT}))
        raise UsageError(
            f"[evaluate] a task's 'generation_kwargs' may {rule or f'hold only {known}'} but got "
            f"{name}: {value!r:.60}. Other options are not implemented."
        )


def _task_sampler(options: Mapping[str, Any]) -> Sampler:
    """The sampler that a task asks for. It takes the likeliest token unless the task says otherwise."""
    temperature = float(options.get("temperature", 0.0))
    if options.get("do_sample") is True and "temperature" not in options:
        temperature = 1.0
    elif options.get("do_sample") is False:
        temperature = 0.0
    return make_sampler(
        temp=temperature,
        top_p=float(options.get("top_p", 1.0)),
        top_k=int(options.get("top_k", 0)),
        min_p=float(options.get("min_p", 0.0)),
    )


def harness_model(
    model: Decoder,
    tokenizer: Any,
    *,
    batch_size: int = 8,
    max_tokens: int | None = None,
    sampler: Sampler | None = None,
    template_variables: Mapping[str, Any] | None = None,
    prefill_step_size: int = PREFILL_STEP_SIZE,
) -> "TemplateLM":
    """A model in the format that `lm_eval.simple_evaluate` takes.

    Args:
        model: The model.
        tokenizer: The tokenizer of the model.
        batch_size: Number of texts read at a time.
        max_tokens: Largest number of tokens of an answer; `None` takes the task's, or 256.
        sampler: Chooses the tokens of answers; `None` takes the task's, or the likeliest token.
        template_variables: Further variables of the chat template.
        prefill_step_size: Number of tokens of each text read at a time.

    Raises:
        UsageError: The package `lm_eval` is not installed.
    """
    return _adapter_class()(
        model,
        tokenizer,
        batch_size=batch_size,
        max_tokens=max_tokens,
        sampler=sampler,
        template_variables=dict(template_variables or {}),
        prefill_step_size=prefill_step_size,
    )


@cache
def _adapter_class() -> type:
    """The adapter as a class of the harness, which exists only where the package is installed."""
    check_installed()
    from lm_eval.api.model import TemplateLM

    return type("Adapter", (HarnessAdapter, TemplateLM), {})


def evaluate_tasks(
    model: "TemplateLM",
    tasks: Sequence[str],
    *,
    include_path: Path | None = None,
    seed: int,
    **options: Any,
) -> dict[str, Any]:
    """Runs tasks of lm-evaluation-harness and returns its results.

    Args:
        model: The model, from `harness_model`.
        tasks: Names of tasks or groups of tasks.
        include_path: A folder with further tasks, which win over the package's.
        seed: Seed of all random generators that a task may use.
        options: Further arguments of `lm_eval.simple_evaluate`, such as `num_fewshot` and `limit`.

    Raises:
        UsageError: A task is unknown, or the package `lm_eval` is not installed.
    """
    check_installed()
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    paths = None if include_path is None else str(include_path)
    manager = TaskManager(include_path=paths)
    if unknown := [task for task in tasks if not manager.match_tasks([task])]:
        raise UsageError(
            f"[evaluate] 'tasks' must be names that lm-evaluation-harness knows but got "
            f"{', '.join(map(repr, unknown))}. 'lm_eval ls tasks' lists them, and --include-path adds "
            "further ones."
        )
    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    results: dict[str, Any] = simple_evaluate(
        model=model,
        tasks=list(tasks),
        task_manager=manager,
        **dict.fromkeys(seeds, seed),
        **options,
    )
    return results


def check_installed() -> None:
    """Checks that the package `lm_eval` is installed.

    Raises:
        UsageError: It is not installed.
    """
    try:
        import lm_eval  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "lm_eval":
            raise
        raise UsageError(
            "[evaluate] the package lm-evaluation-harness must be installed but is not. "
            + install_extra("eval")
        ) from error
