"""Sessions on the disk: what is found after a restart, within which bytes, and what damage does."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.errors import CheckpointError
from mlx_mmfree.files.tensors import read_arrays
from mlx_mmfree.files.writing import try_lock
from mlx_mmfree.generation.sessions import Sessions
from mlx_mmfree.generation.storage import session_file
from mlx_mmfree.generation.storage.session_file import identity_of
from mlx_mmfree.generation.storage.session_folder import SessionFolder
from mlx_mmfree.models import Decoder
from tests.generation.models import MODELS, attention, recurrent
from tests.generation.sessions.texts import TEXT, keep, read, same_bits

MEMORY = 2**20
CHECKSUM_BYTES = 32


def opened(model: Decoder, folder: Path, **limits: int) -> Sessions:
    return Sessions(model, **{"memory_bytes": MEMORY, **limits}, folder=folder)


def files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if not file.is_dir())


def written(model: Decoder, folder: Path, *texts: list[int]) -> list[Path]:
    """The files of texts, in their order."""
    made = []
    with opened(model, folder) as sessions:
        for text in texts:
            before = set(files(folder))
            keep(sessions, model, text)
            sessions.flush()
            made += set(files(folder)) - before
    return made


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
def test_a_new_process_goes_on(name: str, tmp_path: Path) -> None:
    model = MODELS[name](1)
    with opened(model, tmp_path) as sessions:
        keep(sessions, model, TEXT[:5], TEXT[:13])
        want = sessions.find(TEXT)
    for memory_bytes in (MEMORY, 0):
        again = opened(MODELS[name](1), tmp_path, memory_bytes=memory_bytes)
        assert again.stats().disk_sessions == again.stats().sessions == 2
        for _ in range(2):
            known = again.find(TEXT)
            assert known.count == want.count == 13
            assert same_bits(known.state, want.state)
        assert again.find(TEXT[:9]).count == 5
        assert again.stats().memory_sessions == (2 if memory_bytes else 0)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_dtypes_are_kept(dtype: mx.Dtype, tmp_path: Path) -> None:
    model = recurrent(1, dtype)
    with opened(model, tmp_path) as sessions:
        keep(sessions, model, TEXT)
    assert same_bits(opened(model, tmp_path).find([*TEXT, 1]).state, read(model, TEXT))


def test_files_are_safetensors_of_known_size(tmp_path: Path) -> None:
    model = attention(1)
    (file,) = written(model, tmp_path, TEXT)
    arrays = read_arrays(file)
    assert arrays["tokens"].tolist() == TEXT
    assert mx.array_equal(arrays["state.0.0"], read(model, TEXT)[0].keys[:, :, : len(TEXT)])
    stats = opened(model, tmp_path).stats()
    assert (stats.disk_sessions, stats.disk_bytes) == (1, file.stat().st_size)
    assert tmp_path.stat().st_mode & 0o777 != 0o777


def test_a_new_folder_is_its_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    written(recurrent(1), folder, TEXT)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_nothing_is_written_twice(tmp_path: Path) -> None:
    model = recurrent(1)
    (file,) = written(model, tmp_path, TEXT)
    before = file.stat()
    with opened(model, tmp_path) as sessions:
        keep(sessions, model, TEXT, TEXT)
    after = file.stat()
    assert (after.st_ino, after.st_ctime_ns > before.st_ctime_ns) == (before.st_ino, True)


def test_what_is_reported_to_be_on_the_disk_is_there(tmp_path: Path) -> None:
    model = recurrent(1)
    with opened(model, tmp_path) as sessions:
        assert not sessions.is_on_disk(TEXT)
        keep(sessions, model, TEXT)
        sessions.flush()
        assert sessions.is_on_disk(TEXT) and not sessions.is_on_disk(TEXT[:-1])
        assert len(files(tmp_path)) == 1
    alone = Sessions(model, memory_bytes=MEMORY)
    keep(alone, model, TEXT)
    alone.flush()
    assert not alone.is_on_disk(TEXT)


def test_decoding_does_not_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, write = Event(), SessionFolder.write

    def slow(*arguments: Any) -> None:
        may_write.wait()
        write(*arguments)

    monkeypatch.setattr(SessionFolder, "write", slow)
    model = recurrent(1)
    with opened(model, tmp_path) as sessions:
        keep(sessions, model, TEXT[:4], TEXT[:9])
        assert sessions.find(TEXT).count == 9
        assert sessions.stats().waiting == 2 and not sessions.is_on_disk(TEXT[:4])
        may_write.set()
        sessions.flush()
        assert sessions.stats().waiting == 0 and sessions.is_on_disk(TEXT[:4])


def test_a_failing_disk_is_reported_once_and_memory_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError("disk is gone")

    model = recurrent(1)
    sessions = opened(model, tmp_path)
    monkeypatch.setattr(os, "replace", fail)
    keep(sessions, model, TEXT[:4])
    with pytest.warns(UserWarning, match="cannot be written: disk is gone") as reported:
        sessions.flush()
    keep(sessions, model, TEXT[:9])
    sessions.flush()
    assert len(reported) == 1 and sessions.stats().lost == 2 and not files(tmp_path)
    assert sessions.find(TEXT).count == 9 and not sessions.is_on_disk(TEXT[:9])
    monkeypatch.undo()
    keep(sessions, model, TEXT[:9])
    sessions.close()
    assert sessions.is_on_disk(TEXT[:9])
    with pytest.raises(RuntimeError, match="must not be used after 'close'"):
        keep(sessions, model, TEXT[:4])


def test_a_session_larger_than_the_limit_is_reported(tmp_path: Path) -> None:
    model = recurrent(1)
    sessions = opened(model, tmp_path, disk_bytes=100)
    keep(sessions, model, TEXT)
    with pytest.warns(UserWarning, match="but has a limit of 100 bytes. Raise the limit"):
        sessions.close()
    assert not files(tmp_path) and sessions.stats().lost == 1


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    model = recurrent(1)
    texts = [TEXT[:n] for n in (4, 5, 6)]
    made = written(model, tmp_path, *texts)
    for n, file in enumerate(made):
        os.utime(file, ns=(n, n))
    stranger = tmp_path / "notes.txt"
    stranger.write_text("stays")
    limit = sum(file.stat().st_size for file in made) + 10
    with opened(model, tmp_path, disk_bytes=limit) as sessions:
        assert sessions.find([*texts[0], 1]).count == 4
        keep(sessions, model, TEXT[:6], [*TEXT[:5], 1])
    assert [file.exists() for file in made] == [True, False, True]
    again = opened(model, tmp_path, disk_bytes=limit)
    assert [again.find([*text, 1]).count for text in texts] == [4, 4, 6]
    small = opened(model, tmp_path, disk_bytes=made[0].stat().st_size)
    assert small.stats().disk_sessions == 1 and len(files(tmp_path)) == 2
    assert stranger.read_text() == "stays"


def test_processes_share_the_limit_of_a_folder(tmp_path: Path) -> None:
    model = recurrent(1)
    (file,) = written(model, tmp_path / "one", [1] * 9)
    folder, limit = tmp_path / "many", 8 * file.stat().st_size
    with (
        opened(model, folder, disk_bytes=limit) as first,
        opened(model, folder, disk_bytes=limit) as second,
    ):
        for n in range(12):
            for number, sessions in enumerate((first, second)):
                keep(sessions, model, [number, n, *[1] * 7])
                sessions.flush()
    assert sum(file.stat().st_size for file in files(folder)) <= limit * 9 / 8


def test_processes_do_not_break_each_other(tmp_path: Path) -> None:
    model = recurrent(1)
    with opened(model, tmp_path) as first, opened(model, tmp_path, memory_bytes=0) as second:
        keep(first, model, TEXT[:4], TEXT[:9])
        keep(second, model, TEXT[:9], TEXT[:12])
        first.flush()
        second.flush()
        assert len(files(tmp_path)) == 3
        for file in files(tmp_path):
            file.unlink()
        assert second.find(TEXT).count == 0 and second.stats().sessions == 0
        assert first.find(TEXT).count == 9


def test_other_versions_and_settings_are_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODELS["quantised_later"](1)
    written(model, tmp_path, TEXT)
    others = [MODELS[name](1) for name in MODELS if name != "quantised_later"]
    identities = {identity_of(other) for other in (model, *others, attention(2), recurrent(2))}
    assert len(identities) == len(others) + 3
    assert opened(MODELS["quantised"](1), tmp_path).find([*TEXT, 1]).count == 0
    monkeypatch.setattr(session_file, "__version__", "9")
    assert opened(model, tmp_path).find([*TEXT, 1]).count == 0
    assert opened(model, tmp_path).stats().sessions == 1


def changed(index_of: Callable[[int], int]) -> Callable[[Path], None]:
    """Flips a bit of the byte at an index that depends on the number of bytes."""

    def change(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[index_of(len(data))] ^= 1
        file.write_bytes(data)

    return change


def replaced(value: bytes, from_end: int) -> Callable[[Path], None]:
    """Puts other numbers into the state, so many bytes before its end, with the checksum they have."""

    def change(file: Path) -> None:
        content = file.read_bytes()[:-CHECKSUM_BYTES]
        start = len(content) - from_end
        content = content[:start] + value + content[start + len(value) :]
        head = 8 + int.from_bytes(content[:8], "little") + 4 * 9
        file.write_bytes(content + hashlib.sha256(content[head:]).digest())

    return change


def instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Puts something else in the place of the file."""

    def change(file: Path) -> None:
        file.unlink()
        make(file)

    return change


