"""`mmfree serve`: serves a model and its adapters over HTTP, as OpenAI and Anthropic do."""

import argparse
import importlib.util
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import EffortError, MMFreeError, UsageError, install_extra
from .parts import flags, loading, prompts
from .parts.command import argument_errors, command
from .parts.parser import CommandParser

if TYPE_CHECKING:
    from ..generation.sessions import Sessions
    from ..hub import Tokenizer
    from ..models import Decoder
    from ..server.engine.weights import Weights
    from ..server.settings import ServedModel, Settings


HELP = "serve a model over HTTP, for clients of OpenAI and Anthropic"

_USUAL = (
    "--model --adapter-path --adapter --host --port --api-key --allowed-origins --max-context "
    "--session-dir --max-tokens --temp --seed"
)
KEY_VARIABLE = "MLX_MMFREE_API_KEY"
_MB = 10**6
_DAY_S = 86_400.0


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="mmfree serve", description=__doc__, usual=_USUAL)
    loading.add_model_flags(parser, action="append")
    parser.add_argument(
        "--adapter",
        type=named_adapter,
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="folder or Hub repository of a LoRA adapter to serve beside the model, as MODEL:NAME; may "
        "be given again; beside several models: MODEL:NAME=FOLDER",
    )
    parser.add_argument(
        "--served-model-name",
        type=_model_name,
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="names of the model in requests, in place of its folder's; the first is listed; beside "
        "several models: MODEL=NAME",
    )
    _add_address_flags(parser.add_argument_group("address and access"))
    _add_limit_flags(parser.add_argument_group("limits"))
    _add_session_flags(parser.add_argument_group("sessions"))
    answers = parser.add_argument_group("answers, where a request does not say")
    answers.add_argument(
        "--max-tokens",
        type=flags.positive,
        default=4096,
        help="write at most this many tokens in an answer (%(default)s), and no more than the context "
        "has space for",
    )
    flags.add_sampling_flags(answers, temp=1.0)
    prompts.add_chat_template_flag(answers)
    prompts.add_template_args_flag(answers)
    prompts.add_reasoning_budget_flag(answers)
    prompts.add_end_token_flag(answers)
    loading.add_draft_flags(
        parser.add_argument_group("speculative decoding"),
        "while one text without random choice is written alone; beside several models: MODEL=FOLDER",
        action="append",
    )
    loading.add_key_value_flags(parser)
    loading.add_memory_flags(parser)
    return parser


