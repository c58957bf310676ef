"""A host file of `mlx.launch`, as the page on training shows it, with this machine in place of each."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_mmfree.training.results import read_log
from tests.process_group import ROOT
from tests.readme.documents import sections
from tests.training.conftest import config, run_values  # noqa: F401

PAGE = ROOT / "mlx_mmfree" / "training" / "README.md"
MLX_LAUNCH = "from mlx._distributed_utils.launch import main; main()"


def _free_ports(count: int) -> int:
    """The first of several ports in a row that nobody uses."""
    while True:
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
        try:
            for number in range(port, port + count):
                with socket.socket() as each:
                    each.bind(("127.0.0.1", number))
        except (OSError, OverflowError):
            continue
        return port


@pytest.mark.exhaustive
def test_the_host_file_of_the_page_starts_a_run(config: Path, tmp_path: Path) -> None:  # noqa: F811
    [machines] = next(part for part in sections(PAGE) if part.title == "Several machines").blocks(
        "json"
    )
    hosts = [host | {"ssh": "127.0.0.1", "ips": ["127.0.0.1"]} for host in json.loads(machines)]
    (tmp_path / "hosts.json").write_text(json.dumps(hosts))
    launcher = [sys.executable, "-c", MLX_LAUNCH, "--hostfile", str(tmp_path / "hosts.json")]
    launcher += ["--backend", "ring", "--starting-port", str(_free_ports(len(hosts)))]
    launcher += [
        "--env",
        f"PYTHONPATH={ROOT}",
        "--env",
        "OPENBLAS_NUM_THREADS=1",
        "--cwd",
        str(tmp_path),
    ]
    program = [sys.executable, "-m", "mlx_mmfree", "train", "--config", str(config)]
    # the launcher reads standard input, and asks again and again where it is closed
    with subprocess.Popen(
        [*launcher, "--", *program, "--backend", "ring"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        output, errors = process.stdout.read(), process.stderr.read()
    assert process.returncode == 0, errors
    assert output.count("best step") == 1
    log = read_log(config.parent / "run" / "log.jsonl")
    assert log[0]["processes"] == len(hosts) == 2
    assert log[-1]["step"] == 6
