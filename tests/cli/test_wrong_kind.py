"""A model of another kind than a command takes: the message names the command for it."""

from pathlib import Path

import pytest

from mlx_mmfree.cli import main
from mlx_mmfree.hub import save_model
from mlx_mmfree.models import find
from tests.hub.embedder_folder import embedder_folder
from tests.hub.encoder_folder import encoder_folder
from tests.hub.marian_folder import marian_folder

COMMANDS = (
    ("generate", "--prompt", "a"),
    ("chat",),
    ("perplexity", "--data-path", __file__),
    ("cache_prompt", "--prompt", "a", "--prompt-cache-file", "state.safetensors"),
    ("lora", "--train", "--data", "."),
    ("bench", "--quick"),
    ("translate", "--text", "a"),
    ("fill", "--text", "a"),
    ("classify", "--text", "a"),
    ("embed", "--text", "a"),
)

# an image model is fine-tuned too
PAIRS = [
    (command, right)
    for command in COMMANDS
    for right in ("translate", "fill", "classify", "embed")
    if command[0] != right and (command[0], right) != ("lora", "classify")
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("kinds")
    vit = find("vit")
    save_model(root / "vit", vit.build(vit.config.from_hub(dict(vit.tiny))))
    return {
        "translate": marian_folder(root / "marian"),
        "fill": encoder_folder(root / "encoder"),
        "classify": root / "vit",
        "embed": embedder_folder(root / "embedder"),
    }


@pytest.mark.parametrize(
    ("command", "right"), PAIRS, ids=[f"{command[0]}-{right}" for command, right in PAIRS]
)
def test_the_right_command_is_named(
    command: tuple[str, ...],
    right: str,
    folders: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    name, *flags = command
    assert main([name, "--model", str(folders[right]), *flags]) == 2
    assert f"Use 'mmfree {right}' for it" in capsys.readouterr().err
