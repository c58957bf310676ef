"""Files and folders appear whole or not at all, and nobody else's are removed."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mlx_mmfree.errors import CheckpointError
from mlx_mmfree.files import writing as replacing
from mlx_mmfree.files.writing import clear_leftovers, new_file, new_folder, writing


def contents(folder: Path) -> dict[str, str]:
    """Every file below a folder, hidden ones too."""
    return {
        str(file.relative_to(folder)): file.read_text()
        for file in folder.rglob("*")
        if file.is_file()
    }


def write_folder(target: Path, text: str, *, replaces: bool = False) -> None:
    with new_folder(target, replaces=replaces) as folder:
        (folder / "a.txt").write_text(text)


class TestFile:
    def test_appears_at_the_end(self, tmp_path: Path) -> None:
        target = tmp_path / "sub" / "a.safetensors"
        with new_file(target) as file:
            assert file.suffix == ".safetensors"
            file.write_text("1")
            assert not target.exists()
        assert contents(tmp_path) == {"sub/a.safetensors": "1"}
        assert os.listdir(target.parent) == ["a.safetensors"]

    @pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
    def test_an_error_changes_nothing(self, tmp_path: Path, error: type[BaseException]) -> None:
        (tmp_path / "a").write_text("old")
        with pytest.raises(error), new_file(tmp_path / "a") as file:
            file.write_text("new")
            raise error
        assert contents(tmp_path) == {"a": "old"}
        assert os.listdir(tmp_path) == ["a"]

    def test_links_are_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "mine").write_text("mine")
        (tmp_path / "a").symlink_to("mine")
        # a name that could be foreseen
        (tmp_path / ".new.a").symlink_to("mine")
        with new_file(tmp_path / "a") as file:
            file.write_text("new")
        assert (tmp_path / "mine").read_text() == "mine"
        assert not (tmp_path / "a").is_symlink()

    def test_nobody_else_may_enter_the_stage(self, tmp_path: Path) -> None:
        with new_file(tmp_path / "a") as file:
            file.touch()
            assert file.parent.stat().st_mode & 0o077 == 0

    def test_two_writers(self, tmp_path: Path) -> None:
        with new_file(tmp_path / "a") as first, new_file(tmp_path / "a") as second:
            first.write_text("first")
            second.write_text("second")
        assert contents(tmp_path) == {"a": "first"}


class TestFolder:
    def test_appears_at_the_end(self, tmp_path: Path) -> None:
        with new_folder(tmp_path / "m") as folder:
            (folder / "a.txt").write_text("1")
            assert not (tmp_path / "m").exists()
        assert contents(tmp_path) == {"m/a.txt": "1"}
        assert os.listdir(tmp_path) == ["m"]

    def test_an_empty_folder_is_filled(self, tmp_path: Path) -> None:
        (tmp_path / "m").mkdir()
        write_folder(tmp_path / "m", "1")
        assert contents(tmp_path) == {"m/a.txt": "1"}

    @pytest.mark.parametrize("replaces", [True, False])
    def test_files_that_come_meanwhile_stay(self, tmp_path: Path, replaces: bool) -> None:
        target = tmp_path / "m"
        if replaces:
            write_folder(target, "old")
        else:
            target.mkdir()
        with (
            pytest.raises(OSError, match="added or changed in the meantime"),
            new_folder(target, replaces=replaces) as folder,
        ):
            (folder / "a.txt").write_text("new")
            (target / "thesis.txt").write_text("mine")
        old = {"m/a.txt": "old"} if replaces else {}
        assert contents(tmp_path) == {**old, "m/thesis.txt": "mine"}
        assert os.listdir(tmp_path) == ["m"]

    def test_a_file_that_changes_meanwhile_stays(self, tmp_path: Path) -> None:
        write_folder(tmp_path / "m", "old")
        with (
            pytest.raises(OSError, match="added or changed in the meantime"),
            new_folder(tmp_path / "m", replaces=True),
        ):
            (tmp_path / "m" / "a.txt").write_text("edited")
        assert contents(tmp_path) == {"m/a.txt": "edited"}

    def test_a_folder_that_comes_in_the_last_moment_stays(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def come(folder: Path) -> None:
            (tmp_path / "m").mkdir()
            (tmp_path / "m" / "thesis.txt").write_text("mine")

        with pytest.raises(OSError, match="in the meantime"), new_folder(tmp_path / "m") as folder:
            (folder / "a.txt").write_text("new")
            # this comes after the last look at the target
            listing = replacing._listing
            monkeypatch.setattr(replacing, "_listing", lambda f: (listing(f), come(f))[0])
        assert contents(tmp_path) == {"m/thesis.txt": "mine"}

    def test_replaces_what_was_there(self, tmp_path: Path) -> None:
        write_folder(tmp_path / "m", "old")
        write_folder(tmp_path / "m", "new", replaces=True)
        assert contents(tmp_path) == {"m/a.txt": "new"}
        assert os.listdir(tmp_path) == ["m"]

    def test_a_file_is_not_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "m").write_text("mine")
        with pytest.raises(OSError, match="in the meantime"):
            write_folder(tmp_path / "m", "new", replaces=True)
        assert contents(tmp_path) == {"m": "mine"}

    def test_two_threads(self, tmp_path: Path) -> None:
        may_end, has_begun, errors = threading.Event(), threading.Event(), []

        def write() -> None:
            with new_folder(tmp_path / "m") as folder:
                (folder / "a.txt").write_text("first")
                has_begun.set()
                may_end.wait(60)

        thread = threading.Thread(target=write)
        thread.start()
        assert has_begun.wait(60)
        try:
            write_folder(tmp_path / "m", "second")
        except OSError as error:
            errors.append(str(error))
        may_end.set()
        thread.join()
        assert errors == [f"another process is writing '{tmp_path / 'm'}' at this moment"]
        assert contents(tmp_path) == {"m/a.txt": "first"}


_WRITER = """
import sys
from pathlib import Path
from mlx_mmfree.files.writing import new_folder

