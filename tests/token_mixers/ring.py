"""Attention of split sequences in a group, as `python -m tests.token_mixers.ring FOLDER`."""

import json
import sys
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from mlx_mmfree.layers import RoPE
from mlx_mmfree.ops.ring_attention import ring_attention
from mlx_mmfree.token_mixers import RingAttention
from tests.process_group import connect, finish, start_group

Arrays = dict[str, mx.array]


def make(dims: int, options: dict[str, Any], group: mx.distributed.Group | None) -> RingAttention:
    """A mixer; `rope` of the options is the number of dims to rotate."""
    rope = RoPE(options["rope"]) if "rope" in options else None
    return RingAttention(dims, **(options | {"rope": rope}), group=group)


def results(mixer: RingAttention, arrays: Arrays) -> Arrays:
    """The output of a mixer for `x`, and the gradients of the sum of products with `cotangent`.

    Args:
        mixer: It gets the parameters after `parameters.`.
        arrays: Those of this process.
    """
    start = "parameters."
    parameters = [(k.removeprefix(start), v) for k, v in arrays.items() if k.startswith(start)]
    mixer.update(tree_unflatten(parameters))

    def loss(given: dict[str, Any]) -> mx.array:
        mixer.update(given["parameters"])
        y = mixer(given["x"], None, arrays.get("valid"))[0]
        return (y * arrays["cotangent"]).sum()

    y, _ = mixer(arrays["x"], None, arrays.get("valid"))
    given = {"parameters": mixer.trainable_parameters(), "x": arrays["x"]}
    gradients = cast("list[tuple[str, mx.array]]", tree_flatten(mx.grad(loss)(given)))
    return {"y": y} | {f"gradient.{path}": array for path, array in gradients}


def run_group(
    folder: Path, size: int, cases: dict[str, tuple[dict[str, Any], Arrays]]
) -> tuple[dict[str, Arrays], list[str]]:
    """Runs cases in a group, each with options and whole arrays, of which each process takes its part.

    A case with `q`, `k` and `v`, `(B, T, H, K)`, is the operation alone.

    Returns:
        The results of the whole sequence for each case, and what the last call of each process, with
        parts of different lengths, reports.
    """
    folder.mkdir(exist_ok=True)
    arrays = {f"{case}/{name}": x for case, (_, own) in cases.items() for name, x in own.items()}
    mx.save_safetensors(str(folder / "cases.safetensors"), arrays)
    (folder / "cases.json").write_text(json.dumps({case: own[0] for case, own in cases.items()}))
    outputs = finish(start_group(folder, size, "-m", "tests.token_mixers.ring", str(folder)))
    files = [folder / f"result-{rank}.safetensors" for rank in range(size)]
    assert all(file.exists() for file in files), outputs
    parts = [cast(Arrays, mx.load(str(file))) for file in files]
    found: dict[str, Arrays] = {case: {} for case in cases}
    for path in parts[0]:
        case, name = path.split("/")
        # gradients of parameters have been summed, and are the same everywhere
        whole = parts[0][path]
        if not name.startswith("gradient.parameters"):
            whole = mx.concatenate([part[path] for part in parts], axis=1)
        found[case][name] = whole
    return found, [(folder / f"error-{rank}.txt").read_text() for rank in range(size)]


def main(folder: Path) -> None:
    group = connect()
    rank, size = group.rank(), group.size()
    arrays = cast(Arrays, mx.load(str(folder / "cases.safetensors")))
    found = {}
    for case, options in json.loads((folder / "cases.json").read_text()).items():
        own = {k.removeprefix(f"{case}/"): v for k, v in arrays.items() if k.startswith(f"{case}/")}
        own = {
            k: v if k.startswith("parameters.") else mx.split(v, size, axis=1)[rank]
            for k, v in own.items()
        }
        if "q" in own:
            q, k, v = (own[name].swapaxes(1, 2) for name in "qkv")
            y = ring_attention(q, k, v, group, valid=own.get("valid"), **options)
            found[f"{case}/y"] = y.swapaxes(1, 2)
            continue
        for name, x in results(make(own["x"].shape[-1], options, group), own).items():
            is_shared = name.startswith("gradient.parameters")
            found[f"{case}/{name}"] = mx.distributed.all_sum(x, group=group) if is_shared else x
            mx.eval(found)
    mx.save_safetensors(str(folder / f"result-{rank}.safetensors"), found)
    try:
        RingAttention(8, num_heads=2, group=group)(mx.zeros((1, 2 + rank, 8)))
    except ValueError as error:
        (folder / f"error-{rank}.txt").write_text(str(error))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
