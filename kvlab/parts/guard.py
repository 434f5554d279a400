"""Whose fault it was: a part's calls pass through a guard, which turns what it raises into a PartError.

    engine --call--> guard --call--> your part
                       |                | raises, or returns what the engine could make nothing of
                       '<---------------'
                PartError("your part `fork` ..."), from your own exception

The guard of a class is a subclass of it, so what you wrote stays what it is, its own attributes included.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, NoReturn

Complaint = Callable[..., str | None]  # (result, *arguments), self included -> what is wrong with it, or None


class PartError(RuntimeError):
    """A replaced part raised, or returned something that it must not. `part` is its name in Parts."""

    def __init__(self, part: str, message: str):
        super().__init__(message)
        self.part = part


def guard_function(part: str, function: Callable, complaint: Complaint | None = None, name: str = "") -> Callable:
    """`function` as it is, but for what goes wrong in it. name: how to call it, if not as its part is."""
    name = name or getattr(function, "__name__", part)

    @wraps(function)
    def guarded(*args, **kwargs):
        try:
            result = function(*args, **kwargs)
        except PartError:
            raise  # another part, which this one called
        except Exception as error:
            if isinstance(error, NotImplementedError):
                _blame(part, f"your part `{part}` is not written yet: {name}: {error}", error)
            _blame(part, f"your part `{part}` raised {type(error).__name__} in {name}: {error}", error)
        if complaint is not None and (message := complaint(result, *args)):
            _blame(part, f"your part `{part}`: {name} {message}")
        return result

    return guarded


def guard_class(part: str, cls: type, complaints: Mapping[str, Complaint | None], attributes=()) -> type:
    """A subclass of `cls` whose __init__, whose methods named in `complaints` and whose properties are guarded.

    attributes: what an instance must have once it is made.
    """

    def has_attributes(_, instance, *args):
        lacks = [name for name in attributes if not hasattr(instance, name)]
        return f"left out what the engine reads: set self.{', self.'.join(lacks)}" if lacks else None

    body: dict[str, Any] = {"__slots__": (), "__module__": cls.__module__, "__doc__": cls.__doc__}
    for name, complaint in {**complaints, "__init__": has_attributes}.items():
        body[name] = guard_function(part, getattr(cls, name), complaint, f"{cls.__name__}.{name}")
    for name in attributes:
        found = inspect.getattr_static(cls, name, None)
        if isinstance(found, property):
            body[name] = property(guard_function(part, found.fget, name=f"{cls.__name__}.{name}"))
    return type(cls.__name__, (cls,), body)


def _blame(part: str, message: str, error: Exception | None = None) -> NoReturn:
    """Raise a PartError; but what goes wrong while one is being cleaned up after is its consequence, so raise that."""
    earlier = sys.exception() if error is None else error.__context__
    while earlier is not None and not isinstance(earlier, PartError):
        earlier = earlier.__context__
    if earlier is not None:
        raise earlier
    raise PartError(part, message) from error
