"""`mmfree upload`: sends a folder with a model or an adapter to the Hub."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .parts.command import command
from .parts.flags import add_plugin_flag
from .parts.parser import CommandParser
from .parts.source_card import certificate_section

if TYPE_CHECKING:
    from ..hub.publish.upload import UploadPlan

HELP = "send a model folder to the Hugging Face Hub"


def build_parser() -> argparse.ArgumentParser:
    usual = "--model --path --base-model --private --revision --message --dry-run"
    parser = CommandParser(prog="mmfree upload", description=__doc__, usual=usual)
    parser.add_argument("--model", "--path", required=True, help="folder of the model to send")
    parser.add_argument(
        "--upload-repo",
        required=True,
        help="Hub repository to send it to, as 'owner/name'",
    )
    parser.add_argument(
        "--base-model",
        help="of an adapter: Hub repository 'owner/name' of the model that it was trained on; needed "
        "where that was a local folder",
    )
    parser.add_argument(
        "--private", action="store_true", help="make the repository private if it is new"
    )
    parser.add_argument(
        "--revision", help="branch to write to, which is created if it is missing; default: main"
    )
    add_plugin_flag(parser)
    parser.add_argument("--message", help="commit message")
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be sent, and send nothing"
    )
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    from ..hub.publish.upload import plan_upload, upload

    plan = plan_upload(
        args.model,
        args.upload_repo,
        private=args.private,
        revision=args.revision,
        message=args.message,
        certify=certificate_section,
        base_model=args.base_model,
    )
    if args.dry_run:
        print(describe(plan))
        return 0
    print(f"Uploaded to {upload(plan)}.")
    for line in _left_out(plan):
        print(line)
    return 0


def describe(plan: "UploadPlan") -> str:
    """Says what an upload would send."""
    from ..hub.publish.model_card import CARD_FILE

    target = f"{plan.repository} ({'private' if plan.is_private else 'public'} if it is new)"
    branch = f" on branch {plan.revision}" if plan.revision else ""
    lines = [f"Would send {plan.nbytes:,} bytes in {len(plan.files)} files to {target}{branch}:"]
    lines += [f"{size:>16,}  {name}" for name, size in plan.files.items()]
    if plan.card is not None:
        lines.append(
            f"The commands of README.md name {plan.repository}."
            if CARD_FILE in plan.files and plan.adapter_config is None
            else "README.md and adapter_config.json are written for the Hub, without local paths."
            if plan.adapter_config is not None
            else "A model card, README.md, is written there unless the repository has one."
        )
    lines += _left_out(plan)
    lines.append(f"Commit message: {plan.message}")
    return "\n".join(lines)


def _left_out(plan: "UploadPlan") -> list[str]:
    return [f"Left out: {', '.join(plan.left_out)}."] if plan.left_out else []
