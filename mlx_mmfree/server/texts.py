"""The texts that a request asks of the scheduler: prompts as token ids, samplers, lengths."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

from ..errors import EffortError, MMFreeError, UsageError, shown_path
from ..generation import LogitBias, LogitsProcessor, Sampler, make_processors, make_sampler
from ..generation.answers.completion import end_tokens
from ..generation.answers.reasoning import (
    ReasoningBudget,
    ReasoningTags,
    reasoning_tags,
    with_reasoning,
)
from ..generation.answers.stop_strings import TextEnd
from ..generation.prompts import prompt_tokens
from ..generation.sampling import PENALTIES
from ..generation.scheduling import Request
from ..tokenizer.chat import EFFORT
from .conversation import CallRules, arrangements, call_rules, turns_of
from .errors import RequestError
from .schemas import ChatRequest, Message, TextRequest
from .settings import MAX_PROBABILITIES, ServedModel, Settings
from .tool_calls.call_formats import USUAL_FORMAT


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model reads it.

    Attributes:
        tokens: Its ids.
        breakpoints: Numbers of its first tokens after which its state is worth keeping.
        reasoning_tags: The tags of reasoning that its template knows; `None` for none.
        is_thinking: Whether it ends within reasoning.
        goes_on: Whether it ends within an answer, which the text goes on with.
    """

    tokens: list[int]
    breakpoints: tuple[int, ...] = ()
    reasoning_tags: ReasoningTags | None = None
    is_thinking: bool = False
    goes_on: bool = False


def most_tokens(served: ServedModel, settings: Settings) -> int:
    """The most tokens of a prompt and its answer together."""
    return min(settings.max_context, served.model.max_length or settings.max_context)


def check_size(
    served: ServedModel, texts: Sequence[str | Sequence[int]], most: int, what: str
) -> None:
    """Refuses texts that have too many tokens together, without encoding them.

    Raises:
        RequestError: They have, whatever their tokens are.
    """
    if sum(map(len, texts)) <= most:
        return
    least = served.tokenizer.least_tokens
    count = sum(least(text) if isinstance(text, str) else len(text) for text in texts)
    if count > most:
        words = "at least " if any(isinstance(text, str) for text in texts) else ""
        raise RequestError(
            f"[request] {what} must have at most {most:,} tokens but has {words}{count:,}.",
            413,
            code="context_length_exceeded",
        )


def checked_tokens(served: ServedModel, text: str | Sequence[int], param: str) -> list[int]:
    """The ids of a text.

    Raises:
        RequestError: An id is not in the vocabulary, or the text cannot be encoded.
    """
    try:
        return prompt_tokens(served.tokenizer, text, served.model.vocab_size)
    except (ValueError, MMFreeError) as error:
        reason = _of_request(served, error)
        raise RequestError(f"[request] '{param}' cannot be read: {reason}", param=param) from error


def chat_prompt(served: ServedModel, body: ChatRequest, settings: Settings) -> Prompt:
    """A conversation up to where its next answer begins, or up to where its last answer goes on.

    Args:
        served: The model, with a chat template.
        body: The request.
        settings: Of the server.

    Raises:
        RequestError: The model has no template, its template refuses the conversation, or that is too
            long.
    """
    tokenizer = served.tokenizer
    if not tokenizer.has_chat_template:
        raise RequestError(
            f"[request] 'messages' must go to a model with a chat template but {served.name!r} has "
            "none: it is a base model, which was not taught to answer. Send a 'prompt' to "
            "/v1/completions.",
            param="messages",
            code="no_chat_template",
        )
    template = tokenizer.chat_template_source(tools=bool(body.offered))
    tags = reasoning_tags(template)
    begun = body.messages[-1] if body.continue_final_message else None
    names = _variables(settings, body)
    if body.offered:
        # whether calls are held to their schema is nothing that the model is reported
        left_out = {"function": {"strict"}}
        names["tools"] = [
            tool.model_dump(exclude_none=True, exclude=left_out) for tool in body.tools
        ]
    try:
        messages, chat = _rendered(served, body, template, names)
        most = most_tokens(served, settings)
        check_size(served, [chat.text], most, "the conversation with its answer")
        tokens = chat.ids()
        checked = prompt_tokens(tokenizer, tokens, served.model.vocab_size)
        breakpoints = _breakpoints(served, messages, names, chat, checked)
        is_thinking = tags is not None and tags.are_open(chat.text)
        if begun is None:
            return Prompt(checked, breakpoints, tags, is_thinking)
        check_size(served, [chat.text, begun.text, begun.reasoning_text], most, "the conversation")
        ids = [*checked, *_begun(tokenizer, begun, tags, is_thinking)]
        if begun.text:
            # what follows can be no reasoning
            return Prompt(ids, breakpoints, goes_on=True)
        return Prompt(
            ids, breakpoints, tags, is_thinking or bool(begun.reasoning_text), goes_on=True
        )
    except RequestError:
        raise
    except (ValueError, MMFreeError) as error:
        param = EFFORT if isinstance(error, EffortError) else "messages"
        raise RequestError(_of_request(served, error), param=param) from error


