"""The flags for the choice of tokens, and the sampler and penalties that they ask for."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .flags import non_negative, positive
from .flags import seed as seed_number

if TYPE_CHECKING:
    from ...generation import Sampler
    from ...generation.sampling import LogitsProcessor


def add_sampling_flags(group: Any, *, temp: float = 0.0, top_p: float = 1.0) -> None:
    """Adds the flags for sampling; `temp` and `top_p` are the defaults of their flags."""
    group.add_argument(
        "--temp",
        type=float,
        default=temp,
        help="sampling temperature; 0 always takes the likeliest token (%(default)s)",
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=top_p,
        help="keep the likeliest tokens that have this probability together; 1 = all (%(default)s)",
    )
    group.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        help="drop tokens below this fraction of the largest probability; 0 = none",
    )
    group.add_argument(
        "--top-k",
        type=non_negative,
        default=0,
        help="keep this many of the likeliest tokens; 0 = all",
    )
    group.add_argument(
        "--min-tokens-to-keep",
        type=positive,
        default=1,
        help="number of tokens that --min-p always keeps (%(default)s)",
    )
    group.add_argument(
        "--xtc-probability",
        type=float,
        default=0.0,
        help="how often XTC drops all likely tokens but the least likely of them; 0 = never",
    )
    group.add_argument(
        "--xtc-threshold",
        type=float,
        default=0.1,
        help="probability above which XTC counts a token as likely (%(default)s)",
    )
    group.add_argument(
        "--seed", type=seed_number, help="seed of random choices; default: another one in each run"
    )


def sampler_from(args: argparse.Namespace, special_tokens: Sequence[int]) -> "Sampler":
    """The sampler that the flags ask for; XTC never drops `special_tokens`."""
    from ...generation import make_sampler

    return make_sampler(
        temp=args.temp,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        min_tokens_to_keep=args.min_tokens_to_keep,
        xtc_probability=args.xtc_probability,
        xtc_threshold=args.xtc_threshold,
        xtc_special_tokens=special_tokens,
    )


def add_penalty_flags(group: Any) -> None:
    group.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        help="factor that makes recent tokens less likely; 1 = none",
    )
    group.add_argument(
        "--repetition-context-size",
        type=non_negative,
        default=20,
        help="number of latest tokens that count as recent (%(default)s)",
    )
    group.add_argument(
        "--presence-penalty",
        type=float,
        default=0.0,
        help="subtracted from the logits of tokens that were written before; 0 = none",
    )
    group.add_argument(
        "--frequency-penalty",
        type=float,
        default=0.0,
        help="subtracted from the logit of a token for each time it was written; 0 = none",
    )


def processors_from(args: argparse.Namespace) -> "list[LogitsProcessor]":
    """The penalties that the flags ask for."""
    from ...generation import make_processors

    return make_processors(
        repetition_penalty=args.repetition_penalty,
        repetition_context_size=args.repetition_context_size,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
    )
