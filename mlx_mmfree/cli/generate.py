"""`mmfree generate`: continues a prompt, or several prompts, with a model."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .parts import flags, loading, process_group
from .parts.command import INTERRUPTED, argument_errors, command
from .parts.parser import CommandParser
from .parts.prompts import (
    PromptWriter,
    add_chat_template_flag,
    add_end_flags,
    add_prefill_flag,
    add_template_flags,
    given_prompt,
    max_token_count,
    read_prompts,
    template_variables,
    thinks,
)
from .parts.terminal import Interruption, ReadingBar

if TYPE_CHECKING:
    from ..generation import BatchResponse, BatchStats, GenerationResponse
    from ..hub import Tokenizer
    from ..models import Decoder


HELP = "continue a prompt with a model"

DEFAULT_PROMPT = "Once upon a time"
_USUAL = (
    "--model --adapter-path --prompt --data --system-prompt --temp --top-p --seed --max-tokens --stop "
    "--json"
)


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="mmfree generate", description=__doc__, usual=_USUAL)
    loading.add_model_flags(parser)
    _add_prompt_flags(parser.add_argument_group("prompt"))
    choice = parser.add_argument_group("sampling")
    flags.add_sampling_flags(choice)
    end = parser.add_argument_group("end of the text")
    add_end_flags(end, max_tokens=100)
    end.add_argument(
        "--stop",
        type=flags.escaped,
        nargs="+",
        default=[],
        metavar="TEXT",
        help="strings that end the text; they are not printed",
    )
    _add_output_flags(parser.add_argument_group("output"))
    loading.add_draft_flags(
        parser.add_argument_group("speculative decoding"), "and does not read the prompt cache"
    )
    loading.add_key_value_flags(parser)
    loading.add_memory_flags(parser)
    process_group.add_tensor_parallel_flag(parser)
    return parser


def _add_prompt_flags(group: Any) -> None:
    source = group.add_mutually_exclusive_group()
    source.add_argument(
        "--prompt",
        "-p",
        type=flags.escaped,
        help=r"text to continue, in which \n is a line break and \t a tab; '-' reads standard input; "
        f"default: {DEFAULT_PROMPT!r}",
    )
    source.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="text file with one prompt on each line, or a .jsonl file; the prompts are continued "
        "together, as a batch",
    )
    group.add_argument(
        "--batch-size",
        type=flags.positive,
        default=32,
        help="number of prompts of the file continued at a time (%(default)s)",
    )
    group.add_argument("--prefill-response", default="", help="text that the answer begins with")
    add_template_flags(group)
    add_chat_template_flag(group)
    add_prefill_flag(group)
    group.add_argument(
        "--prompt-cache-file",
        type=Path,
        help="file from 'mmfree cache_prompt'; the prompt goes on after what was cached in it",
    )


def _add_output_flags(group: Any) -> None:
    group.add_argument(
        "--verbose",
        type=flags.boolean,
        default=True,
        metavar="T|F",
        help="F prints the text alone, without statistics",
    )
    flags.add_json_flag(group)


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    with argument_errors():
        # bad values are refused before the model is loaded
        flags.sampler_from(args, special_tokens=())
        flags.processors_from(args)
        options = _options(args)
    prompts = _prompts(args)
    context_length = max(map(max_token_count, prompts)) + args.max_tokens + _cached_tokens(args)
    texts = 1 if args.data is None else args.batch_size
    group = process_group.tensor_group(args)
    with (
        process_group.quiet_unless_first(0 if group is None else group.rank()),
        loading.loaded(
            args,
            batch_size=texts,
            # the prompts of a batch share the positions that are read at a time
            prefill_step_size=-(-args.prefill_step_size // texts),
            context_length=context_length,
            group=group,
        ) as (model, tokenizer),
    ):
        note = flags.settle_sampling(
            args, model, tokenizer, thinks=thinks(template_variables(args))
        )
        if note and args.verbose:
            print(note, file=sys.stderr)
        with argument_errors():
            write = PromptWriter(
                tokenizer,
                system_prompt=args.system_prompt,
                prefill_response=args.prefill_response,
                ignore_chat_template=args.ignore_chat_template,
                variables=template_variables(args),
                most=model.max_length,
            )
            rows = _prompt_ids(args, write, model, tokenizer, prompts)
            options |= _model_options(args, model, tokenizer)
            # an answer whose prefix is given goes on from it
            options["is_answer"] = write.uses_template and not args.prefill_response
        _seed(args, group)
        if args.prompt is None and args.data is None and args.verbose and not args.json:
            print(f"The prompt is: {DEFAULT_PROMPT}", file=sys.stderr)
        with Interruption() as interruption:
            if args.data is None:
                generate_one(args, model, tokenizer, rows[0], options, interruption)
            else:
                generate_batch(args, model, tokenizer, rows, options, interruption)
    return INTERRUPTED if interruption.is_noted else 0


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `stream_generate` that the flags alone decide."""
    from ..generation import StopStrings

    StopStrings(args.stop)
    return {
        "max_tokens": args.max_tokens,
        "stop": args.stop,
        "prefill_step_size": args.prefill_step_size,
    }