# the last 36 bytes of a state of 9 tokens are the positions of the second block
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda file: file.write_bytes(b""), "has 0 bytes in place of"),
    "cut": (lambda file: os.truncate(file, file.stat().st_size - 1), "bytes in place of"),
    "longer": (lambda file: file.write_bytes(file.read_bytes() + b"0"), "bytes in place of"),
    "header": (changed(lambda size: 20), "belongs to another model or version"),
    "length of the header": (changed(lambda size: 6), "belongs to another model or version"),
    "text": (changed(lambda size: size - 32 - 9 * 2 * 260 - 4), "holds another text"),
    "state": (changed(lambda size: size - 200), "has changed bytes"),
    "checksum": (changed(lambda size: size - 1), "has changed bytes"),
    "nan": (replaced(b"\0\0\xc0\x7f", 40), "holds numbers that no state has"),
    "positions": (replaced(b"\xff\xff\xff\x7f", 36), "holds numbers that no state has"),
    "folder": (instead(Path.mkdir), "a folder, not a regular file"),
    "pipe": (instead(os.mkfifo), "a pipe, not a regular file"),
    "link": (instead(lambda file: file.symlink_to("/etc/hosts")), "outside of its folder"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_files_are_dropped_with_a_warning(name: str, tmp_path: Path) -> None:
    model = attention(1)
    (file,) = written(model, tmp_path, TEXT[:9])
    written(model, tmp_path, TEXT[:4])
    damage, message = DAMAGES[name]
    sessions = opened(model, tmp_path)
    damage(file)
    with pytest.warns(UserWarning, match=message) as reported:
        assert sessions.find(TEXT).count == 4
    assert len(reported) == 1 and str(file) in str(reported[0].message)
    assert (name == "folder") == file.exists()
    assert sessions.find(TEXT).count == 4
    stats = sessions.stats()
    assert (stats.sessions, stats.damaged, stats.hits) == (1, 1, 2)
    if name != "folder":
        with sessions:
            keep(sessions, model, TEXT[:9])
        assert opened(model, tmp_path).find(TEXT).count == 9


def test_many_damaged_files_are_reported_once(tmp_path: Path) -> None:
    model = recurrent(1)
    made = written(model, tmp_path, TEXT[:4], TEXT[:9])
    sessions = opened(model, tmp_path)
    for file in made:
        file.write_bytes(b"")
    with pytest.warns(
        UserWarning, match="More such files will be removed without a word"
    ) as reported:
        assert sessions.find(TEXT).count == 0
    assert len(reported) == 1 and sessions.stats().damaged == 2 and not files(tmp_path)


def test_a_file_under_the_name_of_another_text_is_not_believed(tmp_path: Path) -> None:
    model = recurrent(1)
    first, second = written(model, tmp_path, TEXT[:9], [*TEXT[:8], 22])
    os.replace(first, second)
    sessions = opened(model, tmp_path)
    with pytest.warns(UserWarning, match="holds another text"):
        assert sessions.find([*TEXT[:8], 22, 1]).count == 0


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    model = recurrent(1)
    (file,) = written(model, tmp_path, TEXT)
    left, busy = (file.with_name(f".{file.name}.{digit * 16}.mmfree") for digit in "0f")
    for stage in (left, busy):
        stage.mkdir()
        (stage / "new.safetensors").write_bytes(b"half")
    lock = try_lock(busy)
    assert lock is not None
    try:
        assert opened(model, tmp_path).stats().sessions == 1
    finally:
        os.close(lock)
    assert not left.exists() and busy.exists()


def test_a_file_in_the_way_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"\[sessions\] '.*file' cannot be written"):
        opened(recurrent(1), tmp_path / "file")
    with pytest.raises(ValueError, match="'disk_bytes' must not be negative but got -1"):
        opened(recurrent(1), tmp_path, disk_bytes=-1)
