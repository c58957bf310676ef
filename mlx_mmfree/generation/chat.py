"""A conversation in which each turn reads only what the model has not read yet."""

from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from mlx.utils import tree_reduce

from ..arguments import check_model, check_tokenizer, checks_names
from ..errors import UsageError
from ..models import Decoder
from ..models.parts.token_checks import token_array
from . import decode
from .answers.answer_parts import PartReader, TextReader
from .answers.completion import Completion, end_tokens
from .answers.reasoning import ReasoningBudget, ReasoningReader, ReasoningTags, reasoning_tags
from .prompts import check_text_length
from .reader import PREFILL_STEP_SIZE, Progress, State
from .sampling import LogitsProcessor, Sampler, greedy
from .speculative import NUM_DRAFT_TOKENS, NgramDecoding, RepeatedText
from .wired_memory import while_wired


@dataclass(frozen=True)
class _Breakpoint:
    """A position in the conversation that the model can go on from.

    Attributes:
        text: The conversation up to here.
        state: What the model has read of it.
        unread: The last tokens up to here, which are not in the state yet.
        size: Number of tokens up to here.
    """

    text: str
    state: State
    unread: tuple[int, ...]
    size: int


class Chat:
    """A conversation with a model.

    The state after a turn is cached, so the next turn reads only what it adds. A chat template may
    write earlier turns differently once they lie back; then reading starts from the last position up
    to which nothing changed: the end of the previous question, or the start.

    Without a chat template the model continues one text: each turn adds to it, and the turn after
    an end of the text begins a new one.

    Args:
        model: Gives the logits.
        tokenizer: Belongs to the model.
        system_prompt: The system message before the conversation; needs a chat template.
        max_tokens: How many tokens an answer has at most.
        sampler: Chooses tokens from logits.
        processors: Change the logits before, such as penalties. They know the tokens of one turn.
        extra_eos_tokens: Ids or texts of tokens that end an answer beside the tokenizer's own.
        variables: Further names for the chat template.
        state: The state of an empty text; `None` is the model's own.
        prefill_step_size: Positions read at a time.
        prompt_progress_callback: Takes how many tokens of a question are read, and how many there are.
        ngram_drafts: Propose what followed the same tokens earlier in the conversation, which changes
            the speed alone.
        num_draft_tokens: How many tokens are proposed at a time.
        reasoning_budget: The most tokens of reasoning; `None`: no limit but the answer's.

    Attributes:
        max_tokens, sampler, processors: As above; they may be changed between answers.
        turns: Number of answers so far.
        reader: Tells the reasoning of the answer that was begun last from its text.

    Raises:
        TypeError: An argument is misspelt, or the model or the tokenizer is none.
        UsageError: A system prompt is given but there is no chat template.

    Example:
        >>> from mlx_mmfree import demo, load
        >>> model, tokenizer = load(demo.path())
        >>> chat = Chat(model, tokenizer, max_tokens=4)
        >>> "".join(response.text for response in chat.answer("Once upon a time"))
        ', there was a'
        >>> [message["role"] for message in chat.messages]
        ['user', 'assistant']
    """

    @checks_names
    def __init__(
        self,
        model: Decoder,
        tokenizer: Any,
        *,
        system_prompt: str | None = None,
        max_tokens: int = 256,
        sampler: Sampler = greedy,
        processors: Sequence[LogitsProcessor] = (),
        extra_eos_tokens: Collection[int | str] = (),
        variables: Mapping[str, Any] | None = None,
        state: State = None,
        prefill_step_size: int = PREFILL_STEP_SIZE,
        prompt_progress_callback: Progress | None = None,
        ngram_drafts: bool = False,
        num_draft_tokens: int = NUM_DRAFT_TOKENS,
        reasoning_budget: int | None = None,
    ):
        check_model("Chat", model, tokenizer)
        check_tokenizer("Chat", tokenizer)
        decode.check_max_tokens(max_tokens)
        self.has_template: bool = tokenizer.has_chat_template
        self._model = model
        self._tokenizer = tokenizer
        self._first: list[dict[str, str]] = []
        self.max_tokens = max_tokens
        self.sampler = sampler
        self.processors = processors
        self._end = end_tokens(tokenizer, extra_eos_tokens)
        self._variables = dict(variables or {})
        self._start = _Breakpoint("", model.init_state(1) if state is None else state, (), 0)
        self._prefill_step_size = prefill_step_size
        self._progress = prompt_progress_callback
        self._ngram_drafts = ngram_drafts
        self._num_draft_tokens = num_draft_tokens
        self._reasoning_budget = reasoning_budget
        self._reasoning: ReasoningTags | None = None
        if self.has_template:
            self._reasoning = reasoning_tags(tokenizer.chat_template_source())
        self.reader: PartReader = TextReader()
        self.system_prompt = system_prompt

    def reset(self) -> None:
        """Forgets the conversation, all but the system prompt."""
        self.messages = list(self._first)

    @property
    def system_prompt(self) -> str | None:
        """The system message. Another one begins a new conversation.

        Raises:
            UsageError: There is no chat template.
        """
        return self._first[0]["content"] if self._first else None

    @system_prompt.setter
    def system_prompt(self, text: str | None) -> None:
        if text is not None and not self.has_template:
            raise _without_template()
        self._first = [] if text is None else [_message("system", text)]
        self.reset()

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation so far, each with `role` and `content`.

        Others go on from there: the next turn reads them. Without a chat template they make one text.

        Raises:
            UsageError: A system prompt is among them but there is no chat template.
        """
        return self._messages

    @messages.setter
    def messages(self, messages: Sequence[Mapping[str, str]]) -> None:
        start = self._start
        if messages and not self.has_template:
            start = self._after_text(messages)
        self._messages = [dict(message) for message in messages]
        self.turns = sum(message["role"] == "assistant" for message in messages)
        self._breakpoints = [start]
        self._repeated = RepeatedText()

    def take_back(self) -> str | None:
        """Takes the last question and its answer back, and returns the question; `None` without one."""
        asked = [n for n, message in enumerate(self._messages) if message["role"] == "user"]
        if not asked:
            return None
        text = self._messages[asked[-1]]["content"]
        self.messages = self._messages[: asked[-1]]
        return text

    @property
    def size(self) -> int:
        """Number of tokens of the conversation so far."""
        return self._breakpoints[-1].size

    @property
    def state_bytes(self) -> int:
        """Size of the state that the next turn starts from."""
        state = self._breakpoints[-1].state
        return int(tree_reduce(lambda total, array: total + array.nbytes, state, 0))

    def answer(self, text: str) -> Generator[decode.GenerationResponse, None, None]:
        """Takes the user's next words and yields the answer as it is written.

        An iterator that is closed early ends the answer there, and the conversation goes on from
        what was shown. `prompt_tokens` of a response counts the tokens read in this turn.

        Raises:
            UsageError: The chat template refuses the conversation.
            ValueError: The text is empty or no Unicode text.
        """
        if not text:
            raise ValueError("[chat] 'text' must not be empty.")
        # the turns of a text that has ended are no part of the next one
        is_new = not self.has_template and self._breakpoints[-1] is self._start
        messages = [*([] if is_new else self.messages), _message("user", text)]
        whole, start_point, ids = self._prompt(messages, text)
        # the other breakpoints are released before reading takes memory
        self._breakpoints = [start_point]
        start = perf_counter()
        max_tokens = self.max_tokens
        decoding = self._decoding(
            ids, start_point.state, [*self.processors, *self._thinking(whole)]
        )
        size = start_point.size - len(start_point.unread) + len(ids)
        asked = _Breakpoint(
            whole, decoding.state, tuple(ids[-1:]) if self._ngram_drafts else (), size
        )
        del start_point
        after = () if self.has_template else ids
        completion = Completion(self._tokenizer, (), self._end, max_tokens, after)
        # its state is not known while a step runs
        idle: decode.Decoding | NgramDecoding | None = None
        try:
            steps = decode.responses(decoding, completion, len(ids), start)
            # an answer that is left restores the limit at once
            with closing(while_wired(steps, self._model)) as steps:
                for response in steps:
                    self._breakpoints = [asked]
                    idle = decoding
                    yield response
                    idle = None
            idle = decoding
        finally:
            if completion.tokens:
                self._messages = [*messages, _message("assistant", completion.text)]
                self.turns += 1
                # nor what a text would be without the tokens that are ready
                is_ahead = isinstance(idle, NgramDecoding) and idle.num_ready > 0
                state = None if idle is None or is_ahead else idle.state
                self._breakpoints = self._breakpoints_after(
                    asked, ids[-1], completion.tokens, state, max_tokens
                )

    def _thinking(self, prompt: str) -> list[LogitsProcessor]:
        """Begins to read an answer with reasoning; what ends that."""
        self.reader = TextReader()
        if self._reasoning is None:
            return []
        is_open = self._reasoning.are_open(prompt)
        self.reader = ReasoningReader(self.reader, self._reasoning, is_open)
        if self._reasoning_budget is None:
            return []
        return [ReasoningBudget(self._tokenizer, self._reasoning, is_open, self._reasoning_budget)]

    def _decoding(
        self, ids: Sequence[int], state: State, processors: Sequence[LogitsProcessor]
    ) -> decode.Decoding | NgramDecoding:
        """The iterator that answers a question of these ids."""
        options: dict[str, Any] = {
            "state": state,
            "sampler": self.sampler,
            "processors": processors,
            "known": self._tokenizer.vocab_size,
            "prefill_step_size": self._prefill_step_size,
            "progress": self._progress,
        }
        tokens = token_array(ids, self._model.vocab_size)
        if not self._ngram_drafts:
            return decode.Decoding(self._model, tokens, **options)
        self._repeated.add(ids)
        return NgramDecoding(
            self._model,
            tokens,
            self._repeated,
            num_draft_tokens=self._num_draft_tokens,
            max_tokens=self.max_tokens,
            end=self._end,
            **options,
        )

    def _prompt(
        self, messages: list[dict[str, str]], text: str
    ) -> tuple[str, _Breakpoint, Sequence[int]]:
        """The conversation with its next question, the breakpoint to start from and the ids after it."""
        if not self.has_template:
            start_point = self._breakpoints[-1]
            check_text_length(self._tokenizer, start_point.text + text, self._model.max_length)
            if start_point is self._start:
                return text, start_point, self._tokenizer.encode(text)
            text = _spaced(start_point.text, text)
            more = self._tokenizer.encode_continuation(text)
            return start_point.text + text, start_point, [*start_point.unread, *more]
        chat = self._tokenizer.render_chat(messages, **self._variables)
        check_text_length(self._tokenizer, chat.text, self._model.max_length)
        for start_point in reversed(self._breakpoints):
            if start_point is not self._start and chat.text.startswith(start_point.text):
                more = chat.ids_after(len(start_point.text))
                return chat.text, start_point, [*start_point.unread, *more]
        return chat.text, self._start, chat.ids()

    def _after_text(self, messages: Sequence[Mapping[str, str]]) -> _Breakpoint:
        """The breakpoint after the text of messages, for a model without a chat template."""
        text = ""
        for message in messages:
            if message["role"] == "system":
                raise _without_template()
            content = message["content"]
            text += _spaced(text, content) if message["role"] == "user" and text else content
        ids = tuple(self._tokenizer.encode(text))
        return _Breakpoint(text, self._start.state, ids, len(ids))

    def _breakpoints_after(
        self,
        asked: _Breakpoint,
        last_read: int,
        tokens: Sequence[int],
        state: State,
        max_tokens: int,
    ) -> list[_Breakpoint]:
        """The breakpoints that the next turn may start from, after an answer of these tokens."""
        if not self.has_template and tokens[-1] in self._end:
            return [self._start]
        detokenizer = self._tokenizer.detokenizer()
        # an answer's first token is not the start of the text
        detokenizer.add(last_read)
        text = asked.text + "".join(map(detokenizer.add, tokens)) + detokenizer.finalize()
        if state is None:
            state, unread = asked.state, (*asked.unread, *tokens)
        else:
            # the last token that is allowed is never read, and with drafts no last one
            unread = tuple(tokens[-1 if self._ngram_drafts else max_tokens - 1 :])
        answered = _Breakpoint(text, state, unread, asked.size + len(tokens))
        return [asked, answered] if self.has_template else [answered]


def _without_template() -> UsageError:
    return UsageError(
        "[chat] 'system_prompt' must be left out where the model has no chat template. Write it into "
        "the text."
    )


def _spaced(before: str, text: str) -> str:
    """Text typed after another, with a space between their words."""
    return text if before[-1:].isspace() or text[:1].isspace() else f" {text}"


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