def _add_address_flags(group: Any) -> None:
    group.add_argument(
        "--host",
        type=_host,
        default="127.0.0.1",
        help="address to listen on (%(default)s: this machine alone)",
    )
    group.add_argument(
        "--port", type=_port, default=8080, help="port; 0 takes a free one (%(default)s)"
    )
    group.add_argument(
        "--api-key",
        help=f"key that clients must send; better given in the variable {KEY_VARIABLE}, since others "
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
        "grace": (20, "seconds that answers may go on once the server was asked to end"),
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
        help="folder in which states of texts are kept after the server ends; default: none",
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
        help="number of responses of /v1/responses that are kept for conversations, in that folder if "
        "there is one (%(default)s)",
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
        help="days after which an unused one is deleted (%(default)s)",
    )
    group.add_argument(
        "--prompt-cache-file",
        type=Path,
        help="file from 'mmfree cache_prompt', whose prompt is cached from the start",
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


def _model_name(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise argparse.ArgumentTypeError(
            f"must be a name of printable characters but got {text!a:.40}"
        )
    return text


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    check_serve_packages("serve")
    from ..server.run import make_service, serve

    with argument_errors():
        # bad values are refused before the model is loaded
        flags.sampler_from(args, special_tokens=())
        flags.processors_from(args)
    settings = _settings(args)
    each = flags_of_models(args)
    with _one(each[0]) if len(each) == 1 else _several(each) as (models, sessions, budget, note):
        names = ", ".join(served.name for weights in models for served in weights.models)

        def announce(address: str) -> None:
            print(f"Serving {names} at {address} (Ctrl-C ends it)", flush=True)
            print(note, end="", flush=True)

        service = make_service(models, settings, sessions, budget)
        serve(service, host=args.host, port=args.port, announce=announce)
    return 0


_BASE_MODEL = """\
The model has no chat template: it is a base model, which continues texts (/v1/completions) and answers \
no messages (/v1/chat/completions).
"""
_ON_DEMAND = """\
Each model is loaded when a request names it. Those used longest ago leave where memory is short.
"""
Offer = tuple["list[Weights]", "Sessions | None", int | None, str]
"""Models, sessions of all, what the models may need of memory together, a note for who started it."""


def flags_of_models(args: argparse.Namespace) -> list[argparse.Namespace]:
    """The flags of each model: those for all, and its own of `--adapter` and `--draft-model`.

    Raises:
        UsageError: A flag fits one model alone, names none of those served, or two have one name.
    """
    folders = args.model or [None]
    drafts = args.draft_model or [None]
    if len(folders) == 1:
        alone = argparse.Namespace(**vars(args) | {"model": folders[0], "draft_model": drafts[-1]})
        known = {_name(alone): alone}
        _refuse(_owners(args.adapter) - {"", *known}, known)
        alone.adapter = [(name.rpartition(":")[2], folder) for name, folder in args.adapter]
        owner = f"{_name(alone)}="
        alone.served_model_name = [name.removeprefix(owner) for name in args.served_model_name]
        _check_names([alone])
        return [alone]
    # what belongs to one model names it
    for name in ("adapter_path", "revision", "prompt_cache_file"):
        if getattr(args, name) is not None:
            raise UsageError(
                f"[serve] '{name}' must come with one 'model' but came with {len(folders)}. Leave it "
                "out, or start a server for that model alone."
            )
    each = [argparse.Namespace(**vars(args) | {"model": folder}) for folder in folders]
    by_name = {_name(own): own for own in each}
    if len(by_name) < len(each):
        raise UsageError(
            f"[serve] 'model' must have a name of its own each time but got "
            f"{', '.join(map(_name, each))}. Rename a folder."
        )
    pairs = [draft.partition("=")[::2] for draft in args.draft_model or ()]
    unknown = (_owners(args.adapter) | {name for name, _ in pairs}) - by_name.keys()
    _refuse(unknown | {name for name, folder in pairs if not folder}, by_name)
    named = [_owned_name(name, by_name) for name in args.served_model_name]
    for name, own in by_name.items():
        own.served_model_name = [served for owner, served in named if owner == name]
        own.adapter = [
            (adapter.rpartition(":")[2], folder)
            for adapter, folder in args.adapter
            if adapter.rpartition(":")[0] == name
        ]
        own.draft_model = dict(pairs).get(name)
    _check_names(each)
    return each


def _check_names(each: Sequence[argparse.Namespace]) -> None:
    """Refuses models of which two have one name."""
    served = [name for own in each for names in _names(own) for name in names]
    if len({*served}) < len(served):
        raise UsageError(
            "[serve] 'model' and 'adapter' must have a name of their own each time but got "
            f"{', '.join(served)}. Rename an adapter or a folder."
        )


def _owned_name(text: str, known: Collection[str]) -> tuple[str, str]:
    """The model and the name in `MODEL=NAME`."""
    owner = next((name for name in known if text.startswith(f"{name}=")), None)
    name = "" if owner is None else text.removeprefix(f"{owner}=")
    if owner is None or not name:
        raise UsageError(
            f"[serve] 'served_model_name' must be MODEL=NAME with one of the models {', '.join(known)} "
            f"but got {text!r:.80}."
        )
    return owner, name


def _owners(adapters: Sequence[tuple[str, str]]) -> set[str]:
    return {name.rpartition(":")[0] for name, _ in adapters}


def _refuse(wrong: Collection[str], known: Collection[str]) -> None:
    """Refuses names in `--adapter` and `--draft-model` that no model with a folder has."""
    if wrong:
        one = next(iter(known))
        raise UsageError(
            "[serve] 'adapter' and 'draft_model' must name a model that is served, as in "
            f"{one}:NAME=FOLDER and {one}=FOLDER, but one of them has {min(wrong)!r:.80}."
        )


@contextmanager
def _one(args: argparse.Namespace) -> Iterator[Offer]:
    """One model, which is loaded now."""
    from ..generation.answers.completion import end_tokens
    from ..generation.prompt_cache import read_settings
    from ..server.engine.weights import Weights

    if args.prompt_cache_file is not None:
        loading.adopt_key_value_settings(args, read_settings(args.prompt_cache_file)[0])
    with (
        loading.loaded(args, **_sizes(args), also=["feature-extraction"]) as (model, tokenizer),
        opened_sessions(args, model) as sessions,
    ):
        with argument_errors():
            end_tokens(tokenizer, args.extra_eos_token)
            draft = loading.draft_of(args, model, tokenizer)
        weights = Weights(served_models(args, model, tokenizer, sessions, draft))
        note = "" if tokenizer.has_chat_template else _BASE_MODEL
        yield [weights], sessions, None, note + _sampling_note(args, weights.models[0])


@contextmanager
def _several(each: Sequence[argparse.Namespace]) -> Iterator[Offer]:
    """Several models, of which each is loaded when it is asked for."""
    from ..generation.memory import memory_offer
    from ..platform.allocator import keep_freed_memory
    from ..platform.device import device_info

    args = each[0]
    # measured once: what a model has left is kept for the next one, and so never free again
    _, budget = memory_offer(device_info())
    if args.memory_limit is not None:
        budget = min(budget, args.memory_limit)
    with opened_sessions(args, None) as sessions:
        weights = [_weights(own, sessions) for own in each]
        nbytes = sum(one.need.weights_bytes for one in weights if one.need is not None)
        with loading.limited_memory(args, min(nbytes, budget)):
            keep_freed_memory()
            notes = (
                _sampling_note(own, one.models[0]) for own, one in zip(each, weights, strict=True)
            )
            yield weights, sessions, budget, _ON_DEMAND + "".join(notes)


def _sampling_note(args: argparse.Namespace, served: "ServedModel") -> str:
    """A line that says how texts are sampled where neither a request nor a flag does.

    Raises:
        CheckpointError: The model's files say it wrongly.
        EffortError: The chat template refuses `--reasoning-effort`.
    """
    variables = prompts.template_variables(args)
    _check_effort(variables, served.tokenizer)
    thinks = prompts.thinks(variables)
    line = served.suggested(thinks).line(flags.given_sampling(args))
    return f"{served.name}: {line}\n" if line else ""


def _check_effort(variables: Mapping[str, Any], tokenizer: Any) -> None:
    """Refuses an effort of thinking for which every request would be refused."""
    if "reasoning_effort" not in variables or not tokenizer.has_chat_template:
        return
    try:
        message = {"role": "user", "content": "Hi"}
        tokenizer.apply_chat_template([message], tokenize=False, **variables)
    except EffortError:
        raise
    except MMFreeError:
        # what else a template refuses is reported to those who ask
        return


def _weights(args: argparse.Namespace, sessions: "Sessions | None") -> "Weights":
    """A model that is loaded when it is asked for, with its adapters and its draft model.

    Raises:
        UsageError: A flag has a value that does not fit.
        MMFreeError: The files of the model do not allow to load it.
    """
    from ..generation.answers.completion import end_tokens
    from ..hub.adapters.adapter_folder import read_adapter
    from ..hub.checkpoint.checkpoint import open_checkpoint
    from ..hub.checkpoint.embedding_files import read_embedding_use
    from ..hub.checkpoint.load import OpenedModel
    from ..server.engine.weights import Weights
    from ..server.settings import ServedModel

    opened, need = loading.planned(args, also=["feature-extraction"], **_sizes(args))
    tokenizer = loading.processor_of(args, opened)
    with argument_errors():
        end_tokens(tokenizer, args.extra_eos_token)
    for _, folder in args.adapter:
        read_adapter(folder)
    if need is not None and args.draft_model is not None:
        draft_bytes = OpenedModel(open_checkpoint(args.draft_model)).nbytes
        need = replace(need, weights_bytes=need.weights_bytes + draft_bytes)

    def load() -> "list[ServedModel]":
        again = OpenedModel(loading.checkpoint_of(args), loading.dtype_of(args))
        model = loading.with_key_value_cache(args, loading.with_adapter(args, again))
        own = None if sessions is None else sessions.for_model(model)
        draft = loading.draft_of(args, model, tokenizer)
        return served_models(args, model, tokenizer, own, draft)

    shape: Any = opened.model
    if shape.pipeline == "feature-extraction":
        shape.embedding = read_embedding_use(opened.checkpoint.folder)
    models = [
        ServedModel(name, shape, own, aliases=(*others,))
        for (name, *others), own in zip(_names(args), _tokenizers(args, tokenizer), strict=True)
    ]
    return Weights(models, load, need)


def _sizes(args: argparse.Namespace) -> dict[str, Any]:
    """The sizes of the work, for the memory plan."""
    return {
        "batch_size": args.decode_concurrency,
        "prefill_step_size": args.prefill_step_size,
        "context_length": args.max_tokens,
    }


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
        sampling=Sampling(flags.given_sampling(args), args.seed),
        template_variables=prompts.template_variables(args),
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
    """A name and a folder from `NAME=FOLDER`; the name of its model may stand before."""
    name, _, folder = text.partition("=")
    if not re.fullmatch(r"([^:]+:)?[\w.-]{1,64}", name, re.ASCII) or not folder:
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
        sessions: The sessions of the model, whose limits hold for all; `None` to store none.
        draft: Proposes tokens to all of them; `None` for none.

    Raises:
        UsageError: Two adapters have one name, or `--adapter-path` is given too.
        CheckpointError: An adapter does not fit the model.
    """
    from ..hub.adapters.adapter import with_adapter
    from ..hub.adapters.adapter_folder import read_adapter
    from ..server.settings import ServedModel

    (base, *others), *names = _names(args)
    models = [ServedModel(base, model, tokenizer, sessions, draft, (*others,))]
    tokenizers = _tokenizers(args, tokenizer)[1:]
    for (name, *others), (_, folder), of_adapter in zip(
        names, args.adapter, tokenizers, strict=True
    ):
        adapted = with_adapter(model, read_adapter(folder))
        adapted.eval()
        own = None if sessions is None else sessions.for_model(adapted)
        models.append(ServedModel(name, adapted, of_adapter, own, draft, (*others,)))
    return models


def _tokenizers(args: argparse.Namespace, tokenizer: Any) -> list[Any]:
    """The tokenizers of the model and of each adapter, whose chat template may be its own."""
    from ..hub.adapters.adapter_folder import adapter_template

    if args.chat_template is not None:
        return [tokenizer] * (1 + len(args.adapter))
    templates = (adapter_template(folder) for _, folder in args.adapter)
    return [tokenizer, *(loading.with_template(tokenizer, each) for each in templates)]


def _names(args: argparse.Namespace) -> list[list[str]]:
    """The names of the model and of each adapter in requests, those that are listed first.

    Raises:
        UsageError: Two adapters have one name, or `--adapter-path` is given too.
    """
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
    own = args.served_model_name or [_name(args)]
    return [own, *([f"{model}:{name}" for model in own] for name in names)]


@contextmanager
def opened_sessions(
    args: argparse.Namespace, model: "Decoder | None"
) -> "Iterator[Sessions | None]":
    """The sessions that the flags ask for, written to the end when the `with` block is left.

    Without a model they serve by `for_model`.

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
    """The model's name in requests: its repository, or the last part of a path of this machine."""
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
