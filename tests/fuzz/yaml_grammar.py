"""YAML that is small to store and large to read."""

import random


def hostile_yaml(rng: random.Random) -> str:
    """A mapping with doubled aliases, merges, depth, or very many or very long entries."""
    count = rng.choice((1, 5, 25, 60))
    kind = rng.choice(
        ("aliases", "merges", "merge lists", "depth", "flow", "keys", "long", "anchors")
    )
    if kind == "aliases":
        lines = [
            "a0: &a0 [x, x]",
            *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, count)),
        ]
    elif kind == "merges":
        lines = ["a0: &a0 {k: 1}"]
        lines += [f"a{n}: &a{n}\n  <<: *a{n - 1}\n  k{n}: 1" for n in range(1, count)]
    elif kind == "merge lists":
        lines = ["a0: &a0 {k: 1}"]
        lines += [f"a{n}: &a{n}\n  <<: [*a{n - 1}, *a{n - 1}]" for n in range(1, count)]
    elif kind == "depth":
        depth = rng.choice((50, 500, 3000))
        lines = [" " * level + f"k{level}:" for level in range(depth)]
    elif kind == "flow":
        depth = rng.choice((50, 500, 20_000))
        lines = ["a: " + "[" * depth + "]" * (depth if rng.random() < 0.5 else 0)]
    elif kind == "keys":
        lines = [f"k{n}: {n}" for n in range(rng.choice((100, 3000)))]
    elif kind == "long":
        lines = [
            "a: " + rng.choice(("x", "1", "- ", ": ", "? ", "&a ", "!")) * rng.choice((99, 30_000))
        ]
    else:
        lines = ["a: &a", "  b: *a", "c: &c {<<: *c}", "? [*a, *a]\n: 1", "? {a: 1}\n: 2"]
        lines = rng.sample(lines, rng.randrange(1, len(lines)))
    return "\n".join(lines) + "\n"