with new_folder(Path(sys.argv[1]), replaces=True) as folder:
    (folder / "a.txt").write_text("of the killed one")
    print("written", flush=True)
    sys.stdin.read()
"""


class TestStages:
    def test_a_killed_writers_is_cleared_and_a_living_ones_kept(self, tmp_path: Path) -> None:
        target = tmp_path / "m"
        with subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(target)],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"written\n"
            assert clear_leftovers(target)
            with pytest.raises(OSError, match="another process is writing"):
                write_folder(target, "second")
            assert list(contents(tmp_path).values()) == ["of the killed one"]
            writer.kill()
        write_folder(target, "third")
        assert contents(tmp_path) == {"m/a.txt": "third"}
        assert os.listdir(tmp_path) == ["m"]

    def test_puts_back_what_a_killed_writer_moved_aside(self, tmp_path: Path) -> None:
        stage = tmp_path / f".m.{1:016x}.mmfree"
        (stage / "old").mkdir(parents=True)
        (stage / "old" / "a.txt").write_text("old")
        (stage / "new").mkdir()
        assert not clear_leftovers(tmp_path / "m")
        assert contents(tmp_path) == {"m/a.txt": "old"}
        assert os.listdir(tmp_path) == ["m"]

    def test_keeps_what_cannot_be_put_back(self, tmp_path: Path) -> None:
        stage = tmp_path / f".m.{1:016x}.mmfree"
        for folder in (stage / "old", stage / "new", tmp_path / "m"):
            folder.mkdir(parents=True)
            (folder / "a.txt").write_text(folder.name)
        before = contents(tmp_path)
        clear_leftovers(tmp_path / "m")
        assert contents(tmp_path) == before

    def test_the_old_one_goes_where_the_new_one_is_in_place(self, tmp_path: Path) -> None:
        write_folder(tmp_path / "m", "new")
        stage = tmp_path / f".m.{1:016x}.mmfree"
        (stage / "old").mkdir(parents=True)
        clear_leftovers(tmp_path / "m")
        assert contents(tmp_path) == {"m/a.txt": "new"}
        assert os.listdir(tmp_path) == ["m"]

    def test_others_are_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "a.txt").write_text("mine")
        (tmp_path / f".m.{1:016x}.mmfree").symlink_to("elsewhere")
        (tmp_path / f".m.{2:016x}.mmfree").write_text("a file")
        for name in (".m.1.mmfree", f".other.{1:016x}.mmfree", ".m.new"):
            (tmp_path / name).mkdir()
        before = sorted(os.listdir(tmp_path))
        write_folder(tmp_path / "m", "new")
        assert sorted(os.listdir(tmp_path)) == sorted([*before, "m"])
        assert (tmp_path / "elsewhere" / "a.txt").read_text() == "mine"


class TestCapacity:
    def test_a_full_disk_is_refused_before_anything_is_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
        (tmp_path / "a").write_text("old")
        with pytest.raises(OSError, match=r"only 1\.0 MB are free"), new_file(tmp_path / "a", 5):
            pytest.fail("a file was made")
        with (
            pytest.raises(OSError, match=r"only 1\.0 MB are free"),
            new_folder(tmp_path / "b", needed_bytes=5),
        ):
            pytest.fail("a folder was made")
        assert contents(tmp_path) == {"a": "old"}

    def test_files_of_no_size_to_speak_of_are_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
        with new_file(tmp_path / "a") as file:
            file.write_text("new")
        assert contents(tmp_path) == {"a": "new"}


@pytest.mark.parametrize("error", [OSError("no space"), RuntimeError("no space")])
def test_a_refusal_is_one_line(error: Exception) -> None:
    line = r"^\[save\] 'there' cannot be written: no space\. Check the disk [^.]*\.$"
    with pytest.raises(CheckpointError, match=line), writing("save", Path("there")):
        raise error


def test_other_errors_pass() -> None:
    with pytest.raises(KeyError), writing("save", Path("there")):
        raise KeyError("a")


def test_all_of_it_is_on_the_disk_before_it_replaces_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    monkeypatch.setattr(os, "fsync", lambda handle: synced.add(os.fstat(handle).st_ino))
    with new_file(tmp_path / "file") as file:
        file.write_text("1")
        written = {file.stat().st_ino}
    with new_folder(tmp_path / "folder") as folder:
        (folder / "inner").mkdir()
        for path in (folder / "a", folder / "inner" / "b"):
            path.write_text("1")
        written |= {path.stat().st_ino for path in (folder, *folder.rglob("*"))}
    assert synced == written | {tmp_path.stat().st_ino}
