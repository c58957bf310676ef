"""Uploads are planned before anything is sent, and go on where an earlier one stopped."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_mmfree import native
from mlx_mmfree.cli import main
from mlx_mmfree.errors import CheckpointError, UploadError
from mlx_mmfree.hub import load_model, save_model
from mlx_mmfree.hub.adapters.adapter_folder import read_adapter, write_adapter
from mlx_mmfree.hub.publish.upload import check_repository, plan_upload
from mlx_mmfree.training.fine_tuning.fine_tune import adapt_layers
from tests.generation.models import DELTA_RULES
from tests.hub.checkpoints import GOLDENS, tiny_checkpoint, tiny_of
from tests.hub.hub_client import HubClient
from tests.hub.hub_server import TOKEN, Answer, HubServer


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("upload") / "model")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n\n# Tiny\n")
    for file in (GOLDENS / "tokenizer_spm").glob("tokenizer*"):
        shutil.copyfile(file, folder / file.name)
    return folder


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    return shutil.copytree(source, tmp_path / "model")


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture(scope="module")
def home(source: Path) -> Path:
    return source.with_name("home")


@pytest.fixture(scope="module")
def client(hub: HubServer, home: Path) -> Iterator[HubClient]:
    with HubClient(hub.url, home, TOKEN) as client:
        yield client


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def upload(client: HubClient, folder: Path, repository: str, *flags: str) -> tuple[int, str, str]:
    result: Any = client.call(
        "command", "upload", "--path", str(folder), "--upload-repo", repository, *flags
    )
    status, out, err = result
    assert TOKEN not in out + err
    return status, out, err


class TestPlan:
    def test_leaves_out_what_does_not_belong_to_a_model(self, folder: Path) -> None:
        names = set(contents(folder))
        for name in (".cache", "checkpoints", "__pycache__", ".git"):
            (folder / name).mkdir()
            (folder / name / "file").touch()
        for name in (
            *(".env", ".notes.txt", "model.safetensors.tmp", "a.incomplete", "b.lock", "c~"),
            *("train.log", "optimizer.pt", "scheduler.pt", "rng_state.pth", "rng_state_0.pth"),
            *("training_args.bin", "trainer_state.json", "all_results.json", "log.jsonl"),
            *("optimizer.safetensors", "best.safetensors", "0000100_adapters.safetensors"),
            *("config.json.bak", "model.safetensors.bak", "README.md.orig", "credentials.json"),
            *("global_step10.zip", "events.out.tfevents.1", "optimizer.bin", "scaler.pt", "a.pkl"),
        ):
            (folder / name).touch()
        for name in (
            *("generation_config.json", "preprocessor_config.json", "chat_template.jinja"),
            *("modeling_tiny.py", "curve.png", "USE_POLICY.md", "LICENSE", "NOTICE", "merges.txt"),
            *("special_tokens_map.json", "ternary_scales.safetensors"),
        ):
            (folder / name).write_text("{}")
            names.add(name)
        plan = plan_upload(folder, "me/tiny")
        assert set(plan.files) == names
        found = contents(folder)
        assert plan.nbytes == sum(len(found[name]) for name in names)
        assert {name.rstrip("/") for name in plan.left_out} == {
            entry.name for entry in folder.iterdir()
        } - names

    def test_named_chat_templates_are_sent(self, folder: Path) -> None:
        templates = folder / "additional_chat_templates"
        templates.mkdir()
        for name in ("tool_use.jinja", "._tool_use.jinja", "notes.txt"):
            (templates / name).write_text("with tools")
        plan = plan_upload(folder, "me/tiny")
        name = "additional_chat_templates/tool_use.jinja"
        assert plan.files[name] == 10
        assert [file for file in plan.files if "/" in file] == [name]

    def test_links(self, folder: Path, tmp_path: Path) -> None:
        (folder / "LICENSE").symlink_to("README.md")
        assert "LICENSE" in plan_upload(folder, "me/tiny").files
        (tmp_path / "secret").write_text("secret")
        (folder / "notes.txt").symlink_to(tmp_path / "secret")
        with pytest.raises(UploadError, match=r"is a link to .*secret"):
            plan_upload(folder, "me/tiny")
        (folder / "notes.txt").unlink()
        (folder / "notes.txt").symlink_to("absent")
        with pytest.raises(UploadError, match="No such file"):
            plan_upload(folder, "me/tiny")

    def test_folders_that_are_no_model(self, folder: Path, tmp_path: Path) -> None:
        for path in (tmp_path / "absent", folder / "config.json"):
            with pytest.raises(UploadError, match="is not a folder"):
                plan_upload(path, "me/tiny")
        with pytest.raises(UploadError, match=r"neither config\.json nor a GGUF file"):
            plan_upload(tmp_path, "me/tiny")
        (folder / "config.json").write_text("{")
        with pytest.raises(CheckpointError, match="must be JSON"):
            plan_upload(folder, "me/tiny")

    def test_unsound_weights(self, folder: Path) -> None:
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1])
        with pytest.raises(CheckpointError, match="ends before tensor"):
            plan_upload(folder, "me/tiny")
        weights.unlink()
        with pytest.raises(CheckpointError, match="has none of them"):
            plan_upload(folder, "me/tiny")
        (folder / "model.gguf").write_bytes(b"GGUF")
        assert "model.gguf" in plan_upload(folder, "me/tiny").files
        (folder / "model.gguf").write_bytes(b"GGML")
        with pytest.raises(UploadError, match="must be a GGUF file"):
            plan_upload(folder, "me/tiny")

    @pytest.mark.parametrize("repository", ["tiny", "", "me/", "a/b/c", "../x", "me/ti ny"])
    def test_names(self, source: Path, repository: str) -> None:
        with pytest.raises(UploadError, match="'owner/name'"):
            plan_upload(source, repository)

    def test_empty_texts(self, source: Path) -> None:
        for name in ("revision", "message"):
            with pytest.raises(UploadError, match=f"'{name}' must not be empty"):
                plan_upload(source, "me/tiny", **{name: ""})


def test_dry_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / ".cache").mkdir()
    arguments = ["--path", str(folder), "--upload-repo", "me/tiny", "--private", "--revision", "v2"]
    assert main(["upload", *arguments, "--message", "New", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "6 files to me/tiny (private if it is new) on branch v2" in out
    assert f"{(folder / 'model.safetensors').stat().st_size:,}  model.safetensors" in out
    assert "Left out: .cache/." in out
    assert "Commit message: New" in out


def test_uploads_and_skips_what_the_hub_has(
    hub: HubServer, client: HubClient, folder: Path
) -> None:
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "config.json").write_text("{}")
    (folder / "notes [1].txt").write_text("a name with signs that patterns use")
    status, out, _ = upload(client, folder, "me/first")
    assert (status, out) == (0, f"Uploaded to {hub.url}/me/first.\nLeft out: checkpoints/.\n")
    repository = hub.repositories["me/first"]
    assert repository.branches == {"main": contents(folder)}
    assert not repository.is_private
    assert len(repository.commits) == 2
    assert len(hub.asked("PUT")) == 3

    status, _, _ = upload(client, folder, "me/first")
    assert status == 0
    assert len(repository.commits) == 2
    assert len(hub.asked("PUT")) == 3

    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    upload(client, folder, "me/first", "--message", "One file more")
    assert repository.commits[2:] == [("main", "One file more")]
    assert repository.branches["main"] == contents(folder)
    [last] = [request for request in hub.requests if "commit" in request.path][-1:]
    assert len(last.body.splitlines()) == 2
    assert len(hub.asked("PUT")) == 3


def test_private_repositories_and_branches(hub: HubServer, client: HubClient, source: Path) -> None:
    flags = ("--private", "--revision", "packed/v1")
    assert upload(client, source, "me/secret", *flags)[:2] == (
        0,
        f"Uploaded to {hub.url}/me/secret/tree/packed/v1.\n",
    )
    repository = hub.repositories["me/secret"]
    assert repository.is_private
    assert repository.branches == {"main": {}, "packed/v1": contents(source)}
    assert upload(client, source, "me/secret", *flags)[0] == 0
    assert len(repository.commits) == 2


def test_private_never_means_public(hub: HubServer, client: HubClient, source: Path) -> None:
    upload(client, source, "me/known")
    status, _, err = upload(client, source, "me/known", "--private")
    assert status == 2
    assert "exists and is public" in err
    assert len(hub.repositories["me/known"].commits) == 2


def test_goes_on_after_an_interruption(source: Path, tmp_path: Path) -> None:
    with HubServer() as hub, HubClient(hub.url, tmp_path, TOKEN) as client:
        hub.stall_uploads = True
        with HubClient(hub.url, tmp_path, TOKEN) as killed:
            killed.start("command", "upload", "--path", str(source), "--upload-repo", "me/late")
            assert hub.stalled.wait(60)
        hub.stall_uploads = False
        assert hub.repositories["me/late"].branches == {"main": {}}
        assert upload(client, source, "me/late")[0] == 0
        assert hub.repositories["me/late"].branches == {"main": contents(source)}


@pytest.mark.exhaustive
def test_refusals(hub: HubServer, client: HubClient, folder: Path, tmp_path: Path) -> None:
    def refused(client: HubClient, repository: str, *flags: str) -> str:
        status, out, err = upload(client, folder, repository, *flags)
        assert (status, out) == (2, "")
        assert err.splitlines()[-1].startswith("error: [upload]")
        return err.splitlines()[-1]

    assert "You don't have the rights to write here. The login must" in refused(
        client, "other/model"
    )
    assert "valid id" in refused(client, "me/two--dashes")
    assert "was not found on the Hub" in refused(client, "me/tiny", "--revision", "refs/pr/7")
    (folder / "README.md").write_text("---\nlicense: MIT\n---\n")
    assert "Invalid metadata in README.md" in refused(client, "me/tiny")
    (folder / "README.md").unlink()
    with HubClient(hub.url, tmp_path / "nobody") as nobody:
        assert "hf auth login" in refused(nobody, "me/tiny")
    with HubClient(hub.url, tmp_path / "wrong", "hf_wrong") as wrong:
        assert "does not accept the login" in refused(wrong, "me/tiny")
    with HubClient("http://127.0.0.1:9", tmp_path / "lost", TOKEN) as lost:
        assert "Check the network" in refused(lost, "me/tiny")
    with HubClient(hub.url, tmp_path / "offline", TOKEN, HF_HUB_OFFLINE="1") as offline:
        assert "HF_HUB_OFFLINE" in refused(offline, "me/tiny")


def test_a_busy_hub_is_waited_for(hub: HubServer, client: HubClient, source: Path) -> None:
    hub.failures += [
        ("api/repos/create", Answer(429, {}, {"Retry-After": "0"})),
        ("api/repos/create", Answer(503, {}, {"Retry-After": "0"})),
        ("me/busy/branch", Answer(500, {}, {"Retry-After": "0"})),
        ("me/busy/commit", Answer(502, {}, {"RateLimit": '"api";r=0;t=0'})),
    ]
    status, _, err = upload(client, source, "me/busy", "--revision", "v2")
    assert status == 0
    assert not hub.failures
    assert err.count("trying again in 0 s") == 4
    assert hub.repositories["me/busy"].branches["v2"] == contents(source)
    assert len(hub.repositories["me/busy"].commits) == 2


def test_a_card_is_written_where_there_is_none(
    hub: HubServer, client: HubClient, folder: Path
) -> None:
    (folder / "README.md").unlink()
    (folder / "LICENSE").write_text("Apache License\nVersion 2.0, January 2004")
    before = contents(folder)
    _, out, _ = upload(client, folder, "me/bare", "--dry-run")
    assert "A model card, README.md, is written there unless the repository has one." in out
    assert upload(client, folder, "me/bare")[0] == 0
    sent = hub.repositories["me/bare"].branches["main"]
    card = sent["README.md"].decode()
    assert "license: apache-2.0" in card
    assert "# bare\n" in card and "- ternary\n" in card
    if native.unavailable() is None:
        assert "## Cost of a token\n\nMatMul-free: no product with a float matrix" in card
    assert "mmfree upload --model model --upload-repo me/bare" in card
    assert {name: text for name, text in sent.items() if name != "README.md"} == before
    assert contents(folder) == before

    # one that was edited on the Hub stays
    sent["README.md"] = b"edited"
    (folder / "LICENSE").write_text("another")
    assert upload(client, folder, "me/bare")[0] == 0
    branch = hub.repositories["me/bare"].branches["main"]
    assert (branch["README.md"], branch["LICENSE"]) == (b"edited", b"another")


def test_commands_of_a_card_name_the_repository(
    hub: HubServer, client: HubClient, source: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    flags = ("--model", str(source), "--mlx-path", str(folder), "--no-verify")
    assert client.call("command", "convert", *flags)[0] == 0
    before = contents(folder)
    assert 'load("out")' in before["README.md"].decode()
    _, out, _ = upload(client, folder, "me/named", "--dry-run")
    assert "The commands of README.md name me/named." in out
    assert upload(client, folder, "me/named")[0] == 0
    sent = hub.repositories["me/named"].branches["main"]
    card = sent["README.md"].decode()
    assert 'load("me/named")' in card and 'load("out")' not in card
    assert "\n# named\n" in card
    # the command that made the folder is what it was
    assert "--mlx-path out" in card
    assert {name: text for name, text in sent.items() if name != "README.md"} == {
        name: text for name, text in before.items() if name != "README.md"
    }
    assert contents(folder) == before
    # a card that somebody changed on the Hub is replaced by the folder's, as before
    sent["README.md"] = b"edited"
    assert upload(client, folder, "me/named")[0] == 0
    assert hub.repositories["me/named"].branches["main"]["README.md"].decode() == card


def test_odd_logins_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for token in ("hf_a\x01b", "hf_\u00e9"):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(UploadError, match="plain letters and digits") as caught:
            check_repository("me/tiny")
        assert "hf_" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    check_repository("me/tiny")


def test_the_login_is_written_nowhere(client: HubClient, home: Path, source: Path) -> None:
    upload(client, source, "me/again")
    for file in home.rglob("*"):
        assert file.is_dir() or TOKEN not in file.read_text(errors="replace"), file


@pytest.mark.parametrize("kind", DELTA_RULES)
def test_recurrent_models_are_sent_whole_with_a_card(
    hub: HubServer, client: HubClient, tmp_path: Path, kind: str
) -> None:
    # the stand-in for the Hub knows repositories with "gated" in their names as gated ones
    name = kind.removeprefix("gated_")
    save_model(tmp_path / "model", tiny_of(kind, vocab_size=518), GOLDENS / "tokenizer_bpe")
    before = contents(tmp_path / "model")
    status, _, err = upload(client, tmp_path / "model", f"me/{name}")
    assert status == 0, err
    sent = hub.repositories[f"me/{name}"].branches["main"]
    card = sent["README.md"].decode()
    assert f"# {name}\n" in card and f'load("me/{name}")' in card
    assert {file: text for file, text in sent.items() if file != "README.md"} == before


class TestAdapters:
    """An adapter is sent without what its run left beside it, and without names of this machine."""

    @pytest.fixture
    def base(self, tmp_path: Path) -> Path:
        return tiny_checkpoint(tmp_path / "base")

    @pytest.fixture
    def run(self, base: Path, tmp_path: Path) -> Path:
        folder, model = tmp_path / "run", load_model(base)
        adapt_layers(model, num_layers=1, rank=2)
        (folder / "last").mkdir(parents=True)
        (folder / "log.jsonl").write_text("{}\n")
        record = {"model": str(base), "data": str(tmp_path / "data"), "optimizer": "adamw"}
        write_adapter(folder, model, {**record, "seed": 7, "report_to": ["x"], "step": 3})
        write_adapter(folder / "last", model, record)
        return folder

    def test_of_a_local_base(self, run: Path, base: Path, tmp_path: Path) -> None:
        with pytest.raises(UploadError, match=r"Name it with --base-model"):
            plan_upload(run, "me/tiny")
        (base / "README.md").write_text("---\nlicense: mit\nlanguage: [no]\n---\n\nText.\n")
        plan = plan_upload(run, "me/tiny", base_model="you/base")
        assert plan.files.keys() == {"adapters.safetensors", "adapter_config.json", "README.md"}
        assert plan.left_out == ("last/", "log.jsonl")
        config = json.loads(plan.adapter_config or "")
        assert config["model"] == "you/base"
        assert {config[key] for key in ("optimizer", "seed", "step")} == {"adamw", 7, 3}
        card = plan.card or ""
        assert "base_model: you/base\nbase_model_relation: adapter\n" in card
        assert "license: mit\n" in card and "- 'no'\n" in card
        assert "mmfree generate --model you/base --adapter-path me/tiny" in card
        assert str(tmp_path) not in card + (plan.adapter_config or "")

    def test_is_sent_as_planned(self, hub: HubServer, client: HubClient, run: Path) -> None:
        status, _, _ = upload(client, run, "me/adapter", "--base-model", "you/base")
        assert status == 0
        sent = hub.repositories["me/adapter"].branches["main"]
        plan = plan_upload(run, "me/adapter", base_model="you/base")
        assert sent["adapters.safetensors"] == (run / "adapters.safetensors").read_bytes()
        assert sent["adapter_config.json"].decode() == plan.adapter_config
        assert sent["README.md"].decode() == plan.card
        assert len([name for name in sent if not name.startswith(".git")]) == 3

    def test_what_was_sent_is_read(self, run: Path, tmp_path: Path) -> None:
        plan = plan_upload(run, "me/tiny", base_model="you/base")
        (tmp_path / "sent").mkdir()
        shutil.copy(run / "adapters.safetensors", tmp_path / "sent")
        (tmp_path / "sent" / "adapter_config.json").write_text(plan.adapter_config or "")
        want, got = read_adapter(run), read_adapter(tmp_path / "sent")
        assert (got.kind, got.scale, got.tensors.keys()) == (
            want.kind,
            want.scale,
            want.tensors.keys(),
        )

    @pytest.mark.exhaustive
    def test_a_base_without_an_adapter(self, source: Path) -> None:
        with pytest.raises(UploadError, match="'base_model' must be left out"):
            plan_upload(source, "me/tiny", base_model="you/base")
