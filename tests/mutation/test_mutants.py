"""Mutants are small mistakes, each in one spot, and most of them stay when code changes."""

import ast
from pathlib import Path

from tests.mutation.mutants import PARTS, chosen, mutants

SOURCE = '''"""A text."""

LIMIT = 3


@cache
def ahead(x: int, step: int = 1, *, strict: bool = True) -> bool:
    """Another text."""
    found = pow(x + step, 2)
    if found < LIMIT and not step:
        raise ValueError(f"{x + 1}")
    found -= 1
    return found is None
'''
CHANGES = {
    "constant": ["3 -> 4", "2 -> 3", "1 -> 2 (2)"],
    "default": ["1 -> 2", "True -> False"],
    "arithmetic": ["x + step -> x - step", "found -= 1 -> found += 1"],
    "swapped arguments": ["pow(x + step, 2) -> pow(2, x + step)"],
    "comparison": ["found < LIMIT -> found <= LIMIT", "found is None -> found is not None"],
    "condition": [
        "found < LIMIT and not step -> not (found < LIMIT and (not step))",
        "found < LIMIT and not step -> found < LIMIT or not step",
    ],
    "removed statement": ['raise ValueError(f"{x + 1}") -> pass', "found -= 1 -> pass"],
}


def test_every_kind_of_mistake_is_made() -> None:
    found: dict[str, list[str]] = {}
    for mutant in mutants("a.py", SOURCE):
        ast.parse(mutant.source)
        assert mutant.source != SOURCE
        found.setdefault(mutant.kind, []).append(mutant.name.partition(": ")[2].strip())
    assert {kind: sorted(names) for kind, names in found.items()} == {
        kind: sorted(names) for kind, names in CHANGES.items()
    }


def test_other_code_leaves_most_mutants(tmp_path: Path) -> None:
    for folders in PARTS.values():
        for folder in folders:
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "a.py").write_text(SOURCE)
    before = {mutant.name for mutant in chosen(tmp_path, 30, 0)}
    assert len(before) == 30
    (tmp_path / "ops" / "b.py").write_text("def more(y):\n    return y + 1 > 2\n")
    after = {mutant.name for mutant in chosen(tmp_path, 30, 0)}
    assert after != before
    assert len(after & before) >= 27
    assert {mutant.name for mutant in chosen(tmp_path, 30, 1)} != before
