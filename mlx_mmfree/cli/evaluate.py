"""`mmfree evaluate`: runs tasks of lm-evaluation-harness. This needs the extra 'eval'."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..files.reading import json_text
from ..files.writing import new_file
from .parts.command import argument_errors, check_writable, command
from .parts.flags import add_json_flag, non_negative, positive, seed
from .parts.loading import add_memory_flags, add_model_flags, loaded, model_name
from .parts.parser import CommandParser
from .parts.prompts import add_template_args_flag, template_variables

if TYPE_CHECKING:
    from ..generation import Sampler

HELP = "run benchmarks of lm-evaluation-harness"


def build_parser() -> argparse.ArgumentParser:
    usual = "--model --adapter-path --tasks --num-shots --limit --output --json"
    parser = CommandParser(prog="mmfree evaluate", description=__doc__, usual=usual)
    add_model_flags(parser)
    _add_task_flags(parser.add_argument_group("tasks"))
    _add_answer_flags(parser.add_argument_group("answers"))
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output",
        "--output-dir",
        type=Path,
        metavar="DIR",
        help="folder in which a JSON file with the results is written",
    )
    add_json_flag(output)
    add_memory_flags(parser)
    return parser


def _add_task_flags(group: Any) -> None:
    group.add_argument(
        "--tasks", nargs="+", required=True, help="names of tasks or groups of tasks"
    )
    group.add_argument("--include-path", type=Path, help="folder with definitions of further tasks")
    group.add_argument(
        "--num-shots",
        type=non_negative,
        help="number of examples before each question; default: as the task says",
    )
    group.add_argument(
        "--limit", type=positive, help="largest number of questions of each task; default: all"
    )
    group.add_argument(
        "--seed", type=seed, default=123, help="seed of all random choices (%(default)s)"
    )
    group.add_argument(
        "--apply-chat-template",
        action=argparse.BooleanOptionalAction,
        help="whether to write questions with the chat template; default: if there is one",
    )
    add_template_args_flag(group)
    group.add_argument(
        "--fewshot-as-multiturn",
        action="store_true",
        help="write each example as a turn of its own in the chat template",
    )
    group.add_argument(
        "--confirm-run-unsafe-code",
        action="store_true",
        help="also run tasks that execute code which the model writes",
    )
    group.add_argument(
        "--batch-size",
        type=positive,
        default=8,
        help="number of texts read at a time (%(default)s)",
    )


def _add_answer_flags(group: Any) -> None:
    group.add_argument(
        "--max-tokens",
        type=positive,
        help="largest number of tokens of an answer; default: as the task says",
    )
    group.add_argument("--temp", type=float, help="sampling temperature; default: as the task says")
    group.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="with --temp: keep the likeliest tokens that have this probability together; 1 = all",
    )
    group.add_argument(
        "--top-k",
        type=non_negative,
        default=0,
        help="with --temp: keep this many of the likeliest tokens; 0 = all",
    )


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    from ..evaluation.harness import check_installed, evaluate_tasks, harness_model

    check_installed()
    if args.include_path is not None and not args.include_path.is_dir():
        raise UsageError(
            f"[evaluate] 'include_path' must be a folder but '{args.include_path}' is not one."
        )
    if args.output is not None:
        check_writable("[evaluate] 'output'", args.output / "results", makes_folder=True)
    with argument_errors():
        sampler = _sampler(args)
    with loaded(args, batch_size=args.batch_size, prefill_step_size=2048) as (model, tokenizer):
        applies = args.apply_chat_template
        if applies and not tokenizer.has_chat_template:
            raise UsageError(
                "[evaluate] 'apply_chat_template' must come with a model that has a chat template but "
                "this one has none. Leave it out."
            )
        adapter = harness_model(
            model,
            tokenizer,
            batch_size=args.batch_size,
            max_tokens=args.max_tokens,
            sampler=sampler,
            template_variables=template_variables(args),
        )
        found = evaluate_tasks(
            adapter,
            args.tasks,
            include_path=args.include_path,
            seed=args.seed,
            num_fewshot=args.num_shots,
            limit=args.limit,
            apply_chat_template=tokenizer.has_chat_template if applies is None else applies,
            fewshot_as_multiturn=args.fewshot_as_multiturn,
            confirm_run_unsafe_code=args.confirm_run_unsafe_code,
        )
    _report(args, found)
    return 0


def _sampler(args: argparse.Namespace) -> "Sampler | None":
    from ..generation import make_sampler

    if args.temp is None:
        if args.top_p != 1.0 or args.top_k:
            raise UsageError(
                "[evaluate] 'top_p' and 'top_k' must come with 'temp' but came alone. Give a "
                "temperature."
            )
        return None
    return make_sampler(temp=args.temp, top_p=args.top_p, top_k=args.top_k)


def _report(args: argparse.Namespace, found: dict[str, Any]) -> None:
    from lm_eval.utils import make_table

    name = model_name(args)
    parts = ("results", "groups", "versions", "n-shot", "n-samples")
    report = {"model": name} | {part: found[part] for part in parts if part in found}
    if args.output is not None:
        label = "_".join([Path(name).name, *args.tasks]).replace("/", "_")[:100]
        _write(args.output / f"evaluation_{label}.json", json_text(report, indent=2))
    print(json_text(report) if args.json else make_table(found))


def _write(file: Path, text: str) -> None:
    """Writes a file as a whole or not at all."""
    try:
        with new_file(file) as new:
            new.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"[evaluate] 'output' must be a writable folder but '{file.parent}' is not: {error}."
        ) from error
