"""Answers to wrong arguments that all packages share: names, numbers, paths and models."""

import inspect
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter
from numbers import Integral, Real
from types import NoneType
from typing import Any, ParamSpec, TypeVar, get_args, get_origin

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_OTHER_NAMES = {
    "epsilon": "eps",
    "heads": "num_heads",
    "lr": "learning_rate",
    "max_new_tokens": "max_tokens",
    "output": "adapter_path",
    "steps": "iters",
    "temperature": "temp",
}
"""Names of arguments in other libraries and in the commands, with what they are called here."""


def did_you_mean(name: str, known: Collection[str], cutoff: float = 0.6) -> str:
    """The question that names what is most like a misspelt name, with a space before it.

    Args:
        name: What was given.
        known: What there is.
        cutoff: The least likeness, between 0 and 1.

    Returns:
        The question, or an empty text where nothing is like the name.

    Example:
        >>> did_you_mean("bitnet", ["bitnet-2b-4t", "mmfreelm-370m"])
        " Did you mean 'bitnet-2b-4t'?"
        >>> did_you_mean("falcon", ["x"])
        ''
    """
    lower = {each.lower(): each for each in known}
    close = get_close_matches(name.lower(), lower, n=1, cutoff=cutoff)
    return f" Did you mean '{lower[close[0]]}'?" if close else ""


def meant_name(name: str, names: Collection[str]) -> str:
    """`did_you_mean` of an argument or a key, which other libraries may call by another name."""
    other = _OTHER_NAMES.get(name, name)
    return did_you_mean(other if other in names else name, names)


def checks_names(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Names the nearest argument to a caller who misspells one, and those that must be booleans, numbers
    or functions but are not.
    """
    makes = function.__name__ == "__init__"
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return function
    names = list(parameters)[makes:]
    known = set(names)
    kinds = {} if makes else _kinds(parameters)

    @wraps(function)
    def reported(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not kwargs.keys() <= known:
            check_known(type(args[0]).__name__ if makes else function.__name__, kwargs, names)
        if kinds:
            _check_kinds(
                function.__name__, kinds, {**dict(zip(names, args, strict=False)), **kwargs}
            )
        return function(*args, **kwargs)

    return reported


def checks_layer(constructor: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Checks the arguments of a layer: their names, which are missing, and the kinds of some.

    The messages name the layer's class. Python would name the base class that defines the constructor.
    """
    parameters = inspect.signature(constructor).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return constructor
    _, *names = parameters
    unnamed = [name for name in names if parameters[name].kind is Parameter.POSITIONAL_OR_KEYWORD]
    required = [name for name in names if parameters[name].default is Parameter.empty]
    kinds = _kinds(parameters)

    @wraps(constructor)
    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        caller, values = type(args[0]).__name__, args[1:]
        if len(values) > len(unnamed):
            others = _listed(name for name in names if name not in unnamed)
            raise TypeError(
                f"[{caller}] only {_listed(unnamed)} may be given without a name but got {len(values)} "
                f"values. Name the others: {others}."
            )
        given = {**dict(zip(unnamed, values, strict=False)), **kwargs}
        check_known(caller, given, names)
        if missing := [name for name in required if name not in given]:
            verb = "is" if len(missing) == 1 else "are"
            raise TypeError(f"[{caller}] {_listed(missing)} must be given but {verb} missing.")
        _check_kinds(caller, kinds, given)
        constructor(*args, **kwargs)

    return checked


def _kinds(parameters: Mapping[str, Parameter]) -> dict[str, tuple[Any, bool]]:
    """The kinds of arguments that are booleans, floats or functions, and whether they may be `None`."""
    found = {}
    for name, parameter in parameters.items():
        parts = get_args(parameter.annotation) or (parameter.annotation,)
        [kind, *others] = [part for part in parts if part is not NoneType]
        kind = get_origin(kind) or kind
        # the arguments of a function are parts of its annotation too
        if get_origin(parameter.annotation) is Callable:
            kind, others = Callable, []
        if kind in (bool, float, Callable) and not others:
            found[name] = kind, NoneType in parts or parameter.default is None
    return found


def _check_kinds(
    caller: str, kinds: Mapping[str, tuple[Any, bool]], given: Mapping[str, Any]
) -> None:
    for name in kinds.keys() & given.keys():
        (kind, is_optional), value = kinds[name], given[name]
        if is_optional and value is None:
            continue
        if kind is float:
            check_numbers(caller, **{name: value})
        # any text but the empty one would count as true, "no" too
        elif kind is bool and not isinstance(value, bool):
            raise TypeError(f"[{caller}] '{name}' must be True or False but got {value!r:.80}.")
        elif kind is Callable and not callable(value):
            raise TypeError(f"[{caller}] '{name}' must be a function but got {value!r:.80}.")


def check_known(caller: str, given: Iterable[str], names: Collection[str]) -> None:
    """Refuses a name that is none of the arguments.

    Args:
        caller: What reports it.
        given: The names of what was given.
        names: The arguments that there are.

    Raises:
        TypeError: A name is not known. The message has the nearest one.
    """
    for name in given:
        if name not in names:
            known = meant_name(name, names) or f" Known are {', '.join(names)}."
            raise TypeError(f"[{caller}] the argument {name!r:.60} is not known.{known}")


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(map(repr, names))


def check_numbers(caller: str, **numbers: Any) -> None:
    """Refuses what is no number.

    Args:
        caller: What reports it.
        numbers: By the names of the arguments.

    Raises:
        TypeError: One is a text, a boolean, an array or something else.
    """
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, Real):
            raise TypeError(f"[{caller}] '{name}' must be a number but got {number!r:.80}.")


