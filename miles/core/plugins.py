"""User functions by dotted path, checked against a declared signature before anything runs."""

import importlib
import inspect
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any


class PluginError(ValueError):
    """A dotted path that cannot be used; the message says why and what is expected."""


def load_attribute(path: str) -> Any:
    """Import ``package.module.attribute`` (or ``package.module:attribute``)."""
    module_name, _, attribute = path.replace(":", ".").rpartition(".")
    if not module_name:
        raise PluginError(f"{path!r} is not a dotted path (package.module.name)")
    module = load_module(module_name)
    if not hasattr(module, attribute):
        raise PluginError(f"module {module_name!r} has no {attribute!r}")
    return getattr(module, attribute)


def load_module(name: str) -> ModuleType:
    """Import a user's module. ``PluginError`` says what it raised while it was loaded."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        absent = error.name or ""
        if name == absent or name.startswith(f"{absent}."):
            remedy = "is its folder on PYTHONPATH?"
        else:
            remedy = "it imports a module that is not installed here"
        raise PluginError(f"cannot import {name!r} ({error}); {remedy}") from error
    except (Exception, SystemExit) as error:
        raise PluginError(f"importing {name!r} fails: {_told(error)}") from error


def _told(error: BaseException) -> str:
    """What was raised, and the line of the module at which it was."""
    text = f"{type(error).__name__}: {error}"
    lines = [f for f in traceback.extract_tb(error.__traceback__) if f.name == "<module>"]
    return f"{text} ({lines[-1].filename}, line {lines[-1].lineno})" if lines else text


def load_function(path: str, expected: Callable[..., Any]) -> Callable[..., Any]:
    """Load a callable and check that it can be called as ``expected`` is declared.

    ``expected`` is a function (or a ``Protocol``'s ``__call__`` without ``self``) whose parameters
    the user's function must accept, and whose being ``async`` it must share.
    """
    function = load_attribute(path)
    if not callable(function):
        raise PluginError(f"{path!r} is not callable")
    wanted = inspect.signature(expected)
    check_parameters(path, function, wanted)
    target = function.__init__ if inspect.isclass(function) else function
    if inspect.iscoroutinefunction(expected) and not inspect.iscoroutinefunction(
        target if inspect.isfunction(target) or inspect.ismethod(target) else function.__call__
    ):
        raise PluginError(f"{path!r} must be async: {expected.__name__}{wanted}")
    return function


def check_parameters(path: str, function: Callable[..., Any], wanted: inspect.Signature) -> None:
    """Raise ``PluginError`` unless ``function`` can be called with the parameters of ``wanted``."""
    try:
        given = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise PluginError(f"{path!r} has no readable signature: {error}") from error
    positional = [
        p
        for p in wanted.parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    keywords = {p.name: None for p in wanted.parameters.values() if p.kind is p.KEYWORD_ONLY}
    try:
        given.bind(*positional, **keywords)
    except TypeError as error:
        raise PluginError(f"{path!r} has signature {given}, needed is {wanted}: {error}") from error
