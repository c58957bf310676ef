"""`mmfree doctor` shows the facts, and each problem with its hint."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree import __version__, demo, native
from mlx_mmfree.cli import doctor, main
from mlx_mmfree.cli.doctor import Host, examine, host_problems
from mlx_mmfree.cli.parts.terminal import TaskBars
from mlx_mmfree.native import loader
from mlx_mmfree.ops import kernel_times
from mlx_mmfree.ops.backend import choice, self_check
from mlx_mmfree.ops.backend.dispatch import operations
from mlx_mmfree.ops.dense_matmul import rounds_activations
from mlx_mmfree.ops.inspection import fallback_texts, kernel_texts
from mlx_mmfree.ops.kernel_times import KernelTime
from mlx_mmfree.platform import blas, memory_reader

on_cpu = pytest.mark.skipif(
    mx.default_device() != mx.Device(mx.cpu), reason="the default device is not the CPU"
)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No forced backend, and a reading that takes no time."""
    for name in ("MLX_MMFREE_BACKEND", "MLX_MMFREE_PRODUCT"):
        monkeypatch.delenv(name, raising=False)
    read = memory_reader.read_bandwidth
    monkeypatch.setattr(memory_reader, "read_bandwidth", lambda: read(2**20))


@pytest.fixture
def not_built(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(loader, "PACKAGE", "_no_such_package")
    loader._load.cache_clear()
    yield
    loader._load.cache_clear()


def report(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["doctor", "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    found: dict[str, Any] = json.loads(shown.out)
    return found


def test_the_verdict_comes_first_and_tables_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "current_host", lambda: Host("Linux", "x86_64", (3, 11)))
    assert main(["doctor"]) == 0
    brief = capsys.readouterr().out
    assert brief.startswith(("No problems found.\n", "problems\n  - "))
    assert "ternary_matmul" not in brief and "'mmfree doctor --all' shows" in brief


def test_table_names_versions_device_backends_and_reasons(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--all"]) == 0
    shown = capsys.readouterr().out
    for text in (f"  mlx_mmfree  {__version__}\n", "\nternary_matmul\n", " GB/s ("):
        assert text in shown
    if not mx.metal.is_available():
        assert "  metal      no Metal device\n" in shown


def test_json_holds_every_operation_with_its_backends(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys)
    assert set(operations()) == set(found["operations"])
    for name, operation in operations().items():
        backends = found["operations"][name]["backends"]
        assert set(backends) == set(operation.backends)
        assert backends["reference"] is None
        assert backends[found["operations"][name]["runs_on"]] is None
    assert found["memory_bandwidth"]["bytes_per_second"] > 0
    assert found["device"]["memory_bytes"] > 0
    assert found["threads"] >= 1


@pytest.mark.skipif(native.unavailable() is not None, reason="the CPU kernels are not built")
def test_cpu_kernels_in_use_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    kernels = report(capsys)["cpu_kernels"]
    module = native.kernels()
    assert kernels["reason"] is None
    assert kernels["instructions"] == module.kernel_name()
    assert (kernels["choices"], kernels["threads"]) == (module.kernel_names(), module.threads())


@on_cpu
def test_missing_extension_is_a_problem_with_the_hint(
    not_built: None, capsys: pytest.CaptureFixture[str]
) -> None:
    found = report(capsys)
    assert found["operations"]["linear_scan"]["runs_on"] == "reference"
    assert any("was not built" in text and loader.rebuild() in text for text in found["problems"])
    assert main(["doctor", "--all"]) == 0
    shown = capsys.readouterr().out
    assert "  not used  see the problems above\n" in shown
    assert "  native     see the problems above\n" in shown
    assert "problems\n  - The CPU kernels cannot be used: the CPU extension was not built" in shown
    assert shown.count(loader.rebuild()) == 1


def test_forced_backend_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLX_MMFREE_BACKEND", "reference")
    found = report(capsys)
    assert {facts["runs_on"] for facts in found["operations"].values()} == {"reference"}
    assert any("Unset MLX_MMFREE_BACKEND" in text for text in found["problems"])


def test_forced_product_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(capsys)["forced_product"] is None
    monkeypatch.setenv("MLX_MMFREE_PRODUCT", "tiles")
    choice.environment_candidate.cache_clear()
    found = report(capsys)
    assert found["forced_product"] == "tiles"
    assert any("Unset MLX_MMFREE_PRODUCT" in text for text in found["problems"])


def test_rounded_activations_are_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds_activations.cache_clear()
    assert report(capsys)["rounds_activations"] is False
    monkeypatch.setenv("MLX_MMFREE_ACTIVATION_BITS", "8")
    rounds_activations.cache_clear()
    try:
        found = report(capsys)
    finally:
        rounds_activations.cache_clear()
    assert found["rounds_activations"] is True
    assert any("are inexact, since their activations are rounded" in t for t in found["problems"])


def test_operations_that_the_forced_backend_cannot_run_are_problems(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLX_MMFREE_BACKEND", "chunked")
    found = report(capsys)
    assert found["operations"]["attention"]["runs_on"] == "chunked"
    reason = (
        "No backend can run 'rms_norm_quantize': 'chunked' is forced, but the operation has no such "
        "backend."
    )
    assert reason in found["problems"]


def test_unknown_backend_is_the_users_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLX_MMFREE_BACKEND", "fast")
    assert main(["doctor"]) == 2
    shown = capsys.readouterr().err
    assert "'MLX_MMFREE_BACKEND' must be one of" in shown and shown.count("\n") == 1


def test_slow_blas_and_an_unfit_host_are_problems(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = blas.Binding((), "scipy-openblas32 does not load (gone)", is_needed=True)
    monkeypatch.setattr(blas, "bind", lambda: slow)
    old = Host("Darwin", "arm64", (3, 11), "13.6")
    monkeypatch.setattr(doctor, "current_host", lambda: old)
    problems = report(capsys)["problems"]
    assert problems[0] == "MLX needs macOS 14 or newer but this is 13.6."
    assert (
        "(gone). If scipy-openblas32 is missing or damaged, install it again: pip install"
        in problems[1]
    )


def test_switched_off_metal_kernels_are_problems(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = (("good", None), ("bad", "it computes wrong values"))
    checks = {name: self_check.Check(name, fault) for name, fault in found}
    monkeypatch.setattr(self_check, "check_again", lambda: None)
    monkeypatch.setattr(self_check, "_checks", checks)
    assert main(["doctor", "--all"]) == 0
    shown = capsys.readouterr().out
    assert "GPU kernels\n  good  sound\n  bad   it computes wrong values\n" in shown
    assert "  - The kernel bad is switched off: it computes wrong values. " in shown


def test_times_and_choices_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = [
        KernelTime("bit_linear, tiles", 64, 2048, 6912, 1.234e-4, 56.78e9, 0.5),
        KernelTime("linear_scan", 1, 2048, 2048, 2e-6, 9e9, None),
    ]
    choices = {"bit_linear(rows=64)": {"chosen": "mlx", "seconds": {"tiles": 3e-4, "mlx": 2e-4}}}
    monkeypatch.setattr(kernel_times, "kernel_times", lambda progress: times)
    monkeypatch.setattr(choice, "stored_choices", lambda: choices)
    found = report(capsys)
    assert found["kernel_times"] == [time._asdict() for time in times]
    assert found["choices"] == choices
    assert main(["doctor", "--all"]) == 0
    shown = capsys.readouterr().out
    product = "bit_linear, tiles, 2048 x 6912, rows: 64  123.4 us, 56.8 GB/s, 50% of a plain read\n"
    assert f"\ntimes of Metal kernels\n  {product}" in shown
    assert "  linear_scan, 2048 x 2048, rows: 1         2.0 us, 9.0 GB/s\n" in shown
    assert (
        "\nchosen by timing\n  bit_linear(rows=64)  mlx (tiles 300.0 us, mlx 200.0 us)\n" in shown
    )


def test_progress_of_checks_and_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_times, "kernel_times", lambda progress: progress(1, 1) or [])
    steps: list[tuple[str, int, int]] = []
    examine(lambda *step: steps.append(step))
    count = len(steps) - 1
    checks = [("Checking kernels", done, count) for done in range(1, count + 1)]
    assert steps == [*checks, ("Timing kernels", 1, 1)]


def test_a_terminal_shows_a_bar_for_each_task(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with TaskBars() as bars:
        bars("One", 1, 4)
        bars("One", 4, 4)
        bars("Two", 0, 2)
    shown = capsys.readouterr().err
    assert re.search(r"One: +\d+%.*/4", shown)
    assert re.search(r"Two: +0%.*/2", shown)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fails", [False, True])
def test_kernels_are_written_with_a_script_that_compiles_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fails: bool
) -> None:
    folder = tmp_path / "all kernels"
    assert main(["doctor", "--dump-kernels", str(folder)]) == 0
    files = sorted(folder.glob("*.metal"))
    shown = capsys.readouterr().out
    assert shown.startswith(f"Wrote {len(files)} kernels. ")
    command = shown.partition("compile them with: ")[2]
    texts = kernel_texts() | fallback_texts()
    assert sorted(file.read_text().partition("\n")[2] for file in files) == sorted(texts.values())
    include = '#include "mlx/backend/metal/kernels/utils.h"\n'
    assert all(file.read_text().startswith(include) for file in files)
    # it stands in for Xcode: it notes what it is to compile, and refuses one of the kernels
    compiler = tmp_path / "xcrun"
    refusal = f'[ "$8" != "{files[1].name}" ]' if fails else "true"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> "{tmp_path}/calls"\n{refusal}\n')
    compiler.chmod(0o755)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(command, shell=True, env=path, capture_output=True, text=True)
    assert done.returncode == int(fails), done
    assert (f"{files[1].name} does not compile\n" in done.stdout) == fails
    assert f"{int(fails)} of {len(files)} kernels do not compile" in done.stdout
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == len(files)
    found = Path(calls[0].partition(" -I ")[2].partition(" -c ")[0])
    assert (found / "mlx/backend/metal/kernels/utils.h").is_file()


def test_kernels_are_not_written_among_other_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("")
    assert main(["doctor", "--dump-kernels", str(tmp_path)]) == 2
    assert "'--dump-kernels' must be a new or empty folder" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def test_running_host_has_no_problems() -> None:
    assert host_problems(doctor.current_host()) == []


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        (Host("Darwin", "arm64", (3, 14), macos="15.1"), None),
        (Host("Darwin", "arm64", (3, 11), macos="13.6.1"), "macOS 14 or newer but this is 13.6.1"),
        (Host("Darwin", "x86_64", (3, 12), "14.0", is_translated=True), "arm64 Python"),
        (Host("Darwin", "x86_64", (3, 12), macos="14.0"), "Intel processor"),
        (Host("Linux", "aarch64", (3, 9)), "Python 3.11 or newer is needed but this is 3.9"),
        (Host("Linux", "riscv64", (3, 13)), "riscv64"),
        (Host("Windows", "AMD64", (3, 13)), "Windows is not supported"),
    ],
)
def test_problems(described: Host, expected: str | None) -> None:
    found = host_problems(described)
    assert len(found) == (expected is not None)
    assert expected is None or expected in found[0]


def test_texts_of_a_first_token(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", str(demo.path()), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not set(found["prompt"]) & set(found["next_token"])
    kinds = [name.removeprefix("custom_kernel_").split("__")[0] for name in found["next_token"]]
    assert "half_denormals" in found["prompt"][0]
    # the bundled model is a MatMul-free one
    assert {"bit_linear_3", "mlgru_step"} <= {*kinds}
    assert main(["doctor", "--model", str(demo.path())]) == 0
    lines = capsys.readouterr().out.splitlines()
    count = len(found["prompt"])
    assert lines[0] == f"A prompt of 64 tokens compiles {count} texts of Metal kernels:"
    assert lines[count + 1] == f"The next token compiles {len(kinds)} more:"
    assert len(lines) == count + len(kinds) + 2
    assert main(["doctor", "--model", "no_such_folder/x/y"]) == 2