def check_whole(caller: str, **numbers: Any) -> None:
    """Refuses what is no whole number.

    Args:
        caller: What reports it.
        numbers: By the names of the arguments.

    Raises:
        TypeError: One has a fraction, or is no number.
    """
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, Integral):
            raise TypeError(f"[{caller}] '{name}' must be a whole number but got {number!r:.80}.")


def check_choice(caller: str, name: str, value: Any, choices: Collection[Any]) -> None:
    """Refuses what is none of a few values.

    Args:
        caller: What reports it.
        name: The argument.
        value: Its value.
        choices: The values.

    Raises:
        ValueError: It is none of them.
    """
    if value not in tuple(choices):
        raise ValueError(
            f"[{caller}] '{name}' must be one of {_listed(choices)} but got {value!r:.80}."
        )


def check_path(caller: str, name: str, path: Any, what: str) -> None:
    """Refuses what is neither a text nor a path.

    Args:
        caller: What reports it.
        name: The argument.
        path: Its value.
        what: What it names, as text.

    Raises:
        TypeError: It is of another type.
    """
    if not isinstance(path, (str, os.PathLike)):
        # the text of a model has a line for each layer
        got = type(path).__name__ if callable(path) else f"{path!r:.80}"
        raise TypeError(f"[{caller}] '{name}' must be the text or path of {what} but got {got}.")


def check_list(caller: str, name: str, values: Any, what: str) -> None:
    """Refuses a text, or what cannot be gone through, where a list is asked for.

    Args:
        caller: What reports it.
        name: The argument.
        values: Its value.
        what: What the list holds, as text.

    Raises:
        TypeError: It is a text, a mapping or no collection. Of a text, each letter would count.
    """
    if isinstance(values, str):
        raise TypeError(
            f"[{caller}] '{name}' must be a list of {what} but got the text {values!r:.80}. Write "
            f"[{values!r:.80}]."
        )
    # a module is a mapping of its parameters, and bytes are numbers
    if not isinstance(values, Collection) or isinstance(values, (Mapping, bytes)):
        got = type(values).__name__ if callable(values) else f"{values!r:.80}"
        raise TypeError(f"[{caller}] '{name}' must be a list of {what} but got {got}.")


def check_model(caller: str, model: Any, tokenizer: Any = None, name: str = "model") -> None:
    """Refuses what is no loaded model.

    Args:
        caller: What reports it.
        model: The model.
        tokenizer: What came after it, which may be the model that was meant.
        name: The argument.

    Raises:
        TypeError: It is none.
    """
    if _is_model(model):
        return
    if _is_model(tokenizer):
        raise TypeError(
            f"[{caller}] '{name}' must be the model but got {type(model).__name__}, and the model after "
            "it. Swap the two: (model, tokenizer, ...)."
        )
    got = f"the text {model!r:.80}" if isinstance(model, str) else type(model).__name__
    raise TypeError(
        f"[{caller}] '{name}' must be a loaded model but got {got}. Load it: model, tokenizer = "
        "load(path)."
    )


def _is_model(value: Any) -> bool:
    return callable(value) and hasattr(value, "pipeline")


def check_tokenizer(caller: str, tokenizer: Any, name: str = "tokenizer") -> None:
    """Refuses what is no tokenizer.

    Args:
        caller: What reports it.
        tokenizer: The tokenizer.
        name: The argument.

    Raises:
        TypeError: It cannot encode a text.
    """
    # a text has such a method too
    if isinstance(tokenizer, str) or not hasattr(tokenizer, "encode"):
        got = f"{tokenizer!r:.80}" if isinstance(tokenizer, str) else type(tokenizer).__name__
        raise TypeError(
            f"[{caller}] '{name}' must be the one that load gives with the model but got {got}. "
            f"Write: model, tokenizer = load(path); {caller}(model, tokenizer, ...)."
        )
