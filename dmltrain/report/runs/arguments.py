"""The arguments of a program in its log: `start with arguments Options(lr=0.1, ...)`, or MXNet's `Namespace(...)`.

The text is parsed to a syntax tree and only constants in it are read. Nothing is evaluated.
"""

from __future__ import annotations

import ast
import warnings

Value = str | int | float | bool | None

_LONGEST = 16 << 10  # characters
_MOST_DIGITS = 18  # of a whole number; a longer one may be no float, so it stays text
_DAMAGED = (SyntaxError, ValueError, RecursionError, MemoryError)  # what ast.parse raises


def read(line: str) -> dict[str, Value] | None:
    """The arguments in a line, by name, in their order; sequences as `3,32,32`. None if it has none or is damaged."""
    start = min((at for name in ("Namespace(", "Options(") if (at := line.find(name)) >= 0), default=-1)
    text = line[start : line.rfind(")") + 1]
    if start < 0 or not text or len(text) > _LONGEST or "\0" in text:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escape sequences
            call = ast.parse(text, mode="eval").body
        return _arguments(call)
    except _DAMAGED:
        return None


def _arguments(call: ast.expr) -> dict[str, Value] | None:
    if not isinstance(call, ast.Call) or call.args:
        return None
    return {keyword.arg: _value(keyword.value) for keyword in call.keywords if keyword.arg}


def _value(node: ast.expr) -> Value:
    """ValueError if it is no number, text or sequence of these."""
    match node:
        case ast.Constant(value=str() | int() | float() | bool() | None as value):
            return _counted(value)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return _counted(-value)
        case ast.Name(id="inf" | "nan" as name):
            return float(name)
        case ast.Tuple(elts=nodes) | ast.List(elts=nodes):
            return ",".join(str(_value(node)) for node in nodes)
        case _:
            return ast.unparse(node)  # for example PosixPath('data'): its own text


def _counted(value: Value) -> Value:
    return str(value) if isinstance(value, int) and abs(value) >= 10**_MOST_DIGITS else value
