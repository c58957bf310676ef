"""`mmfree chat`: talks with a model in the terminal."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from ..errors import MMFreeError
from .console import CommandParser, argument_errors, command
from .flags import json_object, positive
from .loading import add_key_value_flags, add_memory_flags, add_model_flags, loaded
from .parts.interruption import Interruption
from .sampling import add_sampling_flags, sampler_from

if TYPE_CHECKING:
    from ..generation import Chat, GenerationResponse

HELP = "talk with a model in the terminal"

PROMPT = ">> "
# A model's text must not steer the terminal.
_CONTROLS = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)], "\N{REPLACEMENT CHARACTER}")
_SHOWN = {code: sign for code, sign in _CONTROLS.items() if chr(code) not in "\n\t"}
COMMANDS = {
    "/reset": "forget the conversation",
    "/stats": "sizes and speeds",
    "/help": "this list",
    "/exit": "end the chat, as Ctrl-D does; Ctrl-C ends an answer",
}


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="mmfree chat", description=__doc__, allow_abbrev=False)
    add_model_flags(parser)
    talk = parser.add_argument_group("conversation")
    talk.add_argument("--system-prompt", help="what a chat model is told first")
    talk.add_argument(
        "--max-tokens",
        "-m",
        type=positive,
        default=256,
        help="tokens of an answer at most (%(default)s)",
    )
    talk.add_argument(
        "--extra-eos-token",
        nargs="+",
        default=[],
        metavar="TOKEN",
        help="tokens or ids that end an answer beside the tokenizer's own",
    )
    talk.add_argument(
        "--chat-template-config",
        type=json_object,
        help="JSON object with further names for the chat template",
    )
    talk.add_argument(
        "--prefill-step-size",
        type=positive,
        default=2048,
        help="positions of a question read at a time (%(default)s)",
    )
    add_sampling_flags(parser.add_argument_group("choice of tokens"), seed=0)
    add_key_value_flags(parser)
    add_memory_flags(parser)
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    import mlx.core as mx

    from ..generation import Chat
    from ..generation.stop import end_tokens

    with argument_errors():
        # Refuses bad values before the model is loaded.
        sampler_from(args, special_tokens=())
    with loaded(args, batch_size=1, prefill_step_size=args.prefill_step_size) as (model, tokenizer):
        with argument_errors():
            end = end_tokens(tokenizer, args.extra_eos_token)
        line_break = tokenizer.encode("\n", add_special_tokens=False)
        chat = Chat(
            model,
            tokenizer,
            system_prompt=args.system_prompt,
            max_tokens=args.max_tokens,
            sampler=sampler_from(args, special_tokens=[*line_break, *end]),
            extra_eos_tokens=end,
            variables=args.chat_template_config,
            prefill_step_size=args.prefill_step_size,
        )
        mx.random.seed(args.seed)
        print(f"Chat with {args.model or 'the model in the package'}. /help lists the commands.")
        if not chat.has_template:
            print(
                "It has no chat template: it is a base model, which was not taught to answer and "
                "continues your text."
            )
        Terminal(chat).run()
    return 0


class Terminal:
    """Reads lines, runs commands and shows answers until the input ends.

    Args:
        chat: The conversation.
    """

    def __init__(self, chat: "Chat"):
        self._chat = chat
        self._last: GenerationResponse | None = None

    def run(self) -> None:
        with suppress(ImportError):
            # gives `input` its line editing and history
            import readline  # noqa: F401
        prompt = PROMPT if sys.stdin.isatty() else ""
        line = ""
        while line != "/exit":
            try:
                line = input(prompt).strip()
                self._take(line)
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print("\n(/exit or Ctrl-D ends the chat)")

    def _take(self, line: str) -> None:
        if line == "/reset":
            self._chat.reset()
            self._last = None
            print("The conversation is forgotten.")
        elif line == "/stats":
            self._show_statistics()
        elif line == "/help":
            print("\n".join(f"  {name:8}{text}" for name, text in COMMANDS.items()))
        elif line.startswith("/") and line != "/exit":
            print(f"The command must be one of {', '.join(COMMANDS)}.")
        elif line and line != "/exit":
            self._answer(line)

    def _answer(self, text: str) -> None:
        try:
            with Interruption() as interruption, closing(self._chat.answer(text)) as responses:
                note = self._show(responses, interruption)
        except KeyboardInterrupt:
            note = " [stopped]"
        except MMFreeError as error:
            note = f"error: {' '.join(str(error).split())}"
        print(note)

    def _show(self, responses: "Iterator[GenerationResponse]", interruption: Interruption) -> str:
        """Prints an answer as it comes and returns what there is to say about its end."""
        for response in responses:
            interruption.tokens_come = True
            self._last = response
            print(response.text.translate(_SHOWN), end="", flush=True)
            if response.finish_reason == "length":
                return " [--max-tokens]"
            if interruption.is_noted and response.finish_reason is None:
                return " [stopped]"
        if self._chat.has_template:
            return ""
        return " [end of the text; the next line begins a new one]"

    def _show_statistics(self) -> None:
        chat, last = self._chat, self._last
        print(f"Conversation: {chat.size} tokens, answers: {chat.turns}")
        print(f"State: {chat.state_bytes / 1e6:.3f} MB")
        if last is None:
            return
        print(f"Last question: {last.prompt_tokens} tokens read, {last.prompt_tps:.1f} a second")
        print(f"Last answer: {last.generation_tokens} tokens, {last.generation_tps:.1f} a second")
        print(f"Peak memory: {last.peak_memory:.3f} GB")
