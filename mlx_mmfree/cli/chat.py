"""`mmfree chat`: lets you talk with a model in the terminal."""

import argparse
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from copy import copy
from typing import TYPE_CHECKING

from ..arguments import did_you_mean
from ..errors import MMFreeError, UsageError, shown
from ..files.reading import expanded
from .parts import loading, prompts
from .parts.command import INTERRUPTED, argument_errors, command, with_flags
from .parts.conversation_file import read_conversation, write_conversation
from .parts.flags import add_sampling_flags, processors_from, sampler_from, settle_sampling
from .parts.parser import CommandParser
from .parts.terminal import QUOTES, Interruption, MessageReader, ReadingBar, WordWrap

if TYPE_CHECKING:
    from ..generation import Chat, GenerationResponse
    from ..generation.answers.answer_parts import Part

HELP = "talk with a model in the terminal"

PROMPT = ">> "
COMMANDS = {
    "/reset": "begin a new conversation",
    "/regen": "answer the last message anew",
    "/system TEXT": "begin a new conversation with this system prompt; without TEXT, with none",
    "/save FILE": "write the conversation to FILE, which /load and 'mmfree lora --data' read",
    "/load FILE": "go on with the conversation of FILE",
    "/set NAME VALUE": "change a setting of the answers; /set alone shows all settings",
    "/stats": "show the length of the conversation, its memory and the speed",
    "/help": "show this list",
    "/exit": "leave; Ctrl-D leaves too, and Ctrl-C stops an answer",
}
ALSO_SET = {"temperature": "temp"}
"""Names of settings in OpenAI's interface that differ in more than `_` and `-`."""
ALSO = {"/bye": "/exit", "/quit": "/exit", "/clear": "/reset", "/?": "/help"}
"""Other names of commands, which other programs use."""
SETTINGS = (
    "temp",
    "top-p",
    "min-p",
    "top-k",
    "min-tokens-to-keep",
    "xtc-probability",
    "xtc-threshold",
    "repetition-penalty",
    "repetition-context-size",
    "presence-penalty",
    "frequency-penalty",
    "max-tokens",
    "seed",
)


_DIM, _PLAIN = "\x1b[2m", "\x1b[22m"


# Small models soon repeat themselves without end if they always write the likeliest token.
TEMPERATURE, TOP_P = 0.7, 0.9


def build_parser(prog: str = "mmfree chat", description: str | None = __doc__) -> CommandParser:
    usual = "--model --adapter-path --system-prompt --max-tokens --temp --top-p --seed --no-history"
    parser = CommandParser(prog=prog, description=description, usual=usual)
    loading.add_model_flags(parser)
    talk = parser.add_argument_group("conversation")
    prompts.add_template_flags(talk, can_ignore=False)
    prompts.add_chat_template_flag(talk)
    prompts.add_end_flags(talk, max_tokens=256)
    prompts.add_reasoning_budget_flag(talk)
    prompts.add_prefill_flag(talk)
    talk.add_argument(
        "--no-history", action="store_true", help="do not keep typed lines for later sessions"
    )
    choice = parser.add_argument_group("sampling")
    add_sampling_flags(choice, temp=TEMPERATURE, top_p=TOP_P)
    drafts = parser.add_argument_group("speculative decoding")
    loading.add_ngram_flags(drafts, drafts)
    loading.add_key_value_flags(parser)
    loading.add_memory_flags(parser)
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    return talk(build_parser().parse_args(argv))


def talk(args: argparse.Namespace, prompt: str | None = None) -> int:
    """Opens the chat, or with a prompt prints the answer to it alone. Returns the exit status."""
    import mlx.core as mx

    from ..generation import Chat
    from ..generation.answers.completion import end_tokens

    with argument_errors():
        # bad values are refused before the model is loaded
        sampler_from(args, special_tokens=())
        processors_from(args)
    bar = ReadingBar(args.prefill_step_size, "Reading")
    with (
        bar,
        loading.loaded(args, batch_size=1, prefill_step_size=args.prefill_step_size) as (
            model,
            tokenizer,
        ),
    ):
        with argument_errors():
            end = end_tokens(tokenizer, args.extra_eos_token)
        special = [*tokenizer.encode("\n", add_special_tokens=False), *end]
        thinks = prompts.thinks(prompts.template_variables(args))
        note = settle_sampling(args, model, tokenizer, thinks=thinks)
        chat = Chat(
            model,
            tokenizer,
            system_prompt=args.system_prompt,
            max_tokens=args.max_tokens,
            sampler=sampler_from(args, special),
            processors=processors_from(args),
            extra_eos_tokens=end,
            variables=prompts.template_variables(args),
            prefill_step_size=args.prefill_step_size,
            prompt_progress_callback=bar,
            ngram_drafts=args.ngram_drafts,
            num_draft_tokens=args.num_draft_tokens,
            reasoning_budget=args.reasoning_budget,
        )
        if args.seed is not None:
            mx.random.seed(args.seed)
        terminal = Terminal(chat, args, special)
        if prompt is not None:
            print(*([note] if note else ()), sep="\n", file=sys.stderr, end="\n" if note else "")
            return terminal.answer_alone(prompt)
        _print_wrapped(
            f"You are talking with {args.model or 'the model in the package'}. Type a message and press "
            "Enter. /help shows the commands, and /exit leaves."
        )
        if note:
            _print_wrapped(note)
        if not chat.has_template:
            _print_wrapped(
                "This is a base model, which has no chat template: it was not taught to answer. It "
                "continues what you write."
            )
        terminal.run()
    return 0


