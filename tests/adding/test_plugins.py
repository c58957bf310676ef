"""Others' code is found where the user names it or installs it, and nowhere else."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

import mlx_mmfree
from mlx_mmfree.cli import main
from mlx_mmfree.errors import CheckpointError, MMFreeError, UnsupportedModelError, UsageError
from mlx_mmfree.files import plugins
from mlx_mmfree.hub import load_model, save_model
from mlx_mmfree.hub.adapters.adapter import attach
from mlx_mmfree.hub.adapters.adapter_folder import read_adapter, write_adapter, write_peft_adapter
from mlx_mmfree.hub.checkpoint.weight_format import weight_formats
from mlx_mmfree.layers.lora import adapted_layers, add_adapters
from mlx_mmfree.models import find, known_model_types
from mlx_mmfree.models.parts.mixers import find_token_mixer, token_mixers
from tests.hub.checkpoints import GOLDENS, tiny_transformer

HERE = Path(__file__).parent
NAMED = ("--plugin", "code/my_mixer.py")
MIXER = """
from mlx_mmfree.token_mixers import HGRN


class Mine(HGRN):
    name = "mine"
"""
TRAIN = """
output: run
model: {model_type: metaformer, vocab_size: 300, hidden_size: 32, num_hidden_layers: 1,
  token_mixer: mine}
stages: [{until: 1.0, weights: {text.txt: 1}}]
sequence_length: 16
batch_size: 2
steps: STEPS
warmup_steps: 0
"""
KINDS = {
    "token_mixers": "leaky_average",
    "models": "two_gates",
    "weight_formats": "signs",
    "commands": "count",
}
FOLDERS = {"weight_formats": "formats", "commands": "cli"}


@pytest.fixture(scope="module")
def added() -> None:
    """The search paths of the package stay as they are, unlike for the other tests of this folder."""


@pytest.fixture
def mixer(tmp_path: Path) -> Path:
    file = tmp_path / "code" / "my_mixer.py"
    file.parent.mkdir()
    file.write_text(MIXER)
    return file


@pytest.fixture
def run(tmp_path: Path, mixer: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a run whose model has a mixer of a plug-in, which it names."""
    monkeypatch.chdir(tmp_path)
    folder = mixer.parent
    (folder / "text.txt").write_text("The dog sees the cat. " * 200)
    file = folder / "train.yaml"
    file.write_text("plugins: [my_mixer.py]" + TRAIN.replace("STEPS", "2"))
    return file


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the package as an installation does, without its clone."""
    site = tmp_path_factory.mktemp("site")
    source = Path(mlx_mmfree.__file__).parent
    shutil.copytree(
        source,
        site / "mlx_mmfree",
        ignore=shutil.ignore_patterns("__pycache__", "*.md", "*.png"),
    )
    return site


@pytest.fixture(scope="module")
def other_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds an installed package with something of each kind."""
    folder = tmp_path_factory.mktemp("others")
    (folder / "added_pack").mkdir()
    (folder / "added_pack/__init__.py").touch()
    info = folder / "added_pack-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: added-pack\nVersion: 1.0\n")
    lines = []
    for kind, name in KINDS.items():
        shutil.copy(HERE / FOLDERS.get(kind, kind) / f"{name}.py", folder / "added_pack")
        lines += [f"[mlx_mmfree.{kind}]", f"{name} = added_pack.{name}"]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder


def python(*words: str, path: tuple[Path, ...], cwd: Path) -> subprocess.CompletedProcess[str]:
    variables = {"PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


FOUND = """
import json, mlx_mmfree
from mlx_mmfree.hub.checkpoint.weight_format import weight_formats
from mlx_mmfree.models import known_model_types
from mlx_mmfree.models.parts.mixers import token_mixers
for file in FILES:
    mlx_mmfree.load_plugin(file)
found = {*token_mixers(), *known_model_types(), *weight_formats()}
print(json.dumps([mlx_mmfree.__file__, sorted(found & {"leaky_average", "two_gates", "signs"})]))
"""


def found(path: tuple[Path, ...], cwd: Path, files: list[str]) -> list[str]:
    done = python("-c", f"FILES = {files!r}\n{FOUND}", path=path, cwd=cwd)
    assert done.returncode == 0, done.stderr
    file, names = json.loads(done.stdout)
    assert Path(file).is_relative_to(path[0])
    return list(names)


def test_files_that_are_named_are_found(site: Path, other_package: Path, tmp_path: Path) -> None:
    files = [str(other_package / f"added_pack/{name}.py") for name in KINDS.values()]
    assert found((site,), tmp_path, []) == []
    assert found((site,), tmp_path, files) == ["leaky_average", "signs", "two_gates"]


@pytest.mark.exhaustive
def test_what_installed_packages_declare_is_found(
    site: Path, other_package: Path, tmp_path: Path
) -> None:
    path = (site, other_package)
    assert found(path, tmp_path, []) == ["leaky_average", "signs", "two_gates"]
    helped = python("-m", "mlx_mmfree", "--help", path=path, cwd=tmp_path)
    assert "  count         count the tokens of a text\n" in helped.stdout
    words = ("-m", "mlx_mmfree", "count", "--model", str(GOLDENS / "tokenizer_bpe"), "The dog")
    assert int(python(*words, path=path, cwd=tmp_path).stdout) > 0
    assert python(*words, path=(site,), cwd=tmp_path).returncode == 2


def test_an_installed_package_that_fails_is_named(
    site: Path, other_package: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(other_package, broken)
    (broken / "added_pack/two_gates.py").write_text("\nARCHITECTURE = gone\n")
    done = python("-m", "mlx_mmfree", "generate", "-m", "1", path=(site, broken), cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "'two_gates' of the installed package added-pack must run to its end" in done.stderr
    assert "line 2 of 'added_pack/two_gates.py' ends with NameError" in done.stderr


def test_a_format_and_a_model_of_plugins_are_written_and_read(tmp_path: Path) -> None:
    for file in ("models/two_gates.py", "formats/signs.py"):
        mlx_mmfree.load_plugin(HERE / file)
    assert "two_gates" in known_model_types() and "signs" in weight_formats()
    architecture = find("two_gates")
    model = architecture.build(architecture.config.from_hub(architecture.tiny))
    save_model(tmp_path / "model", model)
    tokens = mx.array([[1, 2, 3]])
    assert mx.array_equal(load_model(tmp_path / "model", packed=False)(tokens)[0], model(tokens)[0])


def test_a_module_is_a_plugin_too(
    mixer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "a_package_of_mixers"
    package.mkdir()
    (package / "__init__.py").write_text("from .deep import Mine")
    shutil.copy(mixer, package / "deep.py")
    monkeypatch.syspath_prepend(tmp_path)
    module = mlx_mmfree.load_plugin("a_package_of_mixers")
    assert find_token_mixer("mine") is module.Mine
    assert mlx_mmfree.load_plugin("a_package_of_mixers") is module


def test_a_run_is_trained_resumed_and_used_with_what_its_user_names(
    run: Path, mixer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *NAMED, "--config", str(run)]) == 0, capsys.readouterr().err
    model = str(run.parent / "run/model")
    text = ["generate", "--model", model, "-p", "The dog", "-m", "2"]
    assert main([*text, "--plugin", "code/my_mixer.py"]) == 0
    # another process begins without plug-ins
    plugins.LOADED.clear()
    capsys.readouterr()
    run.write_text(TRAIN.replace("STEPS", "4"))
    for words in (text, ["train", "--config", str(run)]):
        assert main(words) == 2
        shown = capsys.readouterr().err
        assert "'mine'" in shown and "A plug-in may have it: name its file with --plugin" in shown
        assert shown.count("\n") == 1
    given = ["--plugin", str(mixer)]
    assert main(["train", *NAMED, "--config", str(run), *given]) == 0, capsys.readouterr().err


def test_a_file_runs_no_code_that_the_user_has_not_named(
    run: Path, mixer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = run.parent / "ran"
    mixer.write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n{MIXER}")
    for more in ((), ("--plugin", "code/other.py")):
        (run.parent / "other.py").touch()
        assert main(["train", *more, "--config", str(run)]) == 2
        error = capsys.readouterr().err
        assert "whose code would run. Give --plugin" in error and "my_mixer.py too" in error
    # the whole file is checked before
    text = run.read_text()
    run.write_text(text + "\nstepz: 3\n")
    assert main(["train", "--config", str(run)]) == 2
    assert "stepz" in capsys.readouterr().err and not mark.exists()
    run.write_text(text)
    assert main(["train", *NAMED, "--config", str(run)]) == 0 and mark.exists()


def test_a_student_has_a_mixer_of_a_plugin(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    teacher = tiny_transformer("llama", vocab_size=518, linears=None)
    save_model(run.parent / "teacher", teacher, GOLDENS / "tokenizer_bpe")
    file = run.parent / "distil.yaml"
    settings = "model: teacher\noutput: ../student\nto: mine\ndata: text.txt\nsequence_length: 16\n"
    settings += "mixers_steps: 1\nhidden_steps: 0\nlogits_steps: 1\nbatch_size: 2\n"
    file.write_text(settings)
    assert main(["distil", "--config", str(file)]) == 2
    assert "A plug-in may have it" in capsys.readouterr().err
    file.write_text("plugins: [my_mixer.py]\n" + settings)
    assert main(["distil", *NAMED, "--config", str(file)]) == 0, capsys.readouterr().err
    assert "mine" in Path("student/model/config.json").read_text()


def test_a_checkpoint_names_no_code(
    run: Path, mixer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *NAMED, "--config", str(run)]) == 0, capsys.readouterr().err
    plugins.LOADED.clear()
    folder = run.parent / "run/model"
    mark = tmp_path / "ran"
    code = f"open({str(mark)!r}, 'w')\n"
    for path in (folder, run.parent / "run", tmp_path):
        (path / "evil.py").write_text(code)
        (path / "mine.py").write_text(code + MIXER)
    config = json.loads((folder / "config.json").read_text())
    for key in ("plugin", "plugins", "mlx_mmfree_plugins", "auto_map", "model_file"):
        for named in ("evil.py", ["evil.py"], "evil", {"AutoModel": "evil.Model"}):
            (folder / "config.json").write_text(json.dumps(config | {key: named}))
            with pytest.raises(UnsupportedModelError, match="A plug-in may have it"):
                load_model(folder)
    for name in ("evil.py", "./mine.py", "evil", str(mixer)):
        (folder / "config.json").write_text(json.dumps(config | {"token_mixer": name}))
        with pytest.raises(MMFreeError):
            load_model(folder)
        (folder / "config.json").write_text(json.dumps(config | {"model_type": name}))
        with pytest.raises(UnsupportedModelError, match="A plug-in may have it"):
            load_model(folder)
    assert not mark.exists() and not plugins.LOADED


@pytest.mark.parametrize("format", ["mlx_mmfree", "peft"])
def test_an_adapter_names_no_code(
    format: str,
    mixer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    model = tiny_transformer("llama", vocab_size=518, linears=None)
    save_model(tmp_path / "model", model, GOLDENS / "tokenizer_bpe")
    add_adapters(model, lambda name, _: name.endswith("_proj"), rank=2)
    adapter = tmp_path / "adapter"
    if format == "peft":
        write_peft_adapter(adapter, model)
    else:
        write_adapter(adapter, model, {})
    mark = tmp_path / "ran"
    code = f"open({str(mark)!r}, 'w')\n"
    for path in (adapter, tmp_path / "model", tmp_path):
        (path / "evil.py").write_text(code)
        (path / "mine.py").write_text(code + MIXER)
    mixer.write_text(code + MIXER)
    config = json.loads((adapter / "adapter_config.json").read_text())
    for key in ("plugin", "plugins", "mlx_mmfree_plugins", "auto_map", "model_file", "token_mixer"):
        for named in ("evil.py", ["evil.py", "mine.py"], {"AutoModel": "evil.Model"}, str(mixer)):
            (adapter / "adapter_config.json").write_text(json.dumps(config | {key: named}))
            if format == "peft":
                with pytest.raises(CheckpointError, match=f"PEFT's options {key} must be left out"):
                    read_adapter("adapter")
            else:
                assert adapted_layers(attach(load_model("model"), read_adapter("adapter")))
    # PEFT imports what these name
    config |= {"megatron_core": "evil", "auto_mapping": {"parent_library": "evil"}}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    words = ["generate", "--model", "model", "--adapter-path", "adapter", "-p", "The", "-m", "2"]
    assert main(words) == 0, capsys.readouterr().err
    assert not mark.exists() and not plugins.LOADED and "mine" not in token_mixers()


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        (
            "x = 1\n\ny = gone\n",
            "line 3 of '{file}' ends with NameError: name 'gone' is not defined",
        ),
        ("def f(:\n", "line 1 of '{file}' ends with SyntaxError: "),
        ("import sys\nsys.exit(3)\n", "line 2 of '{file}' ends with SystemExit: 3"),
        ("import no_such_module_of_mine\n", "line 1 of '{file}' ends with ModuleNotFoundError: "),
        (
            "def f():\n    import mlx.core as mx\n    mx.zeros(-1)\n    1 / 0\nf()\n",
            "of '{file}' ends",
        ),
        ("\0", "'{file}'"),
    ],
)
def test_a_file_that_fails_is_one_sentence_with_the_line(
    text: str, reported: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "broken.py"
    file.write_text(text)
    assert main(["mixers", "--plugin", str(file)]) == 2
    shown = capsys.readouterr().err
    assert reported.format(file=file) in shown and shown.count("\n") == 1
    assert "--plugin must run to its end but" in shown
    assert not plugins.LOADED


def test_a_mixer_that_fails_later_is_one_sentence_with_the_line(
    run: Path, mixer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixer.write_text(MIXER + "    def mix(self, *parts):\n        return parts[0] + self.gone\n")
    assert main(["train", *NAMED, "--config", str(run)]) == 2
    shown = capsys.readouterr().err
    assert re.search(r"line 8 of '\S*my_mixer.py' ends with AttributeError: ", shown)
    assert shown.count("\n") == 1


def test_what_is_not_there_is_reported(tmp_path: Path) -> None:
    for source in ("gone.py", str(tmp_path), tmp_path / "gone"):
        with pytest.raises(UsageError, match="must be a Python file that is there"):
            mlx_mmfree.load_plugin(source)
    for name in ("no_such_module_of_mine", "no such module", "..", ""):
        with pytest.raises(UsageError, match="must be a module that Python finds but got"):
            mlx_mmfree.load_plugin(name)


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "second.py"
    file.write_text(MIXER.replace("mine", "gqa"))
    mlx_mmfree.load_plugin(file)
    with pytest.raises(UsageError, match=r"second\.py' must be new ones but 'gqa' is taken"):
        token_mixers()


def test_a_record_of_another_class_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "strange.py"
    file.write_text("ARCHITECTURE = 'llama'")
    mlx_mmfree.load_plugin(file)
    with pytest.raises(UsageError, match="must be of the class Architecture but got 'llama'"):
        known_model_types()


def test_two_files_of_one_name_are_two_plugins(mixer: Path, tmp_path: Path) -> None:
    second = tmp_path / "my_mixer.py"
    second.write_text(MIXER.replace("mine", "other"))
    first = mlx_mmfree.load_plugin(mixer)
    assert mlx_mmfree.load_plugin(second) is not first
    assert {"mine", "other"} <= token_mixers().keys()
