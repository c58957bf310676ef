"""Compares the tests that pytest skipped (its output with -rs) with the expected ones."""

import re
import sys
from pathlib import Path

SKIP = re.compile(r"SKIPPED \[\d+\] ([^:\s]+)(?::\d+)?: (.*)")


def main(log: str, expected: str) -> None:
    lines = Path(log).read_text().splitlines()
    skipped = {": ".join(match.groups()) for line in lines if (match := SKIP.match(line))}
    wanted = {
        line
        for line in Path(expected).read_text().splitlines()
        if line and not line.startswith("#")
    }
    faults = [f"skipped, but not expected to be: {line}" for line in sorted(skipped - wanted)]
    faults += [f"expected to be skipped, but was not: {line}" for line in sorted(wanted - skipped)]
    if faults:
        sys.exit("\n".join([*faults, f"(the expected skips are listed in {expected})"]))
    print(f"{len(skipped)} kinds of skips, all expected")


if __name__ == "__main__":
    main(*sys.argv[1:])
