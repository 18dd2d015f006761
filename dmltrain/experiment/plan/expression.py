"""Expressions over variables: `0.05 * devices`, `"dist_sync" if workers > 1 else "local"`. Pure.

Python's syntax, read by its parser and evaluated by a walk over the tree; only what is listed here is allowed.
Numbers stay below 1e300 and texts are never computed, so that no expression takes long or much memory.
"""

from __future__ import annotations

import ast
import operator
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dmltrain.base.errors import UserError

MOST_CHARACTERS = 500
MOST_DEPTH = 40
LARGEST = 1e300
LARGEST_INTEGER = 10**18

Value = None | bool | int | float | str  # of variables and options

ARITHMETIC: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: lambda base, exponent: float(base) ** exponent if abs(exponent) > 64 else base**exponent,
}
COMPARISONS: dict[type[ast.AST], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda value, among: any(value == each for each in among),
    ast.NotIn: lambda value, among: all(value != each for each in among),
}


def _round(value: Any, digits: Any = None) -> Any:
    return round(value, None if digits is None else max(-300, min(300, int(digits))))


FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max, "round": _round, "int": int}
CONSTANTS: dict[str, Value] = {"null": None, "true": True, "false": False}  # as in YAML; Python's also work
ALLOWED = "expected numbers, texts, variables, + - * / // % **, comparisons, in, and, or, not, a if b else c, " + (
    ", ".join(f"{name}()" for name in FUNCTIONS)
)


@dataclass(frozen=True)
class Expression:
    """A parsed expression. `names`: the variables in it, with `_` for `-`."""

    text: str
    tree: ast.expr
    names: frozenset[str]

    def value(self, variables: Mapping[str, Value]) -> Value:
        """Its value. UserError where it has none, such as 1 / 0."""
        try:
            result = _evaluate(self.tree, variables)
        except OverflowError:
            raise UserError(f"{self.text}: the value is no number below 1e300") from None
        except (ArithmeticError, TypeError, ValueError) as error:
            raise UserError(f"{self.text}: {error}") from None
        if isinstance(result, tuple):
            raise UserError(f"{self.text}: its value is a list: expected one value")
        return result  # type: ignore[no-any-return]


def parse(text: str) -> Expression:
    """Parse `text`. UserError if it is no expression, or one that is not allowed."""
    if len(text) > MOST_CHARACTERS:
        raise UserError(f"an expression of {len(text)} characters: expected at most {MOST_CHARACTERS}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python's parser: `1 is 1`, "\d"
            tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UserError(f"{text!r} is no expression: {reason}") from None
    _check(tree, text, 0)
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in called}
    return Expression(text, tree, frozenset(names - set(CONSTANTS)))


def found_in(value: object, variables: frozenset[str]) -> Expression | None:
    """The expression in a value of the file: a text that can be parsed and has names, all of them those of variables.
    None for all other values."""
    if not isinstance(value, str):
        return None
    try:
        expression = parse(value)
    except UserError:
        return None
    return expression if expression.names and expression.names <= variables else None


BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")


def names_in(text: str, variables: frozenset[str]) -> frozenset[str]:
    """The variables in the braces of a text, such as `cpu:{devices}`. UserError for a name that is no variable."""
    names: frozenset[str] = frozenset()
    for match in BRACES.finditer(text):
        expression = _in_braces(match)
        if expression and expression.names - variables:
            unknown, listed = sorted(expression.names - variables)[0], ", ".join(sorted(variables))
            raise UserError(
                f"{match[0]}: no variable {unknown}; the variables are {listed or 'none'}; "
                f"to write braces as they are, double them: {{{match[0]}}}"
            )
        names |= expression.names if expression else frozenset()
    return names


def filled(text: str, variables: Mapping[str, Value]) -> str:
    """The text with each {expression} replaced by its value, {{ by { and }} by }."""

    def replace(match: re.Match[str]) -> str:
        expression = _in_braces(match)
        return as_text(expression.value(variables)) if expression else match[0][:1] if match[1] is None else match[0]

    return BRACES.sub(replace, text)


FOR_PROGRAMS = frozenset({"rank"})  # {rank} in a file's name is replaced by the training programs