def _variables(settings: Settings, body: TextRequest) -> dict[str, Any]:
    """Further names for the chat template: the server's own where the request has none."""
    usual, own = dict(settings.template_variables), getattr(body, "variables", {})
    if EFFORT in own:
        # who asks for an effort asks for reasoning
        usual.pop("enable_thinking", None)
    if own.get("enable_thinking") is False:
        usual.pop(EFFORT, None)
    return usual | own


Messages = list[dict[str, Any]]


def _rendered(
    served: ServedModel, body: ChatRequest, template: str, names: dict[str, Any]
) -> tuple[Messages, Any]:
    """The messages of a conversation in the first arrangement that its template takes, and their text.

    Raises:
        RequestError: It takes none.
        MMFreeError: The template is faulty.
    """
    tokenizer = served.tokenizer
    before = body.messages[:-1] if body.continue_final_message else body.messages
    turns = turns_of(before)
    rules = CallRules(USUAL_FORMAT)
    if any(turn.calls or turn.call is not None for turn in turns):
        rules = call_rules(tokenizer, bool(body.offered))
    refused: UsageError | None = None
    for arrangement in arrangements(turns, rules):
        messages = [with_reasoning(message, template) for _, message in arrangement]
        try:
            chat = tokenizer.render_chat(messages, **names)
        except EffortError:
            raise
        except UsageError as error:
            refused = error
            continue
        if _has_instructions(chat.text, messages):
            return messages, chat
    assert refused is not None
    number = _refused(tokenizer, messages, names)
    origin = body.origin(arrangement[number][0])
    raise RequestError(f"{refused} It refuses {origin!r}.", param=origin) from refused


def _has_instructions(text: str, messages: Messages) -> bool:
    """Returns whether a template has written all messages of the system, and not the first one alone."""
    index = 0
    for message in messages[1:]:
        if message["role"] == "system":
            index = text.find(message["content"].strip(), index)
            if index < 0:
                return False
    return True


def _refused(tokenizer: Any, messages: Messages, names: dict[str, Any]) -> int:
    """The number of a message before which a template takes a conversation, and after which not."""
    taken, refused = 0, len(messages)
    while refused - taken > 1:
        middle = (taken + refused) // 2
        try:
            tokenizer.render_chat(messages[:middle], **names)
            taken = middle
        except UsageError:
            refused = middle
    return taken


def _begun(
    tokenizer: Any, message: Message, reasoning_tags: ReasoningTags | None, is_thinking: bool
) -> list[int]:
    """The ids of what is there of an answer, after the words that begin it."""
    parts = [(message.text, False)]
    if reasoning_tags is not None and (message.reasoning_text or is_thinking):
        opening = "" if is_thinking else f"{reasoning_tags.begin}\n"
        closing = f"\n{reasoning_tags.end}\n\n" if message.text else ""
        parts = [(opening, True), (message.reasoning_text, False), (closing, True), *parts]
    return [
        number
        for text, is_tag in parts
        if text
        for number in tokenizer.encode_continuation(text, parse_special=is_tag)
    ]


def _breakpoints(
    served: ServedModel,
    messages: list[dict[str, Any]],
    names: dict[str, Any],
    chat: Any,
    tokens: list[int],
) -> tuple[int, ...]:
    """After the system's message, which others may share, and after the last message."""
    breakpoints = set()
    # a template may refuse a part of the conversation
    with suppress(MMFreeError):
        asked = served.tokenizer.render_chat(messages, add_generation_prompt=False, **names)
        if chat.text.startswith(asked.text):
            breakpoints.add(len(tokens) - len(chat.ids_after(len(asked.text))))
    if messages[0]["role"] == "system" and len(messages) > 1:
        with suppress(MMFreeError):
            first = served.tokenizer.render_chat(messages[:1], add_generation_prompt=False, **names)
            ids = first.ids()
            if tokens[: len(ids)] == ids:
                breakpoints.add(len(ids))
    return tuple(sorted(mark for mark in breakpoints if 0 < mark < len(tokens)))


