"""Code that is not in the package: plug-ins that the user names, and what installed packages declare.

Nothing that a checkpoint, an adapter or a run folder holds is ever loaded from here.
"""

import ast
import hashlib
import importlib
import importlib.util
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import cache
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar, cast

from ..arguments import check_path, checks_names
from ..errors import UsageError

_PACKAGES = {"weight_formats": "mlx_mmfree.hub.checkpoint.formats"}
"""Where the files of a kind lie, if that is not the package of its name."""


class Plugin(NamedTuple):
    """A module that holds what a file of the package could.

    Attributes:
        name: The name of such a file.
        module: The module.
        source: What messages call it; empty for a file of the package.
        is_named: Whether the user named it, so that it may hold any kind.
    """

    name: str
    module: ModuleType
    source: str = ""
    is_named: bool = False


LOADED: list[Plugin] = []
"""The plug-ins that this process was asked to load, in that order."""

_roots: dict[str, str] = {}
"""Files and folders of code that is not the library's, with what messages call them."""


@checks_names
def load_plugin(source: str | Path) -> ModuleType:
    r"""Loads a file or module with mixers, architectures or formats of weights of your own.

    From then on this process finds them by their names. A file holds what a file of the package would:
    classes of mixers, under the name of the file unless they say another; an architecture as
    `ARCHITECTURE`; a format of weights as `FORMAT`. It may hold several. Its code runs with all rights
    of the user, so only you name it: nothing in a model or a run does.

    Args:
        source: A file that ends in `.py`, relative to the current folder, or the name of a module that
            Python can import.

    Returns:
        The module. Loading it again returns the same one.

    Raises:
        TypeError: The source is no text or path, or an argument is misspelt.
        UsageError: There is no such file or module, or it does not run to its end. The message names the
            line.

    Example:
        >>> from pathlib import Path
        >>> from mlx_mmfree.models.parts.mixers import find_token_mixer
        >>> text = "from mlx_mmfree.token_mixers import HGRN\nclass Mine(HGRN):\n    name = 'mine'\n"
        >>> written = Path("my_mixer.py").write_text(text)
        >>> module = load_plugin("my_mixer.py")
        >>> find_token_mixer("mine") is module.Mine
        True
    """
    check_path("load_plugin", "source", source, "a Python file or a module")
    name = _name(source)
    stem = Path(source).stem if _is_file(source) else name.rpartition(".")[2]
    for plugin in LOADED:
        if plugin.module.__name__ == name:
            return plugin.module
    if _is_file(source):
        module = _run_file(Path(source).expanduser().resolve(), name, str(source))
    else:
        module = _import(name, "'source'", "Name a file that ends in .py, or install its package.")
    LOADED.append(Plugin(stem, module, str(source), is_named=True))
    return module


def load_listed(
    sources: Iterable[str], folder: Path, agrees: Callable[[str], bool] = lambda source: True
) -> None:
    """Loads the plug-ins that a file lists; those that are files begin at its folder.

    Args:
        sources: Their files or modules.
        folder: The folder of the file.
        agrees: Whether one may be loaded that is not loaded yet.

    Raises:
        UsageError: One cannot be loaded, or may not.
    """
    for source in sources:
        found = folder / Path(source).expanduser() if _is_file(source) else source
        shown = str(found)
        if _name(found) not in {plugin.module.__name__ for plugin in LOADED} and not agrees(shown):
            raise UsageError(
                f"[plugin] 'plugins' names {shown!r}, whose code would run. Give --plugin {shown} too, "
                "if you trust it."
            )
        load_plugin(found)


def _name(source: str | Path) -> str:
    """The name of a plug-in's module."""
    if not _is_file(source):
        return str(source)
    file = Path(source).expanduser().resolve()
    # two files of one name are two modules, and none replaces a module of Python
    return f"plugin_{hashlib.sha256(os.fsencode(file)).hexdigest()[:12]}_{file.stem}"


def _is_file(source: str | Path) -> bool:
    return isinstance(source, Path) or source.endswith(".py") or os.sep in source


def _run_file(file: Path, name: str, shown: str) -> ModuleType:
    if not file.is_file():
        raise UsageError(
            f"[plugin] 'source' must be a Python file that is there but there is no file '{shown}'."
        )
    loader = SourceFileLoader(name, str(file))
    spec = importlib.util.spec_from_loader(name, loader)
    module = importlib.util.module_from_spec(cast(ModuleSpec, spec))
    _roots[str(file)] = shown
    # dataclasses look their module up while it runs
    sys.modules[name] = module
    try:
        _run(lambda: loader.exec_module(module), "'source'", shown)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import(name: str, what: str, hint: str) -> ModuleType:
    """Imports a module by its name."""
    top = name.partition(".")[0]
    spec = importlib.util.find_spec(top) if top.isidentifier() else None
    if spec is None:
        raise UsageError(
            f"[plugin] {what} must be a module that Python finds but got {name!r:.100}. {hint}"
        )
    for root in spec.submodule_search_locations or [str(spec.origin)]:
        _roots[root] = name
    module: ModuleType = _run(lambda: importlib.import_module(name), what, name)
    return module


