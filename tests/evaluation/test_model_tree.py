"""The tree of a model's parts counts what there is."""

from pathlib import Path

from mlx.utils import tree_flatten

from mlx_mmfree import demo
from mlx_mmfree.evaluation.model_tree import all_parts, model_tree, tree_rows
from mlx_mmfree.hub import load_model
from tests.hub.checkpoints import tiny_checkpoint


def test_packed_and_masters_have_as_many_parameters(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny", hidden_size=64)
    packed, masters = (load_model(folder, packed=packed) for packed in (True, False))
    tree, wide = model_tree(packed), model_tree(masters)
    arrays = [array for _, array in tree_flatten(masters.parameters())]
    assert tree.parameters == wide.parameters == sum(array.size for array in arrays)
    assert wide.nbytes == sum(array.nbytes for array in arrays)
    assert tree.nbytes == sum(array.nbytes for _, array in tree_flatten(packed.parameters()))
    assert wide.bits == 32
    parts = {part.path: part for part in all_parts(tree)}
    linear = parts["blocks.1.token_mixer.forget_proj"]
    assert linear.kind == "PackedBitLinear" and linear.shape == (64, 64)
    # two bits, and 32 for the scale and each number of the norm
    assert linear.nbytes == 64 * 64 // 4 + 4 + 64 * 4
    assert parts["lower_bounds"].shape == packed.lower_bounds.shape
    for part in parts.values():
        if part.parts:
            assert part.parameters >= sum(each.parameters for each in part.parts)


def test_blocks_that_are_alike_stand_once() -> None:
    model = load_model(demo.path())
    names = [name for name, _ in tree_rows(model_tree(model))]
    assert names[:4] == ["model", "├─ embed", "├─ blocks.0 to 3, each", "│  ├─ token_norm"]
    assert names[-1].startswith("└─ ")
    del model.blocks[2].token_mixer["gate_norm"]
    names = [name for name, _ in tree_rows(model_tree(model)) if "blocks" in name]
    assert names == ["├─ blocks.0 to 1, each", "├─ blocks.2", "├─ blocks.3"]