def _prompts(args: argparse.Namespace) -> list[str]:
    if args.data is not None:
        return read_prompts(args.data)
    if args.prompt is None:
        return [DEFAULT_PROMPT]
    return [given_prompt(args.prompt)]


def _cached_tokens(args: argparse.Namespace) -> int:
    """The number of tokens in the prompt cache, whose settings the flags take over."""
    from ..generation.prompt_cache import read_settings

    single = {
        "prompt_cache_file": args.prompt_cache_file,
        "draft_model": args.draft_model,
        "ngram_drafts": args.ngram_drafts or None,
    }
    for name, value in single.items():
        if value is not None and args.data is not None:
            raise UsageError(
                f"[generate] '{name}' must come with one prompt but got --data beside it. Give "
                "the prompt with --prompt."
            )
    if args.prompt_cache_file is None:
        return 0
    if args.system_prompt is not None:
        raise UsageError(
            "[generate] 'system_prompt' must be left out with 'prompt_cache_file'. Give it when the "
            "prompt is cached."
        )
    settings, count = read_settings(args.prompt_cache_file)
    loading.adopt_key_value_settings(args, settings)
    return count


def _prompt_ids(
    args: argparse.Namespace,
    write: PromptWriter,
    model: "Decoder",
    tokenizer: "Tokenizer",
    prompts: list[str],
) -> list[list[int]]:
    """The token ids of each prompt."""
    from ..generation.prompts import prompt_tokens

    written = [
        write(text) if args.prompt_cache_file is None else write.continuation(text)
        for text in prompts
    ]
    most = model.max_length
    return [prompt_tokens(tokenizer, prompt, model.vocab_size, most=most) for prompt in written]


def _model_options(
    args: argparse.Namespace, model: "Decoder", tokenizer: "Tokenizer"
) -> dict[str, Any]:
    """The arguments of `stream_generate` that need the model or its tokenizer."""
    from ..generation import load_prompt_cache
    from ..generation.answers.completion import end_tokens

    end = end_tokens(tokenizer, args.extra_eos_token)
    line_break = tokenizer.encode("\n", add_special_tokens=False)
    options: dict[str, Any] = {
        "extra_eos_tokens": end,
        "sampler": flags.sampler_from(args, special_tokens=[*line_break, *end]),
        "processors": flags.processors_from(args),
    }
    if args.prompt_cache_file is not None:
        options["state"] = load_prompt_cache(args.prompt_cache_file, model).state
    draft = loading.draft_of(args, model, tokenizer)
    if draft is not None or args.ngram_drafts:
        options |= {
            "draft_model": draft,
            "ngram_drafts": args.ngram_drafts,
            "num_draft_tokens": args.num_draft_tokens,
        }
    return options