class Terminal:
    """Reads messages, runs commands and shows answers until the input ends.

    Args:
        chat: The conversation.
        args: The values of the flags, which `/set` changes.
        special_tokens: The token ids that XTC never drops.
    """

    def __init__(self, chat: "Chat", args: argparse.Namespace, special_tokens: Sequence[int]):
        self._chat = chat
        self._args = args
        self._special_tokens = special_tokens
        self._last: GenerationResponse | None = None
        self._is_in_reasoning = False

    def run(self) -> None:
        read = MessageReader(PROMPT, keeps_history=not self._args.no_history)
        while True:
            try:
                text = read()
                is_command = text.startswith("/") and not read.is_quoted
                if is_command:
                    text = ALSO.get(text, text)
                if is_command and text == "/exit":
                    return
                if is_command:
                    self._run_command(text)
                elif text:
                    self._answer(text)
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print("\n(/exit or Ctrl-D leaves the chat)")

    def answer_alone(self, text: str) -> int:
        """Prints the answer to one message, a note on stderr if it was cut, and returns the status."""
        with Interruption() as interruption, closing(self._chat.answer(text)) as responses:
            note = self._show(responses, interruption)
        print(flush=True)
        if note:
            print(f"[{note}]", file=sys.stderr)
        return INTERRUPTED if interruption.is_noted else 0

    def _run_command(self, line: str) -> None:
        name, *words = line.split()
        if line == "/reset":
            self._chat.reset()
            self._last = None
            print("A new conversation begins.")
        elif line == "/regen":
            self._regenerate()
        elif name == "/system":
            self._begin_with(line.removeprefix(name).strip())
        elif name in ("/save", "/load"):
            self._save_or_load(name, line.removeprefix(name).strip())
        elif name == "/set":
            self._set(words)
        elif line == "/stats":
            self._show_statistics()
        elif line == "/help":
            print("\n".join(f"  {name:17}{text}" for name, text in COMMANDS.items()))
            print(
                f"  {QUOTES:17}stands before and after a message of several lines, or one that begins "
                "with /"
            )
        else:
            known = [each.split()[0] for each in COMMANDS]
            _print_wrapped(
                f"There is no command {name!r:.40}.{did_you_mean(name, known)} The commands are "
                f"{', '.join(known)}. To send a message that begins with /, write {QUOTES} before and "
                "after it."
            )

    def _regenerate(self) -> None:
        text = self._chat.take_back()
        if text is None:
            print("There is no message to answer yet.")
        else:
            self._answer(text)

    def _begin_with(self, prompt: str) -> None:
        if prompt and not self._chat.has_template:
            _print_wrapped(
                "error: [chat] /system must come with a chat model but this base model has no chat "
                "template. Write the instruction into the text."
            )
            return
        self._chat.system_prompt = prompt or None
        self._last = None
        print("A new conversation begins.")

    def _save_or_load(self, name: str, file: str) -> None:
        if not file:
            print(f"Write {name} FILE.")
            return
        path = expanded(file)
        try:
            if name == "/load":
                self._chat.messages = read_conversation(path)
                self._last = None
                print(f"The conversation of '{path}' goes on.")
                return
            if path.exists() and not self._is_agreed(f"'{path}' exists. Replace it? (y/N) "):
                print("Nothing was written.")
                return
            write_conversation(path, self._chat.messages)
        except (MMFreeError, OSError, ValueError) as error:
            _print_wrapped(f"error: {' '.join(str(error).split())}")
            return
        print(f"Wrote '{path}'.")

    def _is_agreed(self, question: str) -> bool:
        """Asks at a terminal; elsewhere nobody can agree."""
        return sys.stdin.isatty() and input(question).strip().lower() in ("y", "yes")

    def _set(self, words: Sequence[str]) -> None:
        import mlx.core as mx

        if words:
            first = words[0].replace("_", "-")
            words = [ALSO_SET.get(first, first), *words[1:]]
        if len(words) != 2 or words[0] not in SETTINGS:
            values = (f"{name} {getattr(self._args, _field(name))}" for name in SETTINGS)
            known = f"The settings are: {', '.join(values)}."
            if words and words[0] not in SETTINGS:
                meant = did_you_mean(words[0], SETTINGS)
                known = f"There is no setting {words[0]!r:.40}.{meant} {known}"
            _print_wrapped(f"Write /set NAME VALUE. {known}" if words else known)
            return
        name, value = words
        parser, given = build_parser(), [f"--{name}={value}"]
        try:
            args = parser.parse_args(given, copy(self._args))
            with argument_errors():
                sampler = sampler_from(args, self._special_tokens)
                processors = processors_from(args)
        except UsageError as error:
            words = with_flags(str(error), parser, given).partition(" See 'mmfree")[0]
            words = re.sub(rf"--{name}(/-\w)?", name, words.removeprefix("argument "))
            _print_wrapped(f"error: {words}")
            return
        if name == "seed":
            mx.random.seed(args.seed)
        self._args = args
        self._chat.sampler, self._chat.max_tokens = sampler, args.max_tokens
        self._chat.processors = processors
        print(f"{name} is now {getattr(args, _field(name))}.")

    def _answer(self, text: str) -> None:
        before = self._last
        try:
            with Interruption() as interruption, closing(self._chat.answer(text)) as responses:
                note = self._show(responses, interruption)
            if not note and not self._chat.has_template:
                note = "end of the text; your next line begins a new one"
        except KeyboardInterrupt:
            note = "stopped"
        except MMFreeError as error:
            _print_wrapped(f"error: {' '.join(str(error).split())}")
            return
        if sys.stdout.isatty() and (last := self._last) is not None and last is not before:
            speed = _speed(last.generation_tokens, "", last.generation_tps)
            print()
            _print_wrapped(f"[{speed}; {note}]" if note else f"[{speed}]")
        else:
            print(f" [{note}]" if note else "")

    def _show(self, responses: "Iterator[GenerationResponse]", interruption: Interruption) -> str:
        """Prints an answer as it comes and returns a note on how it was cut, if it was."""
        wrap = WordWrap(shutil.get_terminal_size().columns) if sys.stdout.isatty() else None
        self._is_in_reasoning = False
        note = ""
        for response in responses:
            interruption.has_tokens = True
            self._last = response
            parts = self._chat.reader.add(response.text)
            if response.finish_reason is not None:
                parts += self._chat.reader.finalize()
            for part in parts:
                self._print_part(part, wrap)
            if response.finish_reason == "length":
                note = f"stopped at the limit of {self._chat.max_tokens} tokens"
            elif interruption.is_noted and response.finish_reason is None:
                note = "stopped"
                break
        if wrap is not None:
            print(wrap.finish(), end="")
        return note

    def _print_part(self, part: "Part", wrap: WordWrap | None) -> None:
        """Prints a chunk of an answer, dimmed where it is reasoning."""
        from ..generation.answers.answer_parts import TextDelta, ThinkingDelta

        if not isinstance(part, TextDelta | ThinkingDelta):
            return
        is_reasoning = isinstance(part, ThinkingDelta)
        text = part.text
        if self._is_in_reasoning and not is_reasoning:
            text = f"\n\n{text}"
        self._is_in_reasoning = is_reasoning
        if wrap is not None:
            text = wrap.add(shown(text))
            text = f"{_DIM}{text}{_PLAIN}" if is_reasoning else text
        print(text, end="", flush=True)

    def _show_statistics(self) -> None:
        chat, last = self._chat, self._last
        print(f"Conversation: {chat.size} tokens, answers: {chat.turns}")
        print(f"Memory of the conversation: {chat.state_bytes / 1e6:.3f} MB")
        if last is None:
            return
        print(f"Last question: {_speed(last.prompt_tokens, ' read', last.prompt_tps)}")
        print(f"Last answer: {_speed(last.generation_tokens, '', last.generation_tps)}")
        print(f"Peak memory: {last.peak_memory:.3f} GB")


def _print_wrapped(line: str) -> None:
    """Prints a line. A terminal shows it broken between words."""
    if sys.stdout.isatty():
        wrap = WordWrap(shutil.get_terminal_size().columns)
        line = wrap.add(line) + wrap.finish()
    print(line)


def _speed(count: int, done: str, rate: float) -> str:
    """A number of tokens with its speed, which a single generated token does not have."""
    text = f"{count} {'token' if count == 1 else 'tokens'}{done}"
    return f"{text}, {rate:.1f} a second" if rate else text


def _field(name: str) -> str:
    return name.replace("-", "_")