def _of_request(served: ServedModel, error: Exception) -> str:
    """The words of an error, without the folder that the model lies in."""
    return str(error).replace(shown_path(str(served.tokenizer.folder)), served.name)


_SEEDS = 2**63


def text_requests(
    served: ServedModel,
    settings: Settings,
    body: TextRequest,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int | None,
    top_logprobs: int | None,
    ending: Callable[[], TextEnd] | None = None,
    is_answer: bool = False,
    caps_length: bool = False,
    reasoning_budget: int | None = None,
) -> list[Request]:
    """A request of the scheduler for each text, `n` for each prompt in their order.

    Args:
        served: The model.
        settings: The limits and defaults of the server.
        body: The request of a client.
        prompts: Its prompts.
        max_tokens: The most tokens of each text; `None` for the server's own number.
        top_logprobs: How many likeliest tokens are shown beside each; `None` shows no probability.
        ending: Makes what ends a text instead of the request's stop strings.
        is_answer: Whether the texts answer their prompts, and do not continue them.
        caps_length: Whether a text for which there is too little space gets what there is.
        reasoning_budget: The most tokens of reasoning; `None`: no limit.

    Raises:
        RequestError: A parameter is beyond what the server or the model allows.
    """
    end = end_tokens(served.tokenizer, settings.extra_end)
    most = most_tokens(served, settings)
    wanted = 1 if max_tokens is None or caps_length else max_tokens
    defaults = settings.sampling
    seed = defaults.seed if body.seed is None else body.seed
    try:
        thinks = _variables(settings, body).get("enable_thinking") is not False
        suggestion = served.suggested(thinks)
        sampler, processors = _choice(served, body, defaults.values_for(body, suggestion), end)
    except (ValueError, MMFreeError) as error:
        named = re.search(r"'(\w+)'", str(error))
        raise RequestError(str(error), param=named and named[1]) from error
    requests = []
    for prompt, number in product(prompts, range(body.n)):
        capacity = most - len(prompt.tokens)
        if capacity < wanted:
            raise RequestError(
                f"[request] prompt and answer must have at most {most:,} tokens together "
                f"but the prompt has {len(prompt.tokens):,}"
                + ("." if max_tokens is None else f" and the answer may have {max_tokens:,}."),
                413,
                param="max_tokens" if capacity > 0 else None,
                code="context_length_exceeded",
            )
        own = list(processors)
        if reasoning_budget is not None and prompt.reasoning_tags is not None:
            opened = prompt.reasoning_tags, prompt.is_thinking
            own.append(ReasoningBudget(served.tokenizer, *opened, reasoning_budget))
        requests.append(
            Request(
                tokens=prompt.tokens,
                max_tokens=min(settings.max_tokens if max_tokens is None else max_tokens, capacity),
                sampler=sampler,
                processors=own,
                stop=body.stop,
                ending=ending,
                end=end,
                seed=None if seed is None else (seed + number) % _SEEDS,
                top_logprobs=top_logprobs,
                breakpoints=prompt.breakpoints,
                is_answer=is_answer,
            )
        )
    if top_logprobs is not None:
        shown = sum(request.max_tokens for request in requests) * (1 + top_logprobs)
        if shown > MAX_PROBABILITIES:
            raise RequestError(
                f"[request] 'logprobs' must show at most {MAX_PROBABILITIES:,} probabilities in all but "
                f"texts, their tokens and those beside each make {shown:,}. Ask for fewer of these.",
                param="logprobs",
            )
    return requests


def _choice(
    served: ServedModel, body: TextRequest, values: Mapping[str, Any], end: Collection[int]
) -> tuple[Sampler, list[LogitsProcessor]]:
    """How tokens are chosen, by the values of `Sampling.values_for`."""
    line_break = served.tokenizer.encode("\n", add_special_tokens=False)
    chosen = {name: value for name, value in values.items() if name not in PENALTIES}
    if chosen["top_p"] == 0:
        # no other token is within the smallest part
        chosen |= {"temp": 0.0, "top_p": 1.0}
    sampler = make_sampler(**chosen, xtc_special_tokens=[*line_break, *end])
    LogitBias.of(body.logit_bias).check(served.model.vocab_size)
    penalties = {name: values[name] for name in PENALTIES}
    processors = make_processors(**penalties, logit_bias=body.logit_bias)
    return sampler, processors
