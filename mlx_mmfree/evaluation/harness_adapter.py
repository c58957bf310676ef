"""The adapter between this library's models and lm-evaluation-harness."""

from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from ..errors import UsageError
from ..generation import Sampler, batch_generate, make_sampler
from ..generation.prompt_ids import encode_once_begun
from ..models import Decoder
from .scoring import score_continuations

_DEFAULT_MAX_TOKENS = 256
_KNOWN_OPTIONS = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k", "min_p"}


class HarnessAdapter:
    """The methods that the harness calls, to be put before its class `TemplateLM`.

    The package may not be installed, so that this class cannot inherit from it. The arguments are
    those of `harness_model`.
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
        if add_special_tokens is not False:
            return encode_once_begun(self.tokenizer, string, parse_special)
        ids: list[int] = self.tokenizer.encode(string, False, parse_special)
        return ids

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        with tqdm(total=len(requests), desc="Likelihoods", disable=disable_tqdm) as bar:
            scores = score_continuations(
                self._model,
                [(context, continuation) for _, context, continuation in requests],
                batch_size=self._batch_size,
                prefill_step_size=self._prefill_step_size,
                progress=bar.update,
            )
        return [(score.log_likelihood, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        prefix = [self.prefix_token_id]
        texts = [request.args[0] for request in requests]
        pairs = [(text, prefix, self.tok_encode(text, False)) for text in texts]
        scores = self._loglikelihood_tokens(pairs, disable_tqdm=disable_tqdm)
        return [likelihood for likelihood, _ in scores]

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        texts = [""] * len(requests)
        alike: dict[str, list[int]] = {}
        for n, request in enumerate(requests):
            alike.setdefault(repr(sorted(request.args[1].items())), []).append(n)
        with tqdm(total=len(requests), desc="Answers", disable=disable_tqdm) as bar:
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

    def _answers(self, contexts: list[str], options: Mapping[str, Any]) -> list[str]:
        if unknown := set(options) - _KNOWN_OPTIONS:
            raise UsageError(
                f"[evaluate] a task's 'generation_kwargs' may hold only "
                f"{', '.join(sorted(_KNOWN_OPTIONS))} but got {', '.join(sorted(unknown))}."
            )
        until = options.get("until") or []
        return batch_generate(
            self._model,
            self.tokenizer,
            [self.tok_encode(context) for context in contexts],
            max_tokens=self._max_tokens or options.get("max_gen_toks", _DEFAULT_MAX_TOKENS),
            sampler=self._sampler or _task_sampler(options),
            stop=[until] if isinstance(until, str) else until,
            batch_size=self._batch_size,
            prefill_step_size=self._prefill_step_size,
        ).texts


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
