"""Docstrings of public names are complete, and all examples in docstrings run as written."""

import ast
import doctest
import importlib
import inspect
import re
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import mlx_mmfree
from mlx_mmfree.layers.arguments import check_sizes
from tests.public_names import PublicName, packages, public_names

ROOT = Path(mlx_mmfree.__file__).parent
PUBLIC = [name for package in packages() for name in public_names(package)]


def has_examples(file: Path) -> bool:
    source = file.read_text(encoding="utf-8")
    if ">>>" not in source:
        return False
    described = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, described)]
    return any(runs(ast.get_docstring(node) or "") for node in nodes)


def runs(text: str) -> bool:
    """Returns whether a docstring holds an example of which nothing is skipped."""
    examples = doctest.DocTestParser().get_examples(text)
    return bool(examples) and not any(each.options.get(doctest.SKIP) for each in examples)


def names_for(module: ModuleType) -> dict[str, Any]:
    """The names that a module's examples can use: what users import, and what the module defines."""
    package = importlib.import_module(".".join(module.__name__.split(".")[:2]))
    own = {n: v for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__}
    public = {name.name: name.value for name in public_names(package)}
    shared = {"mx": mx, "nn": nn, "np": np, "demo": mlx_mmfree.demo}
    return {**shared, **{n: getattr(mlx_mmfree, n) for n in mlx_mmfree.__all__}, **own, **public}