def _run(run: Callable[[], Any], what: str, shown: str) -> Any:
    """Runs code that is not the library's. Whatever goes wrong in it is one sentence."""
    try:
        return run()
    except (Exception, SystemExit) as error:
        problem = failure(error) or f"'{shown}' ends with {_described(error)}"
        raise UsageError(f"[plugin] {what} must run to its end but {problem}.") from error


def failure(error: BaseException) -> str | None:
    """The line of a plug-in in which an error arose, and the error; `None` if it was in none."""
    lines: list[tuple[str, int | None]] = [
        (frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)
    ]
    if isinstance(error, SyntaxError) and error.filename is not None:
        lines.append((error.filename, error.lineno))
    for file, line in reversed(lines):
        for root, shown in _roots.items():
            if file == root or file.startswith(root + os.sep):
                path = shown if file == root else os.path.relpath(file, os.path.dirname(root))
                return f"line {line} of '{path}' ends with {_described(error)}"
    return None


def _described(error: BaseException) -> str:
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}".rstrip(":. ")


def where_else() -> str:
    """A sentence for errors about an unknown name: a plug-in may have it."""
    text = (
        "A plug-in may have it: name its file with --plugin, under 'plugins' in the YAML file of train "
        "or distil, or to mlx_mmfree.load_plugin."
    )
    if LOADED:
        sources = ", ".join(f"'{plugin.source}'" for plugin in LOADED)
        text += f" Of what is loaded, {sources}, nothing has it."
    return text


_MLX_LM_NAME = re.compile(r"\w{1,100}", re.ASCII)


def of_mlx_lm(model_type: object) -> str:
    """A sentence for errors: whether mlx-lm runs models of this type, and by which command.

    It is read from the files of the installed mlx-lm, whose import takes seconds.
    """
    found = importlib.util.find_spec("mlx_lm")
    if found is None or not found.submodule_search_locations:
        return "mlx-lm, which may have it, is not installed: pip install mlx-lm."
    if _mlx_lm_has(Path(found.submodule_search_locations[0]), model_type):
        return "The installed mlx-lm has it: mlx_lm.generate --model MODEL --prompt TEXT."
    return "The installed mlx-lm does not have it either."


def _mlx_lm_has(package: Path, model_type: object) -> bool:
    if not isinstance(model_type, str):
        return False
    name = model_type
    for node in ast.parse(_text(package / "utils.py")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODEL_REMAPPING":
            # the types that it runs as others
            name = ast.literal_eval(node.value).get(model_type, model_type)
    if not _MLX_LM_NAME.fullmatch(name):
        return False
    # parts that models share lie there too
    return "\nclass Model(" in _text(package / "models" / f"{name}.py")


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.is_file() else ""


@cache
def installed(kind: str) -> tuple[EntryPoint, ...]:
    """The things of a kind that installed packages declare by the entry points `mlx_mmfree.<kind>`."""
    declared = _entry_points().select(group=f"mlx_mmfree.{kind}")
    return tuple(sorted(declared, key=lambda each: each.name))


@cache
def _entry_points() -> Any:
    """The entry points of all installed packages, whose files are read once for all kinds."""
    return entry_points()


def entry_module(entry: EntryPoint) -> ModuleType:
    """The module of an entry point.

    Raises:
        UsageError: It cannot be imported.
    """
    package = entry.dist.name if entry.dist else entry.module
    what = f"{entry.name!r} of the installed package {package}"
    return _import(entry.module, what, f"Mend it, or leave it out: pip uninstall {package}")


def modules_of(kind: str) -> list[Plugin]:
    """The modules that may hold things of a kind: the package's own, other packages', plug-ins."""
    package = _PACKAGES.get(kind, f"mlx_mmfree.{kind}")
    files = pkgutil.iter_modules(importlib.import_module(package).__path__)
    own = [
        Plugin(file.name, importlib.import_module(f"{package}.{file.name}"))
        for file in sorted(files, key=lambda file: file.name)
        if not file.ispkg
    ]
    others = [Plugin(each.name, entry_module(each), each.value) for each in installed(kind)]
    return [*own, *others, *LOADED]


Record = TypeVar("Record")


def records_of(kind: str, attribute: str, base: type[Record]) -> dict[str, Record]:
    """The records that modules of a kind hold under a name, by their own `name`.

    Raises:
        UsageError: One is something else, or has a name that is taken.
    """
    found: dict[str, Record] = {}
    for plugin in modules_of(kind):
        record = getattr(plugin.module, attribute, None)
        if record is None and plugin.is_named:
            continue
        if not isinstance(record, base):
            raise UsageError(
                f"[plugin] '{attribute}' of {plugin.source or plugin.name} must be of the class "
                f"{base.__name__} but got {record!r:.80}."
            )
        add(found, str(getattr(record, "name", "")), record, plugin)
    return found


def add(found: dict[str, Any], name: str, value: Any, plugin: Plugin) -> None:
    """Adds something under its name.

    Raises:
        UsageError: The name is taken, and would stand for something else from now on.
    """
    if found.setdefault(name, value) is not value:
        raise UsageError(
            f"[plugin] the names in '{plugin.source or plugin.name}' must be new ones but {name!r} is "
            "taken. Give it another name."
        )
