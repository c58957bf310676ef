"""Writers that are killed at random moments lose no session that was on the disk."""

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import mlx_mmfree
from mlx_mmfree.generation.sessions import Sessions
from tests.generation.models import recurrent
from tests.generation.sessions.keep_until_killed import AHEAD, text
from tests.generation.sessions.texts import read, same_bits

ROOT = Path(mlx_mmfree.__file__).parents[1]
WRITERS = 2
COMPARED = 20


def reported_when_killed(folder: Path, chance: random.Random) -> list[int]:
    """Lets several processes write to one folder. All are killed, the last ones within a file.

    Returns:
        For each, how many sessions it had told to be on the disk.
    """
    command = [sys.executable, "-m", "tests.generation.sessions.keep_until_killed", str(folder)]
    lives = [chance.randint(5, 40) for _ in range(WRITERS)]
    writers = [
        subprocess.Popen(
            [*command, str(number), str(life if number else 0)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number, life in enumerate(lives)
    ]
    counts = []
    for number, (writer, life) in enumerate(zip(writers, lives, strict=True)):
        with writer:
            assert writer.stdout is not None
            reported = [] if number else [writer.stdout.readline() for _ in range(life)]
            if not number:
                writer.kill()
            reported += writer.stdout.readlines()
        assert writer.returncode == -signal.SIGKILL
        counts.append(len(reported))
    return counts


@pytest.mark.parametrize("seed", [1])
def test_no_session_that_was_reported_is_lost(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    counts = reported_when_killed(tmp_path, chance)
    assert min(counts) >= 0 < max(counts)
    model = recurrent(1)
    # a damaged file would be reported by a warning, which is an error here
    sessions = Sessions(model, memory_bytes=2**20, folder=tmp_path)
    for writer, count in enumerate(counts):
        for number in range(count + 2 * AHEAD):
            tokens = text(writer, number)
            known = sessions.find([*tokens, 0])
            assert known.count == len(tokens) if number < count else known.count in (0, len(tokens))
        for number in chance.sample(range(count), min(count, COMPARED)):
            tokens = text(writer, number)
            assert same_bits(sessions.find([*tokens, 0]).state, read(model, tokens))
    assert sessions.stats().sessions >= sum(counts)
    assert not list(tmp_path.rglob("*.mmfree"))
