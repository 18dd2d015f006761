"""Tests wait for conditions: they neither sleep nor expect anything within a time that a busy machine may exceed."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.waits_with_reasons import REASONS

TESTS = Path(__file__).parent
SHORTEST = 60.0  # s; a limit below that may pass on a busy machine before anything has gone wrong
LIMITS = {"timeout", "seconds", "deadline"}  # names of arguments that are limits
WAITING = {"wait", "join", "result", "acquire", "wait_for", "communicate"}  # whose first or second argument is one


def number(node: ast.expr) -> float | None:
    return float(node.value) if isinstance(node, ast.Constant) and type(node.value) in (int, float) else None


def limits(call: ast.Call, name: str) -> Iterator[float]:
    given = [keyword.value for keyword in call.keywords if keyword.arg in LIMITS]
    given += call.args[:2] if name in WAITING and isinstance(call.func, ast.Attribute) else []
    yield from (found for found in map(number, given) if found is not None)


def waits(tree: ast.AST, scope: str = "") -> Iterator[tuple[str, int, str]]:
    """The function, the line and what is wrong there."""
    for node in ast.iter_child_nodes(tree):
        named = isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef))
        inner = f"{scope}.{node.name}".strip(".") if named else scope
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name == "sleep":
                yield scope, node.lineno, "sleeps"
            short = [limit for limit in limits(node, name) if limit < SHORTEST]
            yield from ((scope, node.lineno, f"has a limit of {each:g} s") for each in short)
        yield from waits(node, inner)


def found() -> list[tuple[str, str]]:
    """All places that wait so: file:function, and what is said of each."""
    places = []
    for path in sorted(TESTS.rglob("*.py")):
        file = str(path.relative_to(TESTS))
        for scope, line, what in waits(ast.parse(path.read_text())):
            places.append((f"{file}:{scope}".rstrip(":"), f"tests/{file}:{line} {what}"))
    return places


def test_each_wait_is_for_a_condition_or_has_a_reason_that_is_needed():
    places = found()
    wrong = [said for place, said in places if place not in REASONS]
    assert not wrong, "\n".join(["use tests.waiting.wait_for, or say why not in waits_with_reasons.py:", *wrong])
    assert REASONS.keys() - {place for place, _ in places} == set()
    assert all(len(reason) > 10 for reason in REASONS.values())
