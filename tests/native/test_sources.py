"""The build's knowledge of the folders of kernels."""

from pathlib import Path

from mlx_mmfree.native import sources


def add(folder: Path, *names: str) -> None:
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"// {name}\n")


def test_a_new_folder_is_found(tmp_path: Path) -> None:
    folder, lists = tmp_path / "native", tmp_path / "lists"
    add(folder, "module.cpp", "runtime/bindings.cpp", "old_scan/bindings.cpp", "old_scan/loops.h")
    add(folder, "new_mixer/bindings.cpp", "new_mixer/loops.h", "new_mixer/new_mixer.cpp")
    sources.write_lists(lists, folder)
    bindings, tables = ((lists / f).read_text() for f in ("bindings_list.h", "kernel_tables.h"))
    assert "MMFREE_BINDINGS(X) X(new_mixer) X(old_scan) X(runtime)\n" in bindings
    assert '#include "new_mixer/loops.h"\n' in tables
    assert "MMFREE_KERNEL_TABLES(X) X(NewMixerKernels) X(OldScanKernels)\n" in tables


def test_lists_that_stay_are_not_written_again(tmp_path: Path) -> None:
    add(tmp_path, "native/one/bindings.cpp")
    sources.write_lists(tmp_path, tmp_path / "native")
    before = (tmp_path / "bindings_list.h").stat().st_mtime_ns
    sources.write_lists(tmp_path, tmp_path / "native")
    assert (tmp_path / "bindings_list.h").stat().st_mtime_ns == before


def test_digest_names_content_and_path_of_every_source(tmp_path: Path) -> None:
    add(tmp_path, "module.cpp", "one/loops.h", "one/one.cpp")
    first = sources.digest(tmp_path)
    assert first == sources.digest(tmp_path)
    (tmp_path / "one/loops.h").write_text("// else\n")
    second = sources.digest(tmp_path)
    (tmp_path / "one/one.cpp").rename(tmp_path / "one/two.cpp")
    assert len({first, second, sources.digest(tmp_path)}) == 3


def test_without_sources_there_is_no_digest(tmp_path: Path) -> None:
    assert sources.digest(tmp_path) is None
