"""The sessions of a server, as its flags ask for them."""

from pathlib import Path

import pytest

from mlx_mmfree.cli.serve import build_parser, opened_sessions
from mlx_mmfree.errors import CheckpointError, UsageError
from mlx_mmfree.generation import cache_prompt, save_prompt_cache
from tests.generation.models import attention, recurrent

TEXT = list(range(12))


def test_what_is_kept_outlives_the_server(tmp_path: Path) -> None:
    model = recurrent(1)
    cache = cache_prompt(model, TEXT)
    args = build_parser().parse_args(["--session-dir", str(tmp_path / "sessions")])
    with opened_sessions(args, model) as sessions:
        assert sessions is not None
        sessions.keep(cache.tokens, cache.state)
    with opened_sessions(args, model) as sessions:
        assert sessions is not None and sessions.find([*TEXT, 1]).count == len(TEXT)


def test_a_prompt_cache_is_known_from_the_start(tmp_path: Path) -> None:
    model, file = attention(1), tmp_path / "prompt.safetensors"
    save_prompt_cache(file, model, cache_prompt(model, TEXT))
    args = build_parser().parse_args(["--prompt-cache-file", str(file)])
    with opened_sessions(args, model) as sessions:
        assert sessions is not None and sessions.find([*TEXT, 1]).count == len(TEXT)
    with pytest.raises(CheckpointError, match="another one"), opened_sessions(args, recurrent(1)):
        pass


def test_without_memory_nothing_is_kept(tmp_path: Path) -> None:
    args = build_parser().parse_args(["--session-memory", "0"])
    with opened_sessions(args, recurrent(1)) as sessions:
        assert sessions is None
    for flag in ("--session-dir", "--prompt-cache-file"):
        args = build_parser().parse_args(["--session-memory", "0", flag, str(tmp_path)])
        with (
            pytest.raises(UsageError, match="must come with memory for sessions"),
            opened_sessions(args, recurrent(1)),
        ):
            pass