def _seed(args: argparse.Namespace, group: Any) -> None:
    """Seeds random choices as the flag asks; processes that share a model need the same seed."""
    import mlx.core as mx

    seed = (
        process_group.common_seed(group) if args.seed is None and group is not None else args.seed
    )
    if seed is not None:
        mx.random.seed(seed)


_SEPARATOR = "=" * 10
_INTERRUPTED = "interrupted"


def generate_one(
    args: argparse.Namespace,
    model: "Decoder",
    tokenizer: "Tokenizer",
    prompt: Sequence[int],
    options: Mapping[str, Any],
    interruption: Interruption,
) -> None:
    """Continues one prompt and prints the text as it comes.

    Args:
        args: The values of the flags.
        model: The model.
        tokenizer: The tokenizer of the model.
        prompt: The token ids of the prompt.
        options: Further arguments of `stream_generate`.
        interruption: Ends the text at Ctrl-C.
    """
    from ..generation import stream_generate

    parts = []
    with ReadingBar(args.prefill_step_size) as bar:
        options = {**options, "prompt_progress_callback": bar}
        for response in stream_generate(model, tokenizer, prompt, **options):
            interruption.has_tokens = True
            parts.append(response.text)
            if not args.json:
                print(response.text, end="", flush=True)
            if interruption.is_noted:
                break
    if args.json:
        _print_json(args, _record(response, "".join(parts), interruption.is_noted))
        return
    # the metrics go to the other stream
    print(flush=True)
    if args.verbose:
        _print_statistics(response)
        if (draft := response.draft) is not None:
            print(
                f"Draft: {draft.accepted} of {draft.proposed} tokens accepted, "
                f"{draft.acceptance_rate:.1%}",
                file=sys.stderr,
            )


def generate_batch(
    args: argparse.Namespace,
    model: "Decoder",
    tokenizer: "Tokenizer",
    prompts: Sequence[Sequence[int]],
    options: Mapping[str, Any],
    interruption: Interruption,
) -> None:
    """Continues several prompts and prints all texts at the end; arguments as `generate_one`."""
    from ..generation import batch_generate
    from ..platform.progress import Progress

    with Progress("Prompts", len(prompts), "prompt", leave=False) as bar:

        def progress(finished: int, total: int) -> bool:
            interruption.has_tokens = True
            bar.update(finished - bar.n)
            return not interruption.is_noted

        response = batch_generate(
            model, tokenizer, prompts, batch_size=args.batch_size, progress=progress, **options
        )
    if args.json:
        _print_json(args, {"results": _results(response)} | asdict(response.stats))
        return
    print(f"\n{_SEPARATOR}\n".join(response.texts), flush=True)
    if args.verbose:
        _print_statistics(response.stats)


def _record(response: "GenerationResponse", text: str, is_interrupted: bool) -> dict[str, Any]:
    """The record of a whole text, from the last response of its stream."""
    record = asdict(response) | {"text": text}
    del record["token"], record["from_draft"]
    if is_interrupted and response.finish_reason is None:
        record["finish_reason"] = _INTERRUPTED
    if response.draft is None:
        del record["draft"]
    else:
        record["draft"]["acceptance_rate"] = response.draft.acceptance_rate
    return record


def _results(response: "BatchResponse") -> list[dict[str, Any]]:
    columns = (
        response.texts,
        response.prompt_tokens,
        response.tokens,
        response.finish_reasons,
    )
    return [
        {
            "text": text,
            "prompt_tokens": prompt_size,
            "generation_tokens": len(tokens),
            "finish_reason": _INTERRUPTED if reason is None else reason,
        }
        for text, prompt_size, tokens, reason in zip(*columns, strict=True)
    ]


def _print_json(args: argparse.Namespace, record: Mapping[str, Any]) -> None:
    print(json.dumps({"model": loading.model_name(args), **record}))


def _print_statistics(statistics: "GenerationResponse | BatchStats") -> None:
    from ..generation.text import statistics_lines

    print(*statistics_lines(statistics), sep="\n", file=sys.stderr)
