"""`mmfree generate`: continues a prompt, or several, with a model."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .parts.console import INTERRUPTED, CommandParser, argument_errors, command
from .parts.flags import escaped, json_object, positive, truth, whole
from .parts.interruption import Interruption
from .parts.loading import (
    add_key_value_flags,
    add_memory_flags,
    add_model_flags,
    adopt_key_value_settings,
    dtype_of,
    loaded,
)
from .parts.process_group import add_tensor_parallel_flag, common_seed, one_voice, tensor_group
from .parts.prompts import PromptWriter, given_prompt, most_tokens, read_prompts
from .parts.reading_bar import ReadingBar
from .parts.sampling import add_sampling_flags, sampler_from

if TYPE_CHECKING:
    from ..generation import BatchStats, GenerationResponse
    from ..hub import Tokenizer
    from ..models import Decoder

HELP = "continue a prompt with a model"

DEFAULT_PROMPT = "Once upon a time"
DEMO = "demo"
SEPARATOR = "=" * 10
_INTERRUPTED = "interrupted"


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="mmfree generate", description=__doc__, allow_abbrev=False)
    add_model_flags(parser)
    _add_prompt_flags(parser.add_argument_group("prompt"))
    choice = parser.add_argument_group("choice of tokens")
    add_sampling_flags(choice)
    _add_penalty_flags(choice)
    _add_end_flags(parser.add_argument_group("end of the text"))
    _add_output_flags(parser.add_argument_group("output"))
    _add_draft_flags(parser.add_argument_group("speculative decoding"))
    add_key_value_flags(parser)
    add_memory_flags(parser)
    add_tensor_parallel_flag(parser)
    return parser


def _add_prompt_flags(group: Any) -> None:
    source = group.add_mutually_exclusive_group()
    source.add_argument(
        "--prompt",
        "-p",
        type=escaped,
        help=rf"text to continue, \n and \t count as such; '-' reads standard input; "
        f"default: {DEFAULT_PROMPT!r}",
    )
    source.add_argument(
        "--prompts-file",
        type=Path,
        help="text file with a prompt a line, or .jsonl; they are continued as a batch",
    )
    group.add_argument(
        "--batch-size", type=positive, default=32, help="prompts at a time (%(default)s)"
    )
    group.add_argument("--system-prompt", help="what a chat model is told first")
    group.add_argument("--prefill-response", default="", help="how the answer begins")
    group.add_argument(
        "--ignore-chat-template",
        action="store_true",
        help="feed the bare prompt even if the tokenizer has a chat template",
    )
    group.add_argument(
        "--chat-template-config",
        type=json_object,
        help="JSON object with further names for the chat template",
    )
    group.add_argument(
        "--prefill-step-size",
        type=positive,
        default=2048,
        help="positions of the prompt read at a time (%(default)s)",
    )
    group.add_argument(
        "--prompt-cache-file",
        type=Path,
        help="file of 'mmfree cache_prompt' with what the model read before the prompt",
    )


def _add_draft_flags(group: Any) -> None:
    group.add_argument(
        "--draft-model",
        help="folder or Hub repository of a smaller model with the same tokens, which proposes what "
        "the model then checks; it reads the prompt but no prompt cache",
    )
    group.add_argument(
        "--num-draft-tokens",
        type=positive,
        default=3,
        help="tokens that it proposes at a time (%(default)s)",
    )


def _add_penalty_flags(group: Any) -> None:
    group.add_argument(
        "--repetition-penalty", type=float, default=1.0, help="factor on recent tokens; 1 = none"
    )
    group.add_argument(
        "--repetition-context-size",
        type=whole,
        default=20,
        help="how many tokens are recent (%(default)s)",
    )
    group.add_argument(
        "--presence-penalty", type=float, default=0.0, help="taken off tokens already written"
    )
    group.add_argument(
        "--frequency-penalty", type=float, default=0.0, help="the same, for each time"
    )


def _add_end_flags(group: Any) -> None:
    group.add_argument(
        "--max-tokens", "-m", type=positive, default=100, help="tokens at most (%(default)s)"
    )
    group.add_argument(
        "--stop",
        type=escaped,
        nargs="+",
        default=[],
        metavar="TEXT",
        help="strings that end the text and are not shown",
    )
    group.add_argument(
        "--extra-eos-token",
        nargs="+",
        default=[],
        metavar="TOKEN",
        help="tokens or ids that end the text beside the tokenizer's own",
    )


def _add_output_flags(group: Any) -> None:
    group.add_argument(
        "--verbose", type=truth, default=True, metavar="T|F", help="F prints the text alone"
    )
    group.add_argument(
        "--json", action="store_true", help="print one JSON object with text and statistics"
    )


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    import mlx.core as mx

    from ..generation.stop import end_tokens

    with argument_errors():
        # Refuses bad values before the model is loaded.
        sampler_from(args, special_tokens=())
        options = _options(args)
    prompts = _prompts(args)
    context_length = max(map(most_tokens, prompts)) + args.max_tokens + _cached_tokens(args)
    group = tensor_group(args)
    with (
        one_voice(0 if group is None else group.rank()),
        loaded(
            args,
            batch_size=1 if args.prompts_file is None else args.batch_size,
            prefill_step_size=args.prefill_step_size,
            context_length=context_length,
            group=group,
        ) as (model, tokenizer),
    ):
        with argument_errors():
            rows = _rows(args, model, tokenizer, prompts)
            end = end_tokens(tokenizer, args.extra_eos_token)
            options |= _continued(args, model, tokenizer)
        line_break = tokenizer.encode("\n", add_special_tokens=False)
        options |= {
            "extra_eos_tokens": end,
            "sampler": sampler_from(args, special_tokens=[*line_break, *end]),
        }
        seed = common_seed(group) if args.seed is None and group is not None else args.seed
        if seed is not None:
            mx.random.seed(seed)
        with Interruption() as interruption:
            if args.prompts_file is None:
                _run_one(args, model, tokenizer, rows[0], options, interruption)
            else:
                _run_batch(args, model, tokenizer, rows, options, interruption)
    return INTERRUPTED if interruption.is_noted else 0


def _cached_tokens(args: argparse.Namespace) -> int:
    """The number of tokens in the prompt cache, whose settings the flags take over."""
    from ..generation.prompt_cache import read_settings

    single = {"prompt_cache_file": args.prompt_cache_file, "draft_model": args.draft_model}
    for name, value in single.items():
        if value is not None and args.prompts_file is not None:
            raise UsageError(
                f"[generate] '{name}' must come with one prompt but got --prompts-file beside it."
            )
    if args.prompt_cache_file is None:
        return 0
    if args.system_prompt is not None:
        raise UsageError(
            "[generate] 'system_prompt' must be left out with 'prompt_cache_file'. Give it when the "
            "prompt is cached."
        )
    settings, count = read_settings(args.prompt_cache_file)
    adopt_key_value_settings(args, settings)
    return count


def _continued(
    args: argparse.Namespace, model: "Decoder", tokenizer: "Tokenizer"
) -> dict[str, Any]:
    """What was read before the prompt, and the draft model."""
    from ..generation import load_prompt_cache, with_key_values
    from ..generation.speculative import check_draft, check_draft_tokenizer
    from ..hub import load

    options: dict[str, Any] = {}
    if args.prompt_cache_file is not None:
        options["state"] = load_prompt_cache(args.prompt_cache_file, model).state
    if args.draft_model is not None:
        draft, draft_tokenizer = load(args.draft_model, dtype=dtype_of(args))
        check_draft_tokenizer(tokenizer, draft_tokenizer)
        check_draft(model, draft)
        options["draft_model"] = with_key_values(draft, max_kv_size=args.max_kv_size)
        options["num_draft_tokens"] = args.num_draft_tokens
    return options


def _rows(
    args: argparse.Namespace, model: "Decoder", tokenizer: "Tokenizer", prompts: list[str]
) -> list[list[int]]:
    """The ids of each prompt."""
    from ..generation.text import prompt_tokens

    write = PromptWriter(
        tokenizer,
        system_prompt=args.system_prompt,
        prefill_response=args.prefill_response,
        ignore_chat_template=args.ignore_chat_template,
        variables=args.chat_template_config,
    )
    wrote = [
        write(text) if args.prompt_cache_file is None else write.continuation(text)
        for text in prompts
    ]
    return [prompt_tokens(tokenizer, prompt, model.vocab_size) for prompt in wrote]


def _options(args: argparse.Namespace) -> dict[str, Any]:
    from ..generation import StopStrings, make_processors

    StopStrings(args.stop)
    return {
        "max_tokens": args.max_tokens,
        "stop": args.stop,
        "prefill_step_size": args.prefill_step_size,
        "processors": make_processors(
            repetition_penalty=args.repetition_penalty,
            repetition_context_size=args.repetition_context_size,
            presence_penalty=args.presence_penalty,
            frequency_penalty=args.frequency_penalty,
        ),
    }


def _prompts(args: argparse.Namespace) -> list[str]:
    if args.prompts_file is not None:
        return read_prompts(args.prompts_file)
    if args.prompt is None:
        return [DEFAULT_PROMPT]
    return [given_prompt(args.prompt)]


def _run_one(
    args: argparse.Namespace,
    model: "Decoder",
    tokenizer: "Tokenizer",
    prompt: Sequence[int],
    options: dict[str, Any],
    interruption: Interruption,
) -> None:
    from ..generation import stream_generate

    if args.prompt is None and args.verbose and not args.json:
        print(f"The prompt is: {DEFAULT_PROMPT}", file=sys.stderr)
    parts = []
    with ReadingBar(args.prefill_step_size) as bar:
        options = options | {"prompt_progress_callback": bar}
        for response in stream_generate(model, tokenizer, prompt, **options):
            interruption.tokens_come = True
            parts.append(response.text)
            if not args.json:
                print(response.text, end="", flush=True)
            if interruption.is_noted:
                break
    if args.json:
        result = asdict(response) | {"text": "".join(parts)}
        if interruption.is_noted and response.finish_reason is None:
            result["finish_reason"] = _INTERRUPTED
        if response.draft is None:
            del result["draft"]
        else:
            result["draft"]["acceptance_rate"] = response.draft.acceptance_rate
        _print_json(args, result)
    else:
        print()
        _print_statistics(args, response)
        if args.verbose and response.draft is not None:
            draft = response.draft
            print(
                f"Draft: {draft.accepted} of {draft.proposed} tokens accepted, "
                f"{draft.acceptance_rate:.1%}",
                file=sys.stderr,
            )


def _run_batch(
    args: argparse.Namespace,
    model: "Decoder",
    tokenizer: "Tokenizer",
    prompts: Sequence[Sequence[int]],
    options: dict[str, Any],
    interruption: Interruption,
) -> None:
    from tqdm import tqdm

    from ..generation import batch_generate

    with tqdm(total=len(prompts), unit="prompt", leave=False, disable=None, file=sys.stderr) as bar:

        def progress(finished: int, total: int) -> bool:
            interruption.tokens_come = True
            bar.update(finished - bar.n)
            return not interruption.is_noted

        response = batch_generate(
            model, tokenizer, prompts, batch_size=args.batch_size, progress=progress, **options
        )
    if args.json:
        results = [
            {
                "text": text,
                "prompt_tokens": prompt_size,
                "generation_tokens": len(tokens),
                "finish_reason": _INTERRUPTED if reason is None else reason,
            }
            for text, prompt_size, tokens, reason in zip(
                response.texts,
                response.prompt_tokens,
                response.tokens,
                response.finish_reasons,
                strict=True,
            )
        ]
        _print_json(args, {"results": results} | asdict(response.stats))
    else:
        print(f"\n{SEPARATOR}\n".join(response.texts))
        _print_statistics(args, response.stats)


def _print_json(args: argparse.Namespace, result: dict[str, Any]) -> None:
    for name in ("token", "from_draft"):
        result.pop(name, None)
    print(json.dumps({"model": args.model or DEMO} | result))


def _print_statistics(
    args: argparse.Namespace, statistics: "GenerationResponse | BatchStats"
) -> None:
    if not args.verbose:
        return
    from ..generation.text import statistics_lines

    print(*statistics_lines(statistics), sep="\n", file=sys.stderr)
