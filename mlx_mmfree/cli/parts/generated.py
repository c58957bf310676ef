"""Generates from the prompts of `mmfree generate` and prints texts, statistics or JSON."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .loading import model_name
from .terminal.interruption import Interruption
from .terminal.reading_bar import ReadingBar

if TYPE_CHECKING:
    from ...generation import BatchResponse, BatchStats, GenerationResponse
    from ...hub import Tokenizer
    from ...models import Decoder

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
    from ...generation import stream_generate

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
    print()
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
    from tqdm import tqdm

    from ...generation import batch_generate

    with tqdm(total=len(prompts), unit="prompt", leave=False, disable=None, file=sys.stderr) as bar:

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
    print(f"\n{_SEPARATOR}\n".join(response.texts))
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
    print(json.dumps({"model": model_name(args), **record}))


def _print_statistics(statistics: "GenerationResponse | BatchStats") -> None:
    from ...generation.text import statistics_lines

    print(*statistics_lines(statistics), sep="\n", file=sys.stderr)
