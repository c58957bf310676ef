"""`mmfree serve`: serves a model and its adapters over HTTP, as OpenAI and Anthropic do."""

import argparse
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError, install_extra
from .parts import flags, loading
from .parts.command import CommandParser, argument_errors, command
from .parts.prompts import (
    add_end_token_flag,
    add_reasoning_budget_flag,
    add_template_args_flag,
)

if TYPE_CHECKING:
    from ..generation.sessions import Sessions
    from ..hub import Tokenizer
    from ..models import Decoder
    from ..server.settings import ServedModel, Settings


HELP = "serve a model over HTTP, in the form of OpenAI's and Anthropic's interfaces"

_USUAL = (
    "--model --adapter-path --adapter --host --port --api-key --allowed-origins --max-context "
    "--session-dir --max-tokens --temp --seed"
)
KEY_VARIABLE = "MLX_MMFREE_API_KEY"
_MB = 10**6
_DAY_S = 86_400.0


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="mmfree serve", description=__doc__, usual=_USUAL)
    loading.add_model_flags(parser)
    parser.add_argument(
        "--adapter",
        type=named_adapter,
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="folder or Hub repository of a LoRA adapter to serve beside the model, as MODEL:NAME; may "
        "be given again",
    )
    _add_address_flags(parser.add_argument_group("address and access"))
    _add_limit_flags(parser.add_argument_group("limits"))
    _add_session_flags(parser.add_argument_group("sessions"))
    answers = parser.add_argument_group("answers, where a request does not say")
    answers.add_argument(
        "--max-tokens",
        type=flags.positive,
        default=512,
        help="largest number of tokens of an answer (%(default)s)",
    )
    flags.add_sampling_flags(answers, temp=1.0)
    add_template_args_flag(answers)
    add_reasoning_budget_flag(answers)
    add_end_token_flag(answers)
    loading.add_draft_flags(
        parser.add_argument_group("speculative decoding"),
        "while one text without random choice is written alone",
    )
    loading.add_key_value_flags(parser)
    loading.add_memory_flags(parser)
    return parser


def _add_address_flags(group: Any) -> None:
    group.add_argument(
        "--host",
        type=_host,
        default="127.0.0.1",
        help="address to listen at (%(default)s: this machine alone)",
    )
    group.add_argument(
        "--port", type=_port, default=8080, help="port; 0 takes a free one (%(default)s)"
    )
    group.add_argument(
        "--api-key",
        help=f"key that requests must bring; better given in the variable {KEY_VARIABLE}, since others "
        "may see the flags of a process",
    )
    group.add_argument(
        "--allowed-origins",
        type=_words,
        default=(),
        metavar="ORIGIN,…",
        help="origins of other pages that may call the server, or *; default: none",
    )
    group.add_argument(
        "--allowed-hosts",
        type=_words,
        default=(),
        metavar="NAME,…",
        help="further names under which the server may be called, beside addresses and this machine's",
    )


def _add_limit_flags(group: Any) -> None:
    numbers = {
        "decode-concurrency": (32, "number of texts that are written at the same time"),
        "max-waiting": (128, "number of texts that may wait; more are refused with status 429"),
        "max-context": (32_768, "largest number of tokens of a prompt and its answer together"),
        "timeout": (600, "seconds that a request may take"),
        "grace": (20, "seconds that answers may go on once the server is told to end"),
        "prefill-step-size": (512, "number of prompt tokens read between two steps of other texts"),
    }
    for name, (default, text) in numbers.items():
        group.add_argument(
            f"--{name}", type=flags.positive, default=default, help=f"{text} (%(default)s)"
        )
    group.add_argument(
        "--max-body",
        type=flags.size_bytes,
        default=8 * _MB,
        metavar="SIZE",
        help="largest body of a request; all together hold at most eight times as much (8MB)",
    )


