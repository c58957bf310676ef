"""Flags for the choice of tokens, and the sampler that they ask for."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .flags import positive, whole
from .flags import seed as seed_number

if TYPE_CHECKING:
    from ...generation import Sampler


def add_sampling_flags(group: Any, *, temp: float = 0.0, top_p: float = 1.0) -> None:
    """Adds the flags; `temp` and `top_p` are the defaults of theirs."""
    group.add_argument(
        "--temp", type=float, default=temp, help="temperature; 0 is greedy (%(default)s)"
    )
    group.add_argument(
        "--top-p", type=float, default=top_p, help="probability mass to keep; 1 = all (%(default)s)"
    )
    group.add_argument("--min-p", type=float, default=0.0, help="least share of the best; 0 = all")
    group.add_argument("--top-k", type=whole, default=0, help="tokens to keep; 0 = all")
    group.add_argument(
        "--min-tokens-to-keep",
        type=positive,
        default=1,
        help="tokens that min-p keeps (%(default)s)",
    )
    group.add_argument("--xtc-probability", type=float, default=0.0, help="how often XTC filters")
    group.add_argument(
        "--xtc-threshold", type=float, default=0.1, help="what XTC calls likely (%(default)s)"
    )
    group.add_argument(
        "--seed",
        type=seed_number,
        help="makes random choices repeatable; default: drawn anew in each run",
    )


def sampler_from(args: argparse.Namespace, special_tokens: Sequence[int]) -> "Sampler":
    """The sampler for the values of the flags; XTC never drops `special_tokens`."""
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
