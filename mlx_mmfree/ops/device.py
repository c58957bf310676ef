"""The public face of `backend`: facts about the device and how MLX runs, for code above operations."""

from .backend import dispatch as _dispatch
from .backend.choice import untimed as untimed
from .backend.compilation import can_compile as can_compile
from .backend.compilation import compiled as compiled
from .backend.compilation import fused as fused
from .backend.compilation import random_key as random_key
from .backend.compilation import set_random_key as set_random_key
from .backend.dispatch import FLOATS as FLOATS
from .backend.dispatch import backend_report as backend_report
from .backend.dispatch import forced_backend as forced_backend
from .backend.dispatch import on_cpu as on_cpu
from .backend.dispatch import use_plain_operations as use_plain_operations
from .backend.gradient import with_reference_gradient as with_reference_gradient
from .backend.gradient import without_gradients as without_gradients
from .backend.launch import FEW_ROWS as FEW_ROWS
from .backend.self_check import check_early as check_early
from .backend.stored_results import mlx_version as mlx_version


def runs_metal_kernels() -> bool:
    """Returns whether Metal kernels can run on the default device."""
    return _dispatch.metal_unavailable() is None