def _add_session_flags(group: Any) -> None:
    group.add_argument(
        "--session-memory",
        type=flags.size_bytes,
        default=1000 * _MB,
        metavar="SIZE",
        help="memory in which states of texts are kept, so that no text is read twice; 0 keeps none "
        "(1GB)",
    )

    group.add_argument(
        "--session-dir",
        type=Path,
        metavar="FOLDER",
        help="folder in which states of texts outlive the server; default: they end with it",
    )
    group.add_argument(
        "--session-disk",
        type=flags.size_bytes,
        default=10_000 * _MB,
        metavar="SIZE",
        help="space for them in that folder (10GB)",
    )
    group.add_argument(
        "--kept-responses",
        type=flags.positive,
        default=1000,
        help="number of responses of /v1/responses that are kept to go on from, in that folder if there "
        "is one (%(default)s)",
    )
    group.add_argument(
        "--kept-response-size",
        type=flags.size_bytes,
        default=100 * _MB,
        metavar="SIZE",
        help="memory or space for them (100MB)",
    )
    group.add_argument(
        "--kept-response-days",
        type=flags.positive,
        default=30,
        help="days after which one goes that nobody has used (%(default)s)",
    )
    group.add_argument(
        "--prompt-cache-file",
        type=Path,
        help="file from 'mmfree cache_prompt', which is known from the start",
    )


def _host(text: str) -> str:
    if not text.isprintable():
        raise argparse.ArgumentTypeError(f"must be an address or a name but got {text[:20]!a}")
    return text