def _in_braces(match: re.Match[str]) -> Expression | None:
    if not match[1]:
        return None
    try:
        expression = parse(match[1])
    except UserError:
        return None
    return None if expression.names <= FOR_PROGRAMS else expression


def as_text(value: Value) -> str:
    """A value as a word of a command line: 0.1 * 3 is 0.3."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:.12g}" if isinstance(value, float) else str(value)


# -- the tree ---------------------------------------------------------------------------------------------------------


def _check(node: ast.AST, text: str, depth: int) -> None:
    """Raise UserError unless all nodes are allowed."""
    if depth > MOST_DEPTH:
        raise UserError(f"{text[:40]!r}... is too deeply nested")
    if isinstance(node, ast.Constant):
        good = isinstance(node.value, (bool, int, float, str)) or node.value is None
        good = good and not (isinstance(node.value, int) and abs(node.value) > LARGEST_INTEGER)
        good = good and not (isinstance(node.value, float) and not abs(node.value) < LARGEST)
    elif isinstance(node, ast.Call):
        good = isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and not node.keywords
    else:
        good = isinstance(node, (*SHAPES, *ARITHMETIC, *COMPARISONS))
    if not good:
        raise UserError(f"{text!r}: {type(node).__name__.lower()} is not allowed in an expression; {ALLOWED}")
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.Call) and child is node.func):
            _check(child, text, depth + 1)


SHAPES = (
    ast.BinOp,
    ast.UnaryOp,
    ast.UAdd,
    ast.USub,
    ast.Not,
    ast.BoolOp,
    ast.And,
    ast.Or,
    ast.Compare,
    ast.IfExp,
    ast.Name,
    ast.Load,
    ast.Tuple,
    ast.List,
)


def _evaluate(node: ast.expr, variables: Mapping[str, Value]) -> Any:
    match node:
        case ast.Constant(value):
            return value
        case ast.Name(name):
            if name in variables:
                return variables[name]
            if name in CONSTANTS:
                return CONSTANTS[name]
            raise ValueError(f"the variable {name} has no value in this grid")
        case ast.Tuple(items) | ast.List(items):
            return tuple(_evaluate(item, variables) for item in items)
        case ast.IfExp(test, then, other):
            return _evaluate(then if _evaluate(test, variables) else other, variables)
        case ast.BoolOp(op, values):
            return _either(values, variables, isinstance(op, ast.Or))
        case ast.UnaryOp(op, operand):
            value = _evaluate(operand, variables)
            return not value if isinstance(op, ast.Not) else _number(value) * (-1 if isinstance(op, ast.USub) else 1)
        case ast.BinOp(left, op, right):
            first, second = _number(_evaluate(left, variables)), _number(_evaluate(right, variables))
            return _bounded(ARITHMETIC[type(op)](first, second))
        case ast.Compare(left, ops, others):
            return _compare(left, ops, others, variables)
        case ast.Call(ast.Name(name), arguments):
            numbers = [_number(_evaluate(argument, variables)) for argument in arguments]
            return _bounded(FUNCTIONS[name](*numbers))
    raise TypeError(f"{type(node).__name__.lower()} is not allowed")


def _either(values: list[ast.expr], variables: Mapping[str, Value], stop: bool) -> Any:
    value: Any = None
    for operand in values:
        value = _evaluate(operand, variables)
        if bool(value) == stop:
            break
    return value


def _compare(left: ast.expr, ops: list[ast.cmpop], others: list[ast.expr], variables: Mapping[str, Value]) -> bool:
    first = _evaluate(left, variables)
    for op, other in zip(ops, others, strict=True):
        second = _evaluate(other, variables)
        if isinstance(op, (ast.In, ast.NotIn)) and not isinstance(second, tuple):
            raise TypeError(f"`in` needs a list such as [1, 2], found {second!r}")
        if not COMPARISONS[type(op)](first, second):
            return False
        first = second
    return True


def _number(value: Any) -> Any:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    raise TypeError(f"expected a number, found {value!r}")


def _bounded(value: Any) -> Any:
    """The value, if it is a real number that is not too large."""
    if isinstance(value, complex) or not abs(float(value)) < LARGEST:
        raise ArithmeticError("the value is no number below 1e300")
    return float(value) if isinstance(value, int) and abs(value) > LARGEST_INTEGER else value
