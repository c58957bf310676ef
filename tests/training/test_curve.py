"""The pictures of runs: what is drawn, and that odd logs are drawn too."""

import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_mmfree.training import curve
from mlx_mmfree.training.curve import plot_run, plot_runs, token_unit

RECORDS: list[dict[str, Any]] = [
    {"step": 0, "mlx_version": "0", "settings": {}},
    {"step": 0, "tokens": 0, "valid_loss": 5.0, "zero_trits": [0.3, 0.4], "flipped_trits": [0, 0]},
    *(
        {
            "step": step,
            "tokens": step * 1000,
            "loss": 5.0 / step,
            "learning_rate": 1e-3 * step,
            "gradient_norm": 1.0,
            "tokens_per_second": 100.0 + step,
        }
        for step in range(1, 6)
    ),
    {
        "step": 5,
        "tokens": 5000,
        "valid_loss": 1.5,
        "zero_trits": [0.32, 0.41],
        "flipped_trits": [0.1, 0.2],
    },
]


@pytest.mark.parametrize(
    ("most", "unit"),
    [
        (0, (1, "tokens")),
        (1_999, (1, "tokens")),
        (2_000, (1e3, "thousand tokens")),
        (10_600_000, (1e6, "million tokens")),
        (5_000_000_000, (1e9, "billion tokens")),
    ],
)
def test_units_fit_the_run(most: int, unit: tuple[float, str]) -> None:
    assert token_unit(most) == unit


def _drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The metrics that are saved."""
    metrics: list[Any] = []
    monkeypatch.setattr(curve, "save_picture", lambda figure, file: metrics.append(figure))
    return metrics


@pytest.mark.plot
def test_a_run_has_a_panel_for_all_that_was_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = _drawn(monkeypatch)
    assert plot_run(RECORDS, "tiny", tmp_path / "curve.png")
    [figure] = metrics
    assert figure.axes[0].get_gridspec().get_geometry() == (3, 2)
    lines = {axes.get_ylabel(): axes.lines for axes in figure.axes if axes.lines}
    assert list(lines) == [
        "loss (nats)",
        "learning rate",
        "norm of the gradient",
        "tokens a second",
        "share of zero trits",
        "share of trits changed\nsince the start",
    ]
    training, validation = lines["loss (nats)"]
    assert training.get_ydata().tolist() == [5.0 / step for step in range(1, 6)]
    assert training.get_xdata().tolist() == [1, 2, 3, 4, 5]
    assert validation.get_ydata().tolist() == [5.0, 1.5]
    assert [line.get_ydata().tolist() for line in lines["share of zero trits"]] == [
        [0.3, 0.32],
        [0.4, 0.41],
    ]
    title = "Run 'tiny': validation loss 1.500 at best, after 5 thousand tokens"
    assert figure.get_suptitle() == title
    assert {axes.get_xlabel() for axes in figure.axes} >= {"thousand tokens learned from"}


@pytest.mark.plot
def test_what_was_not_logged_has_no_panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = _drawn(monkeypatch)
    plain = [{k: v for k, v in r.items() if not k.endswith("_trits")} for r in RECORDS]
    assert plot_run(plain, "tiny", tmp_path / "curve.png")
    assert len([axes for axes in metrics[0].axes if axes.lines]) == 4


@pytest.mark.plot
@pytest.mark.parametrize(
    "records",
    [
        [],
        [{"step": 1, "tokens": 100, "loss": float("nan")}],
        [{"tokens": 10**400, "loss": 1.0}, {"tokens": 3, "loss": 10**400}],
        [{"tokens": "many", "loss": 1.0}, {"tokens": 3, "loss": "small"}],
        [{"tokens": 3, "zero_trits": []}, {"tokens": 4, "zero_trits": [1, "x"]}],
        [{"tokens": 3, "zero_trits": [0.1]}, {"tokens": 4, "zero_trits": [0.1, 0.2]}],
    ],
)
def test_odd_logs_are_drawn(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    assert plot_run(records, "odd", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    plot_runs({"odd": records}, tmp_path / "runs.png")


@pytest.mark.plot
def test_several_runs_in_one_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = _drawn(monkeypatch)
    plot_runs({f"run {n}": RECORDS for n in range(9)}, tmp_path / "runs.png")
    training, validation = metrics[0].axes
    assert training.get_title() == "training loss" and validation.get_title() == "validation loss"
    for axes in (training, validation):
        looks = {(line.get_color(), line.get_linestyle()) for line in axes.lines}
        assert len(looks) == len(axes.lines) == 9
        assert [text.get_text() for text in axes.get_legend().texts][:2] == ["run 0", "run 1"]


def test_without_matplotlib_there_is_no_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    assert not plot_run(RECORDS, "tiny", tmp_path / "curve.png")
    assert not list(tmp_path.iterdir())
