"""The public names: those that packages re-export or define in their `__init__`, and the errors."""

import ast
import importlib.util
import inspect
import itertools
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx_mmfree

ROOT = Path(mlx_mmfree.__file__).parent
# reached through `mmfree` and through `ops`
_PRIVATE = {"cli", "native"}
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef)


@dataclass(frozen=True)
class PublicName:
    """A name that users import.

    Attributes:
        package: Where they import it from.
        name: The name.
        home: The module that defines it.
        defined: Its name there.
    """

    package: str
    name: str
    home: str
    defined: str

    def __str__(self) -> str:
        return f"{self.package.rpartition('.')[2]}.{self.name}"

    @property
    def value(self) -> Any:
        return getattr(importlib.import_module(self.package), self.name)

    @property
    def documentation(self) -> str:
        """The docstring; of a constant, the text below its definition."""
        if inspect.isclass(self.value) or inspect.isfunction(self.value):
            return inspect.getdoc(self.value) or ""
        module = importlib.import_module(self.home)
        body = _parsed(Path(str(module.__file__))).body
        for node, text in itertools.pairwise(body):
            is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            if is_text and self.defined in _targets(node):
                return inspect.cleandoc(text.value.value)
        return ""


def packages() -> list[ModuleType]:
    """The modules that hold public names."""
    files = [ROOT / "errors.py", *ROOT.glob("*/__init__.py")]
    names = {file.parent.name if file.stem == "__init__" else file.stem for file in files}
    modules = [importlib.import_module(f"mlx_mmfree.{name}") for name in sorted(names - _PRIVATE)]
    return [module for module in modules if public_names(module)]


def public_names(package: ModuleType) -> list[PublicName]:
    """The names of a package, in the order of its file."""
    found = []
    for node in _parsed(Path(str(package.__file__))).body:
        if isinstance(node, ast.ImportFrom):
            home = importlib.util.resolve_name(
                "." * node.level + (node.module or ""), package.__name__
            )
            exported = [alias for alias in node.names if alias.asname == alias.name]
            found += [PublicName(package.__name__, a.name, home, a.name) for a in exported]
        elif isinstance(node, _DEFINITIONS) and not node.name.startswith("_"):
            found.append(PublicName(package.__name__, node.name, package.__name__, node.name))
    return found


def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _targets(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.AnnAssign):
        return [ast.unparse(node.target)]
    return [ast.unparse(target) for target in node.targets] if isinstance(node, ast.Assign) else []
