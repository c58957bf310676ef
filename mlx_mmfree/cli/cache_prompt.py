"""`mmfree cache_prompt`: reads a long prompt once and saves the model's state after it."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from ..errors import UsageError
from ..platform.resident_memory import BYTES_PER_GB
from ..platform.terminal import counted
from .parts import flags, loading, prompts, terminal
from .parts.command import argument_errors, check_writable, command
from .parts.parser import CommandParser

HELP = "read a long prompt once and save the model's state"


def build_parser() -> argparse.ArgumentParser:
    usual = "--model --adapter-path --prompt --prompt-cache-file --system-prompt --max-kv-size"
    parser = CommandParser(prog="mmfree cache_prompt", description=__doc__, usual=usual)
    loading.add_model_flags(parser)
    group = parser.add_argument_group("prompt")
    group.add_argument(
        "--prompt",
        "-p",
        type=flags.escaped,
        required=True,
        help=r"text to read, in which \n is a line break and \t a tab; '-' reads standard input",
    )
    group.add_argument(
        "--prompt-cache-file",
        type=Path,
        required=True,
        help="file to write; give it to 'mmfree generate' by the flag of the same name",
    )
    prompts.add_template_flags(group)
    prompts.add_prefill_flag(group)
    loading.add_key_value_flags(parser)
    loading.add_memory_flags(parser)
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    check_writable("[cache_prompt] 'prompt_cache_file'", args.prompt_cache_file, makes_folder=True)
    import mlx.core as mx

    from ..generation import cache_prompt, keeps_key_values, save_prompt_cache

    prompt = prompts.given_prompt(args.prompt)
    if not prompt:
        raise UsageError("[cache_prompt] 'prompt' must not be empty. Give at least one word.")
    with loading.loaded(
        args,
        batch_size=1,
        prefill_step_size=args.prefill_step_size,
        context_length=prompts.max_token_count(prompt),
    ) as (model, tokenizer):
        write = prompts.PromptWriter(
            tokenizer,
            system_prompt=args.system_prompt,
            ignore_chat_template=args.ignore_chat_template,
            variables=prompts.template_variables(args),
            most=model.max_length,
        )
        with argument_errors():
            tokens = write.opening(prompt)
        start = perf_counter()
        with argument_errors(), terminal.ReadingBar(args.prefill_step_size) as bar:
            cache = cache_prompt(
                model,
                tokens,
                prefill_step_size=args.prefill_step_size,
                prompt_progress_callback=bar,
            )
        speed = len(tokens) / (perf_counter() - start)
        settings = loading.key_value_settings(args) if keeps_key_values(model) else None
        save_prompt_cache(args.prompt_cache_file, model, cache, settings)
        print(f"Prompt: {counted(len(tokens), 'token')}, {speed:.3f} tokens-per-sec")
        print(f"State: {terminal.size_text(cache.nbytes)} in '{args.prompt_cache_file}'")
        print(f"Peak memory: {mx.get_peak_memory() / BYTES_PER_GB:.3f} GB")
    return 0