def _port(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 0 <= int(text[:6]) <= 65535:
        raise argparse.ArgumentTypeError(
            f"must be a whole number from 0 to 65535 but got {text[:20]!r}"
        )
    return int(text)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    check_serve_packages("serve")
    from ..generation.decode import end_tokens
    from ..generation.prompt_cache import read_settings
    from ..server.run import make_service, serve

    with argument_errors():
        # bad values are refused before the model is loaded
        flags.sampler_from(args, special_tokens=())
    settings = _settings(args)
    if args.prompt_cache_file is not None:
        loading.adopt_key_value_settings(args, read_settings(args.prompt_cache_file)[0])
    with (
        loading.loaded(
            args,
            batch_size=args.decode_concurrency,
            prefill_step_size=args.prefill_step_size,
            context_length=args.max_tokens,
            takes_embedders=True,
        ) as (model, tokenizer),
        opened_sessions(args, model) as sessions,
    ):
        with argument_errors():
            end_tokens(tokenizer, args.extra_eos_token)
            draft = loading.draft_of(args, model, tokenizer)
        models = served_models(args, model, tokenizer, sessions, draft)
        names = ", ".join(served.name for served in models)

        def announce(address: str) -> None:
            print(f"Serving {names} at {address} (Ctrl-C ends it)", flush=True)
            if not tokenizer.has_chat_template:
                print(
                    "The model has no chat template: it is a base model, which continues texts "
                    "(/v1/completions) and answers no messages (/v1/chat/completions).",
                    flush=True,
                )

        service = make_service(models, settings, sessions)
        serve(service, host=args.host, port=args.port, announce=announce)
    return 0


def _settings(args: argparse.Namespace) -> "Settings":
    from ..server.settings import Sampling, Settings

    key = os.environ.get(KEY_VARIABLE) if args.api_key is None else args.api_key
    if key is not None and not key.strip():
        raise UsageError(
            "[serve] 'api_key' must not be empty. Leave it out to serve without a key."
        )
    if key is not None and any(ord(c) < ord(" ") or c == "\x7f" for c in key.strip()):
        raise UsageError(
            "[serve] 'api_key' must hold no control characters, which no header of a request can hold."
        )
    if key is None and not _is_loopback(args.host):
        print(
            f"warning: whoever reaches {args.host} can use the model. --api-key asks for a key.",
            file=sys.stderr,
        )
    return Settings(
        api_key=None if key is None else key.strip(),
        hosts=frozenset({args.host, *args.allowed_hosts}),
        origins=args.allowed_origins,
        max_rows=args.decode_concurrency,
        max_waiting=args.max_waiting,
        max_body_bytes=args.max_body,
        max_context=args.max_context,
        max_tokens=args.max_tokens,
        prefill_step_size=args.prefill_step_size,
        ngram_drafts=args.ngram_drafts,
        num_draft_tokens=args.num_draft_tokens,
        timeout_s=args.timeout,
        grace_s=args.grace,
        sampling=Sampling(temperature=args.temp, seed=args.seed, **flags.filters_from(args)),
        template_variables=args.chat_template_args or {},
        reasoning_budget=args.reasoning_budget,
        extra_end=tuple(args.extra_eos_token),
        response_folder=None if args.session_dir is None else args.session_dir / "responses",
        kept_responses=args.kept_responses,
        kept_response_bytes=args.kept_response_size,
        kept_response_s=args.kept_response_days * _DAY_S,
    )


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def named_adapter(text: str) -> tuple[str, str]:
    """A name and a folder from `NAME=FOLDER`."""
    name, _, folder = text.partition("=")
    if not re.fullmatch(r"[\w.-]{1,64}", name, re.ASCII) or not folder:
        raise argparse.ArgumentTypeError(
            f"must be NAME=FOLDER, with a name of letters, digits, '.', '_' and '-', but got "
            f"{text[:80]!r}"
        )
    return name, folder


def served_models(
    args: argparse.Namespace,
    model: "Decoder",
    tokenizer: "Tokenizer",
    sessions: "Sessions | None",
    draft: "Decoder | None" = None,
) -> "list[ServedModel]":
    """The model and, sharing its weights, the model with each adapter of `--adapter`.

    Args:
        args: The values of the flags.
        model: The model.
        tokenizer: Belongs to it.
        sessions: Those of the model, whose limits hold for all; `None` to keep none.
        draft: Proposes tokens to all of them; `None` for none.

    Raises:
        UsageError: Two adapters have one name, or `--adapter-path` is given too.
        CheckpointError: An adapter does not fit the model.
    """
    from ..hub.adapters.adapter import with_adapter
    from ..hub.adapters.adapter_folder import read_adapter
    from ..server.settings import ServedModel

    names = [name for name, _ in args.adapter]
    if len(set(names)) < len(names):
        raise UsageError(
            f"[serve] 'adapter' must have a name of its own each time but got {', '.join(names)}."
        )
    if names and args.adapter_path is not None:
        raise UsageError(
            "[serve] 'adapter' must come without 'adapter_path', which changes the model itself, but "
            "both are given. Give that folder a name with --adapter too."
        )
    base = _name(args)
    models = [ServedModel(base, model, tokenizer, sessions, draft)]
    for name, folder in args.adapter:
        adapted = with_adapter(model, read_adapter(folder))
        adapted.eval()
        own = None if sessions is None else sessions.for_model(adapted)
        models.append(ServedModel(f"{base}:{name}", adapted, tokenizer, own, draft))
    return models


@contextmanager
def opened_sessions(args: argparse.Namespace, model: "Decoder") -> "Iterator[Sessions | None]":
    """The sessions that the flags ask for, written to the end when the `with` block is left.

    Raises:
        UsageError: No memory is given for what must be kept.
        CheckpointError: The folder or the prompt cache cannot be used.
    """
    from ..generation.sessions import Sessions

    if not args.session_memory:
        for name in ("session_dir", "prompt_cache_file"):
            if getattr(args, name) is not None:
                raise UsageError(
                    f"[serve] '{name}' must come with memory for sessions but --session-memory is 0."
                )
        yield None
        return
    with Sessions(
        model,
        memory_bytes=args.session_memory,
        folder=args.session_dir,
        disk_bytes=args.session_disk,
    ) as sessions:
        if args.prompt_cache_file is not None:
            sessions.preload(args.prompt_cache_file)
        yield sessions


def _name(args: argparse.Namespace) -> str:
    """What requests call the model: its repository, or the last part of a path of this machine."""
    name = loading.model_name(args)
    return Path(name).resolve().name if Path(name).expanduser().exists() else name


_PACKAGES = (
    "httptools",
    "llguidance",
    "prometheus_client",
    "pydantic",
    "starlette",
    "uvicorn",
    "uvloop",
)


def check_serve_packages(command: str) -> None:
    """Checks that the extra `serve` is installed.

    Args:
        command: The command that needs it, as in messages.

    Raises:
        UsageError: A package is missing.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"[{command}] the packages of the extra 'serve' must be installed but {', '.join(missing)} "
            f"cannot be found. {install_extra('serve')}"
        )
