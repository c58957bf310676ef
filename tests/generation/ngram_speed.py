"""The gain of drafts from the text on edits and on stories.

    python -m tests.generation.ngram_speed [--config mmfreelm-370m] [--num-draft-tokens 3]

No model here can edit, so that edits are dictated: the model computes all that it does for any text, and
the tokens that it takes are the edited text's. Stories are the bundled model's own. With
`--config`, a model of that shape with random weights is dictated all of them.
"""

import argparse
import re
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_mmfree import demo, load, make_sampler
from mlx_mmfree.evaluation.audit.skeleton import presets, skeleton
from mlx_mmfree.generation import generate_tokens, stream_generate
from mlx_mmfree.hub import Tokenizer
from mlx_mmfree.models import Decoder
from tests.generation.models import Dictation

SOURCE = Path(__file__).parents[2] / "mlx_mmfree" / "generation" / "decode.py"
STORIES = ("Once upon a time", "Lily saw a dog", "Mom said", "There was a big tree")


class Case(NamedTuple):
    """A text to write.

    Attributes:
        name: What it is.
        prompt: Its prompt.
        reported: What is dictated; `None`: the model writes on.
        temp: The temperature.
        count: How many tokens.
    """

    name: str
    prompt: list[int]
    reported: list[int] | None
    temp: float
    count: int


def cases(model: Decoder, tokenizer: Tokenizer, *, are_dictated: bool) -> list[Case]:
    """Edits and stories."""
    source = SOURCE.read_text()[2000:6000]
    names = {"state": "memory", "shapes": "sizes", "tokens": "ids"}
    edited = re.sub(r"\b(state|shapes|tokens)\b", lambda found: names[found[0]], source)
    mx.random.seed(0)
    written = []
    for temp in (0.0, 0.7):
        for story in STORIES:
            prompt, sampler = tokenizer.encode(story), make_sampler(temp)
            tokens = generate_tokens(model, prompt, sampler=sampler, max_tokens=400)
            written.append((temp, prompt, list(tokens)))
    reported = [token for temp, _, tokens in written if temp for token in tokens]
    story = tokenizer.decode([token for token in reported if token not in tokenizer.eos_token_ids])
    people = {"Lily": "Sue", "she": "he", "She": "He", "her": "his", "mom": "dad"}
    retold = re.sub(r"\b(Lily|she|She|her|mom)\b", lambda found: people[found[0]], story)
    return [
        *(
            Case(name, tokenizer.encode(before), tokenizer.encode(after), 0.0, 1200)
            for name, before, after in (
                ("edit of code", source, edited),
                ("edit of a story", story, retold),
            )
        ),
        *(
            Case(
                f"story, temperature {temp:g}",
                prompt,
                tokens if are_dictated else None,
                0.0 if are_dictated else temp,
                400,
            )
            for temp, prompt, tokens in written
        ),
    ]


def measured(
    model: Decoder, tokenizer: Tokenizer, case: Case, **options: Any
) -> tuple[list[int], float, Any]:
    """The tokens of a case, how many a second, and what the drafts were worth."""
    if case.reported is not None:
        options["processors"] = [Dictation(tuple(case.reported), repeats=True)]
    mx.random.seed(1)
    tokens = []
    sampler, start = make_sampler(case.temp), 0.0
    for response in stream_generate(
        model, tokenizer, case.prompt, max_tokens=case.count, sampler=sampler, **options
    ):
        start = start or perf_counter()
        tokens.append(response.token)
    return tokens, (len(tokens) - 1) / (perf_counter() - start), response.draft


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", choices=sorted(presets()))
    parser.add_argument("--num-draft-tokens", type=int, default=3)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    writer, tokenizer = load(demo.path())
    model = writer if args.config is None else skeleton(presets()[args.config])
    found: dict[str, list[tuple[float, ...]]] = {}
    for case in cases(writer, tokenizer, are_dictated=args.config is not None):
        for _ in range(2):
            plain, rate, _ = measured(model, tokenizer, case)
            options = {"ngram_drafts": True, "num_draft_tokens": args.num_draft_tokens}
            tokens, drafted_rate, draft = measured(model, tokenizer, case, **options)
        assert tokens == plain, case.name
        refused = draft.proposed - draft.accepted
        counts = len(tokens), draft.proposed, draft.accepted, refused / (len(tokens) + refused)
        found.setdefault(case.name, []).append((rate, drafted_rate, *counts))
    print("| text | tokens/s | with drafts | accepted | of the tokens | wasted rows, at most |")
    print("|---|---|---|---|---|---|")
    for name, rows in found.items():
        rate, drafted_rate, written, proposed, accepted, _ = map(sum, zip(*rows, strict=True))
        print(
            f"| {name} | {rate / len(rows):,.0f} | {drafted_rate / len(rows):,.0f} | "
            f"{accepted / max(proposed, 1):.0%} of {proposed:.0f} | {accepted / written:.0%} | "
            f"{max(row[-1] for row in rows):.1%} |"
        )


if __name__ == "__main__":
    main()