MODULES = [
    ".".join(file.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
    for file in sorted(ROOT.rglob("*.py"))
    if has_examples(file)
]


@pytest.mark.sample(40)
@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    result = doctest.testmod(module, globs=names_for(module))
    assert result.attempted > 0 and result.failed == 0


CONSTANTS = [n for n in PUBLIC if not (inspect.isclass(n.value) or inspect.isfunction(n.value))]


@pytest.mark.parametrize("name", CONSTANTS, ids=str)
def test_examples_of_constants(name: PublicName) -> None:
    names = names_for(importlib.import_module(name.home))
    test = doctest.DocTestParser().get_doctest(name.documentation, names, str(name), None, None)
    result = doctest.DocTestRunner().run(test)
    assert result.attempted > 0 and result.failed == 0


# ordinary mathematics, compositions and layouts of this library: they come from no paper
WITHOUT_SOURCE = {
    *("Perplexity", "score_continuations", "CountPenalty", "LogitBias", "temperature"),
    *("ImageProcessor", "apply_head", "dense_matmul", "pack_ternary", "unpack_ternary"),
    *("ACTIVATIONS", "cross_entropy", "relative_weights"),
    *("log_softmax", "logsumexp", "long_mean", "long_sum"),
}


def missing(value: Any, documentation: str) -> list[str]:
    """The parts that the docstring of a name lacks."""
    is_class, is_function = inspect.isclass(value), inspect.isfunction(value)
    if is_class and issubclass(value, BaseException):
        return [] if documentation else ["a sentence"]
    found = [] if runs(documentation) else ["an example that runs"]
    has_formula = ".. math::" in documentation
    if has_formula and not re.search(r"^Sources?: |arXiv \d{4}\.\d{5}", documentation, re.M):
        found.append("the source of its formula")
    if not (is_class or is_function):
        return found
    signature = inspect.signature(value)
    listed = _listed(documentation)
    parameters = {} if getattr(value, "_is_protocol", False) else signature.parameters
    found += [f"'{each}'" for each in parameters if each not in listed]
    # a context manager is entered, not returned
    is_context = hasattr(value, "__wrapped__") and inspect.isgeneratorfunction(value.__wrapped__)
    gives = is_function and not is_context and signature.return_annotation not in (None, "None")
    if gives and not re.search(r"^(Returns|Yields):$", documentation, re.M):
        found.append("what it returns")
    if is_class and issubclass(value, nn.Module) and "\nShape:\n" not in documentation:
        found.append("shapes")
    if _raises(value) and "\nRaises:\n" not in documentation:
        found.append("the errors")
    return found


def _listed(documentation: str) -> set[str]:
    """The arguments and attributes that sections describe."""
    sections = re.findall(r"^(?:Args|Attributes):\n((?:(?:    .*)?\n?)*)", documentation, re.M)
    lines = "\n".join(sections)
    entries = re.findall(r"^    ([\w, ]+):", lines, re.M)
    return {each for entry in entries for each in entry.split(", ")}


def _raises(value: Any) -> bool:
    """Returns whether a function, or the constructor of a class, raises or checks its arguments."""
    if getattr(value, "_is_protocol", False):
        return False
    makers = ("__init__", "__post_init__")
    made = [vars(value).get(maker) for maker in makers] if inspect.isclass(value) else [value]
    unwrapped = [inspect.unwrap(each) for each in made if each]
    written = [each for each in unwrapped if each.__code__.co_filename != "<string>"]
    sources = [textwrap.dedent(inspect.getsource(each)) for each in written]
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    calls = [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]
    is_checked = any(re.search(r"(^|[._])check(_|$)", call) for call in calls)
    return is_checked or any(isinstance(node, ast.Raise) for node in nodes)


@pytest.mark.parametrize("name", PUBLIC, ids=str)
def test_public_names_are_documented(name: PublicName) -> None:
    found = missing(name.value, name.documentation)
    if name.name in WITHOUT_SOURCE:
        # the list holds no name that has a source
        found.remove("the source of its formula")
    assert found == []


_ELSEWHERE = re.compile(
    r"^(?:Args|Attributes|Raises|Shape|Source|State): as (?:for |of |in )?`|^As (?:for |of |in )?`"
    r"|: As (?:for |of |in )?`|: As the argument|: [Ll]ikewise|, likewise",
    re.M,
)
"""References to arguments, shapes or errors that another docstring lists."""


@pytest.mark.parametrize("name", PUBLIC, ids=str)
def test_a_docstring_says_all_itself(name: PublicName) -> None:
    assert not _ELSEWHERE.search(name.documentation)


def test_references_to_other_docstrings_are_found() -> None:
    for words in (
        "Args: as `X`.",
        "    x: As for `X`.",
        "    y, z: Likewise.",
        "m: The first, likewise.",
    ):
        assert _ELSEWHERE.search(f"It does.\n\n{words}\n")
    assert not _ELSEWHERE.search("linear: Makes a projection, called as `linear(bias=...)`.")


def test_what_a_docstring_lacks_is_reported() -> None:
    def halved(number: int, is_exact: bool = True) -> float:
        """Halves a number.

        .. math::
            y = x / 2

        Args:
            number: The number.

        Example:
            >>> halved(3)  # doctest: +SKIP
            1.5
        """
        if is_exact and number % 2:
            raise ValueError(number)
        return number / 2

    class Scale(nn.Module):
        """Multiplies by a number."""

        def __init__(self, factor: float):
            super().__init__()
            check_sizes("Scale", factor=factor)

    lacks = missing(halved, inspect.getdoc(halved) or "")
    assert lacks[:2] == ["an example that runs", "the source of its formula"]
    assert lacks[2:] == ["'is_exact'", "what it returns", "the errors"]
    lacks = missing(Scale, inspect.getdoc(Scale) or "")
    assert lacks == ["an example that runs", "'factor'", "shapes", "the errors"]
    assert missing(BaseException, "") == ["a sentence"]


_HEADER = re.compile(r"\w+:( as |$)")
_ENTRY = re.compile(r"    [^ :][^:]*: ")
_OTHER = (".. math::", "- ", ">>>")
_END = re.compile(r"[.!?:;][)\]\"'`*]*$| and$")


def cut_sentences(documentation: str) -> list[str]:
    """The paragraphs and the entries of sections that end without the end of a sentence."""
    found, block = [], ""
    in_section = in_other = False
    # the rows of a table are no sentences
    lines = inspect.cleandoc(documentation).splitlines()
    lines = ["" if line.lstrip().startswith("|") else line for line in lines]
    for number, line in enumerate([*lines, ""]):
        words, is_inner, is_code = line.strip(), line.startswith(" "), block.startswith(">>>")
        begins_other = words.startswith(_OTHER)
        begins_entry = in_section and not is_code and _ENTRY.match(line) is not None
        if not words or begins_other or begins_entry:
            following = next((each.strip() for each in lines[number:] if each.strip()), "")
            # a sentence may go on in a formula or a list, whose items need be none
            goes_on = following.startswith(_OTHER[:2]) or block.startswith(_OTHER)
            if block and not goes_on and not _END.search(block):
                found.append(block)
            block = ""
        if words and not is_inner:
            in_section, in_other = _HEADER.match(words) is not None, words.endswith("::")
        if words.startswith(_OTHER[0]):
            in_other = True
        elif words and not (in_other and is_inner):
            block = f"{block} {words}".strip()
    return found


DOCSTRINGS = {
    f"{file.relative_to(ROOT)}:{node.lineno}": node.value.value
    for file in sorted(ROOT.rglob("*.py"))
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    if isinstance(node, ast.Expr)
    and isinstance(node.value, ast.Constant)
    and isinstance(node.value.value, str)
}


def test_sentences_end() -> None:
    cut = {where: found for where, text in DOCSTRINGS.items() if (found := cut_sentences(text))}
    assert not cut


@pytest.mark.parametrize(
    "text",
    [
        "Takes the likeliest token and ignores the",
        "Chooses a token.\n\n    The second is looked up; the first is for the\n    ",
        "Makes a sampler.\n\n    Args:\n        temp: 0 ignores the\n        top_p: The mass.",
        "Makes a sampler.\n\n    Args:\n        temp: 0 is\n            the\n\n    Returns:\n        A.",
        "Makes a sampler.\n\n    Returns:\n        The sampler of the\n    ",
    ],
)
def test_a_cut_sentence_is_found(text: str) -> None:
    assert len(cut_sentences(text)) == 1
