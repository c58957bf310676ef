"""The examples in the package's docstrings run as written."""

import doctest
import importlib
import pkgutil

import mlx.core as mx
import mlx.nn as nn
import pytest

import mlx_mmfree

MODULES = [m.name for m in pkgutil.walk_packages(mlx_mmfree.__path__, "mlx_mmfree.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    module = importlib.import_module(name)
    names = {"mx": mx, "nn": nn, **vars(mlx_mmfree), **vars(module)}
    assert doctest.testmod(module, extraglobs=names).failed == 0
