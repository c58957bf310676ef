"""`mmfree bench`: measures this machine, the ternary products, and models if any are named."""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .console import CommandParser, command
from .flags import positive
from .loading import DTYPES, add_latent_flag

if TYPE_CHECKING:
    from ..evaluation.benchmark import BenchmarkSettings, MachineResult
    from ..evaluation.benchmark_models import ModelResult
    from ..evaluation.benchmark_products import ProductResult
    from ..models import Decoder

HELP = "measure the speed of this machine and of models on it"

_SETTINGS = ("prompt_tokens", "positions", "decoded_tokens", "rounds")
_THREADS = "OPENBLAS_NUM_THREADS or OMP_NUM_THREADS sets the number of threads."


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="mmfree bench", description=__doc__, epilog=_THREADS, allow_abbrev=False
    )
    models = parser.add_argument_group("models")
    models.add_argument(
        "--config",
        nargs="+",
        default=[],
        help="models with random weights: mmfreelm-370m, mmfreelm-1.3b, mmfreelm-2.7b, "
        "bitnet-2b-4t, or a config.json",
    )
    models.add_argument("--model", help="folder or Hub repository of a model with its weights")
    models.add_argument("--revision", help="branch, tag or commit of the repository")
    add_latent_flag(models)
    models.add_argument(
        "--dtype",
        choices=DTYPES,
        help="float type to compute in; default: the checkpoint's, float32 for random weights",
    )
    amount = parser.add_argument_group("amount")
    amount.add_argument("--prompt-tokens", type=positive, help="tokens of the prompt (128)")
    amount.add_argument(
        "--positions", type=positive, nargs="+", help="tokens before those decoded (16 512 2048)"
    )
    amount.add_argument("--decoded-tokens", type=positive, help="tokens decoded in a round (32)")
    amount.add_argument("--rounds", type=positive, help="times that everything is measured (5)")
    amount.add_argument(
        "--products",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure ternary products too",
    )
    amount.add_argument(
        "--quick", action="store_true", help="seconds-long run from the caches, to try the command"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if args.model is None and args.revision is not None:
        raise UsageError("[bench] 'revision' must come with 'model' but came alone.")
    from ..evaluation.benchmark import benchmark_model, benchmark_products, measure_machine
    from ..platform.memory_reader import memory_reader

    settings = _settings(args)
    configs = {name: _read_config(name) for name in args.config}
    show: Callable[[str], None] = _silent if args.json else _show
    with memory_reader() as reader:
        machine = measure_machine(reader, settings)
        show(_machine_lines(machine))
        products = []
        if args.products:
            show(_PRODUCT_HEADER)
            for product in benchmark_products(reader, settings):
                products.append(product)
                show(_product_line(product))
        models = []
        for name, model in _models(args, configs):
            result = benchmark_model(reader, model, name, settings)
            models.append(result)
            show(_model_lines(result))
            del model
    if args.json:
        print(
            json.dumps(
                {
                    "machine": machine.to_json(),
                    "products": [product.to_json() for product in products],
                    "models": [model.to_json() for model in models],
                }
            )
        )
    return 0


def _settings(args: argparse.Namespace) -> "BenchmarkSettings":
    from ..evaluation.benchmark import QUICK, BenchmarkSettings

    given: dict[str, Any] = {
        name: getattr(args, name) for name in _SETTINGS if getattr(args, name) is not None
    }
    if "positions" in given:
        given["positions"] = tuple(given["positions"])
    return replace(QUICK if args.quick else BenchmarkSettings(), **given)


def _read_config(name: str) -> dict[str, Any]:
    from ..evaluation.benchmark_weights import PRESETS
    from ..hub.json_file import read_json_object

    if name.lower() in PRESETS:
        return PRESETS[name.lower()]
    path = Path(name)
    if not path.exists():
        raise UsageError(
            f"[bench] 'config' must be one of {', '.join(PRESETS)} or a file but got {name!r}."
        )
    return read_json_object(path / "config.json" if path.is_dir() else path)


def _models(
    args: argparse.Namespace, configs: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, "Decoder"]]:
    """Each model as its turn comes, so that one is in memory at a time."""
    import mlx.core as mx

    from ..evaluation.benchmark_weights import random_model
    from ..hub import load_model, open_checkpoint

    dtype = getattr(mx, args.dtype) if args.dtype else None
    for name, config in configs.items():
        yield f"{name}, random weights", random_model(config, dtype or mx.float32)
    if args.model is not None:
        checkpoint = open_checkpoint(args.model, args.revision, args.latent)
        yield args.model, load_model(checkpoint, dtype=dtype)


def _show(text: str) -> None:
    print(text, flush=True)


def _silent(_: str) -> None:
    pass


def _machine_lines(machine: "MachineResult") -> str:
    best, median = machine.to_json()["read_gb_per_second"].values()
    return (
        f"{machine.device.name}, {machine.threads} thread(s), products by the backend "
        f"'{machine.backend}'\n"
        f"memory read: {best:.1f} GB/s at best, {median:.1f} median ({machine.read_method})\n"
        "'limit' is a plain read of the same memory, in turn with what is measured."
    )


_PRODUCT_HEADER = (
    f"\n{'ternary product':>16} {'rows':>5} {'us':>9} {'GB/s':>7} {'GMAC/s':>7} {'of limit':>9}"
)


def _product_line(product: "ProductResult") -> str:
    shown = product.to_json()
    micros = product.matrix_bytes / product.bytes_per_second * 1e6
    return (
        f"{product.output_dims:>9} x {product.input_dims:<4} {product.rows:>5} {micros:>9.1f} "
        f"{shown['gb_per_second']:>7.1f} {shown['gmac_per_second']:>7.1f} "
        f"{product.bandwidth_share:>9.0%}"
    )


def _model_lines(model: "ModelResult") -> str:
    lines = [
        f"\n{model.name}: {model.token_bytes / 1e6:.1f} MB a token, "
        f"{model.peak_bytes / 1e6:.0f} MB of memory at most",
        f"  prefill of {model.prompt_tokens}: {model.prefill_tokens_per_second:.1f} tokens/s",
    ]
    lines += [
        f"  decode after {result.position}: {result.tokens_per_second:.1f} tokens/s, "
        f"{result.bandwidth_share:.0%} of limit"
        for result in model.decode
    ]
    return "\n".join(lines)
