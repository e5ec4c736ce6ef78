"""Renders templates that give the same text each time, in bounded time and memory; all else is an error of theirs.

What a template computes with is plain: texts, numbers, and lists and mappings of them.  Of anything else the text may
be an address, and the order of a set changes with each process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from functools import wraps
from types import CodeType
from typing import Any

from jinja2 import BytecodeCache, StrictUndefined, Undefined, nodes
from jinja2.bccache import Bucket
from jinja2.filters import FILTERS
from jinja2.sandbox import ImmutableSandboxedEnvironment
from markupsafe import Markup

MAX_TEXT = 16 << 20  # bytes of a rendered text, and of a value while it is rendered
MAX_STEPS = 200_000  # calls and rounds of loops of one rendering
MAX_WIDTH = 10_000  # of what filters fill up
_MAX_PRODUCT = 1 << 28  # of the sizes of two values, one of which may be put at every place of the other
_MAX_BITS = 1 << 12  # of an integer
_PRINTED = (str, int, float)  # not None, which stands where a value was meant
_LISTS: Any = (list, tuple, type({}.keys()), type({}.values()), type({}.items()))
_PLAIN = (*_PRINTED, type(None), range, Undefined)
_WITHOUT = ("random", "pprint", "format", "center", "urlize", "xmlattr")  # unsteady, unbounded, or for HTML
_FILLING = {"batch", "indent", "round", "slice", "truncate", "wordwrap"}  # filters that take a number of places
_WIDE = {"center", "expandtabs", "format", "format_map", "ljust", "rjust", "zfill"}  # methods that take a width

_compiled: dict[tuple[str, str], CodeType | None] = {}


class _Compiled(BytecodeCache):
    """What this process has compiled before, by name and content: one template is rendered hundreds of times."""

    def load_bytecode(self, bucket: Bucket) -> None:
        bucket.code = _compiled.get((bucket.key, bucket.checksum))

    def dump_bytecode(self, bucket: Bucket) -> None:
        _compiled[bucket.key, bucket.checksum] = bucket.code


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one rendering.

    Args:
        beside: gives the name of a template that another one includes.
        options: of jinja2's environment.
    """

    intercepted_binops = frozenset({"+", "-", "*", "**", "%"})

    def __init__(self, beside: Callable[[str, str], str], **options: Any) -> None:
        super().__init__(
            undefined=StrictUndefined,
            autoescape=False,
            keep_trailing_newline=True,
            finalize=_printable,
            auto_reload=False,
            bytecode_cache=_Compiled(),
            **options,
        )
        self.filters = dict(_FILTERS)
        del self.globals["lipsum"]
        self.steps = 0
        self._beside = beside

    def join_path(self, template: str, parent: str) -> str:
        return self._beside(template, parent)

    def tick(self) -> None:
        """Called in every round of a loop, as `call` counts what is called."""

    def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise ValueError(f"it takes more than {MAX_STEPS} calls and rounds of loops")
        owner = getattr(called, "__self__", None)
        if isinstance(owner, str):
            _check(owner, *args, *kwargs.values())
        return super().call(context, called, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse what a slip of the pen makes too large for the memory, and sets."""
        if operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            if len(left) + len(right) > MAX_TEXT:
                raise ValueError(f"a value has more than {MAX_TEXT} parts")
        elif operator == "**" or not all(isinstance(side, (int, float)) for side in (left, right)):
            raise ValueError(f"{operator!r} is for numbers alone, and '**' is not there at all")
        found = super().call_binop(context, operator, left, right)
        if isinstance(found, int) and found.bit_length() > _MAX_BITS:
            raise ValueError(f"a number has more than {_MAX_BITS} bits")
        return found

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return super().is_safe_attribute(obj, attr, value) and not (isinstance(obj, str) and attr in _WIDE)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """As jinja2 does; then what `~` joins goes through a filter, which is checked, and loops are counted."""
        tree = super()._parse(source, name, filename)
        for joined in list(tree.find_all(nodes.Concat)):
            joined.nodes = [
                nodes.Filter(node, "string", [], [], None, None, lineno=node.lineno) for node in joined.nodes
            ]
        for loop in list(tree.find_all(nodes.For)):
            called = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None, lineno=loop.lineno)
            loop.body.insert(0, nodes.ExprStmt(called, lineno=loop.lineno))
        tree.set_environment(self)
        return tree


def line_of(environment: Sandbox, error: SyntaxError) -> int | None:
    """The line of a template whose code in Python is none, as where blocks are nested too deeply."""
    assert environment.loader is not None
    assert error.filename is not None
    source, _, _ = environment.loader.get_source(environment, error.filename)
    code = environment.compile(source, error.filename, error.filename, raw=True)
    numbers = code.rpartition("debug_info = '")[2].partition("'")[0]
    pairs = [[int(number) for number in pair.split("=")] for pair in numbers.split("&") if "=" in pair]
    return max((line for line, made in pairs if made <= (error.lineno or 0)), default=None)


# -- values ------------------------------------------------------------------------------------------------------------


def _printable(value: Any) -> Any:
    if isinstance(value, (*_PRINTED, Undefined)):
        return value
    raise TypeError(f"a text or a number is expected where something is printed, got {type(value).__name__}")


def _size(value: Any) -> int:
    """How much there is of a value; raises if it is not plain, or too large."""
    if isinstance(value, Undefined):
        return 0
    size = len(value) if isinstance(value, Sized) else 0
    if isinstance(value, _LISTS):
        size += sum(_size(part) for part in value)
    elif isinstance(value, dict):
        size += sum(map(_size, value)) + sum(map(_size, value.values()))
    elif not isinstance(value, _PLAIN):
        raise TypeError(f"texts, numbers, and lists and mappings of them can be worked on, got {type(value).__name__}")
    if size > MAX_TEXT:
        raise ValueError(f"a value has more than {MAX_TEXT} parts")
    return size


def _check(value: Any, *more: Any) -> None:
    if _size(value) * max(map(_size, more), default=0) > _MAX_PRODUCT:
        raise ValueError("what this makes may be too large")


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that takes and gives plain values alone, as far as they are looked at by another."""
    passed = hasattr(function, "jinja_pass_arg")  # the first argument is then jinja2's

    @wraps(function)
    def check(*args: Any, **kwargs: Any) -> Any:
        value, *more = (*args[passed:], *kwargs.values())
        _check(value, *more)
        if name in _FILLING and any(isinstance(number, int) and abs(number) > MAX_WIDTH for number in more):
            raise ValueError(f"{name!r} takes numbers up to {MAX_WIDTH}")
        found = function(*args, **kwargs)
        if isinstance(found, Markup):  # whose methods make texts of whatever they are given
            return str.__str__(found)
        return list(found) if isinstance(found, Iterator) else found

    return check


_FILTERS = {name: _checked(name, function) for name, function in FILTERS.items() if name not in _WITHOUT}
