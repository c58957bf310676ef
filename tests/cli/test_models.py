"""`mmfree models`: what the caches hold, and its removal."""

import json
import re
from pathlib import Path

import huggingface_hub
import pytest

from mlx_mmfree.cli import main
from mlx_mmfree.cli import models as command
from mlx_mmfree.hub.checkpoint import pack_cache
from mlx_mmfree.hub.checkpoint.pack_cache import packed_file

Captured = pytest.CaptureFixture[str]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def add_repository(
    hub: Path, name: str, *, kind: str = "models", family: str = "llama", key: str = "model_type"
) -> Path:
    repository = hub / f"{kind}--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for file, content in (
        ("config.json", json.dumps({key: family})),
        ("model.safetensors", "x" * 3_000_000),
    ):
        blob = repository / "blobs" / file[:4]
        blob.write_text(content)
        (snapshot / file).symlink_to(f"../../blobs/{blob.name}")
    return snapshot


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with two models, a dataset, and two packed formats, one of a local folder."""
    folder = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    monkeypatch.setenv("MLX_MMFREE_CACHE", str(tmp_path / "packed"))
    (tmp_path / "packed").mkdir()
    snapshot = add_repository(folder, "me/tiny")
    add_repository(folder, "me/other", family="hgrn_bit")
    add_repository(folder, "me/data", kind="datasets")
    file = packed_file(snapshot)
    assert file is not None
    file.write_bytes(b"x" * 1_000_000)
    (tmp_path / "packed" / "mine-0123.safetensors").write_bytes(b"x" * 2_000_000)
    return folder


def test_a_packed_format_that_goes_meanwhile(
    hub: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scan = huggingface_hub.scan_cache_dir

    def scan_slowly(folder: Path) -> object:
        for file in (tmp_path / "packed").iterdir():
            file.unlink()
        return scan(folder)

    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", scan_slowly)
    models = {model.name: model.packed_bytes for model in pack_cache.cached_models()}
    assert models == {"me/tiny": 1_000_000, "me/other": 0, "mine-0123": 2_000_000}


def test_the_architecture_of_a_model_of_images(hub: Path) -> None:
    add_repository(hub, "timm/small", family="swin_tiny_patch4_window7_224", key="architecture")
    families = {model.name: model.family for model in pack_cache.cached_models()}
    assert families["timm/small"] == "swin_tiny_patch4_window7_224"


def test_what_is_cached(hub: Path, capsys: Captured) -> None:
    assert main(["models"]) == 0
    heads, *lines, total = capsys.readouterr().out.splitlines()
    assert heads.split() == ["model", "family", "size", "packed", "format", "last", "used"]
    rows = {line.split()[0]: line.split()[1:6] for line in lines}
    assert rows.keys() == {"me/tiny", "me/other", "mine-0123"}
    assert rows["me/tiny"] == ["llama", "3.0", "MB", "1.0", "MB"]
    assert rows["me/other"][:4] == ["hgrn_bit", "3.0", "MB", "-"]
    assert rows["mine-0123"][:4] == ["?", "-", "2.0", "MB"]
    assert total == "3 in all, 9.0 MB."
    assert main(["models", "--json"]) == 0
    models = json.loads(capsys.readouterr().out)["models"]
    assert {m["name"]: m["packed_bytes"] for m in models} == {
        "me/tiny": 1_000_000,
        "me/other": 0,
        "mine-0123": 2_000_000,
    }


def test_empty_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("MLX_MMFREE_CACHE", "0")
    assert main(["models"]) == 0
    assert capsys.readouterr().out == "The caches hold no models.\n"


def test_removal(hub: Path, tmp_path: Path, capsys: Captured) -> None:
    assert main(["models", "--remove", "me/tiny", "mine-0123", "--yes"]) == 0
    shown = capsys.readouterr().out
    assert shown == "Removed me/tiny, 4.0 MB.\nRemoved mine-0123, 2.0 MB.\n"
    assert sorted(path.name for path in hub.iterdir()) == [
        "datasets--me--data",
        "models--me--other",
    ]
    assert [*(tmp_path / "packed").iterdir()] == []


@pytest.mark.parametrize(("answer", "stays"), [("", True), ("n", True), ("y", False)])
def test_it_asks(
    answer: str,
    stays: bool,
    hub: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    monkeypatch.setattr(command.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt: answer)
    assert main(["models", "--remove", "me/other"]) == 0
    assert ("Nothing was removed." in capsys.readouterr().out) == stays
    assert (hub / "models--me--other").exists() == stays


def test_mistakes(hub: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    assert main(["models", "--remove", "me/absent", "--yes"]) == 2
    shown = capsys.readouterr().err
    assert (
        "[models] --remove must name models of the caches but got 'me/absent'. The caches hold: "
        in shown
    )
    assert main(["models", "--remove", "me/data", "--yes"]) == 2
    monkeypatch.setattr(command.sys.stdin, "isatty", lambda: False, raising=False)
    assert main(["models", "--remove", "me/tiny"]) == 2
    assert (
        "[models] --yes must be given where standard input is not a terminal"
        in capsys.readouterr().err
    )
    assert len([*hub.iterdir()]) == 3


def test_links_and_what_lies_elsewhere_stay(hub: Path, tmp_path: Path, capsys: Captured) -> None:
    elsewhere = tmp_path / "elsewhere"
    snapshot = add_repository(elsewhere, "me/linked")
    (hub / "models--me--linked").symlink_to(elsewhere / "models--me--linked")
    secret = tmp_path / "secret.safetensors"
    secret.write_text("mine")
    (tmp_path / "packed" / "link-0.safetensors").symlink_to(secret)
    names = {model.name for model in pack_cache.cached_models()}
    assert "link-0" not in names
    if "me/linked" in names:
        assert main(["models", "--remove", "me/linked", "--yes"]) == 2
        assert "or is a link" in capsys.readouterr().err
    assert (snapshot / "config.json").exists() and secret.exists()


def test_known_repositories_are_listed_with_their_format(capsys: Captured) -> None:
    assert main(["models", "--known", "--json"]) == 0
    known = json.loads(capsys.readouterr().out)["known"]
    names = [each["repository"] for each in known]
    assert len(names) == len(set(names)) and not any("{" in name for name in names)
    expected = {
        "repository": "microsoft/bitnet-b1.58-2B-4T-bf16",
        "use": "chat",
        "file_gb": None,
        "memory_gb": None,
        "family": "bitnet",
        "weights": "bf16 masters",
        "compared_with": "reference, transformers, definition",
    }
    assert expected in known
    assert main(["models", "--known"]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = "repository use file memory family weights compared with"
    assert lines[0].split() == head.split()
    assert len(lines) == len(known) + 1
    assert main(["models", "--known", "--remove", "me/tiny"]) == 2


def test_known_chat_models_come_first_with_their_sizes(capsys: Captured) -> None:
    assert main(["models", "--known", "--json"]) == 0
    known = json.loads(capsys.readouterr().out)["known"]
    order = [(each["use"] is None, each["file_gb"] is None) for each in known]
    assert order == sorted(order) and order[0] == (False, False)
    sizes = {n["repository"]: (n["file_gb"], n["memory_gb"]) for n in known if n["file_gb"]}
    page = Path(command.__file__).parents[1] / "hub" / "README.md"
    rows = re.findall(
        r"^\| `([\w./-]+)` (\w+).*? \| (?:≈ )?([\d.]+) / ([\d.]+) /", page.read_text(), re.M
    )
    assert sizes == {name: (float(file), float(memory)) for name, _, file, memory in rows}
    uses = {each["repository"]: each["use"] or "base" for each in known}
    assert all(uses[name] == use for name, use, *_ in rows)


def test_known_repositories_of_a_family(capsys: Captured) -> None:
    assert main(["models", "--known", "--family", "bitnet"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and all(" bitnet " in line for line in lines[1:])
    assert "1.18 GB" in lines[1] and "1.80 GB" in lines[1]
    assert main(["models", "--known", "--family", "bitnot"]) == 2
    assert "'family' must be one of big_bird, bitnet" in capsys.readouterr().err.replace(
        "--family", "'family'"
    )
    assert main(["models", "--family", "bitnet"]) == 2
    assert "must come with --known" in capsys.readouterr().err
