"""The mutants of a module: one small change each, by mutmut's operators and two of our own.

mutmut's own runner is not used. It changes functions alone, and none that has a decorator: our properties, context
managers, fields and tables would stay as they are. It also takes a test that starts processes for one that runs
nothing of the module. Here a whole file is written, so every process of a test runs the mutant.
"""

from __future__ import annotations

import ast
import io
import itertools
import tokenize
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, WhitespaceInclusivePositionProvider
from mutmut.mutation.mutators import mutation_operators

Operator = Callable[[Any], Iterable[cst.CSTNode]]
SKIPPED = (cst.Annotation, cst.Decorator, cst.Import, cst.ImportFrom, cst.Assert, cst.FormattedString)
KEPT_CALLS = ("TypeVar", "cast", "field", "log", "print", "warn")
EMPTY = ("False", "0", "0.0", "[]", "{}", "()", '""')


@dataclass(frozen=True)
class Mutant:
    """A whole module after one change. `before` and `after` are the code of the lines that differ: without indentation
    and comments, so that rewording a comment changes no mutant."""

    line: int
    before: str
    after: str
    source: str


def _left_out(node: cst.Expr) -> Iterable[cst.CSTNode]:
    """A call as a statement of its own: left out."""
    if isinstance(node.value, cst.Call | cst.Await):
        yield cst.Pass()


def _negated(node: cst.If) -> Iterable[tuple[cst.CSTNode, cst.CSTNode]]:
    """A condition the other way round; comparisons are turned by an operator of mutmut's."""
    if not isinstance(node.test, cst.Comparison):
        condition = node.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        yield node.test, cst.UnaryOperation(cst.Not(whitespace_after=cst.SimpleWhitespace(" ")), condition)


OPERATORS: list[tuple[Any, Operator]] = [*mutation_operators, (cst.Expr, _left_out)]


class _Collector(cst.CSTVisitor):
    """Every (node, replacement) of a module, in the order of the text."""

    def __init__(self) -> None:
        self.found: list[tuple[cst.CSTNode, cst.CSTNode]] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, SKIPPED) or any(leave(node) for leave in (_is_docstring, _is_kept, _is_strict, _is_a_type)):
            return False
        for kind, operator in OPERATORS:
            if isinstance(node, kind):
                self.found += [(node, each) for each in _wanted(node, operator(node))]
        if isinstance(node, cst.If) and not _is_for_types(node):
            self.found += _negated(node)
        return not isinstance(node, cst.Raise) and not _is_for_types(node)


def _wanted(node: cst.CSTNode, replacements: Iterable[cst.CSTNode]) -> Iterator[cst.CSTNode]:
    """Of a word one mutant is enough, and messages, which have blanks, may read as they like. None in place of what is
    empty makes no difference, nor does zip without its assertion."""
    if isinstance(node, cst.SimpleString):
        replacements = [] if " " in node.value.strip() else list(replacements)[:1]
    for replacement in replacements:
        if isinstance(node, cst.Assign | cst.AnnAssign) and node.value and _code(node.value) in EMPTY:
            continue
        if not (
            isinstance(node, cst.Call)
            and _code(node.func) == "zip"
            and isinstance(replacement, cst.Call)
            and _values(node) == _values(replacement)
        ):
            yield replacement


def _code(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node)


def _values(call: cst.Call) -> list[str]:
    """The arguments without a name."""
    return [_code(argument.value) for argument in call.args if argument.keyword is None]


def _is_docstring(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Expr) and isinstance(node.value, cst.BaseString)


def _is_kept(node: cst.CSTNode) -> bool:
    """What is said, and what only type checkers read."""
    function = node.func if isinstance(node, cst.Call) else None
    name = function.attr if isinstance(function, cst.Attribute) else function
    return isinstance(name, cst.Name) and name.value in KEPT_CALLS


def _is_a_type(node: cst.CSTNode) -> bool:
    """Item = TypeVar("Item"), and aliases such as Hosts = Sequence[Host]."""
    if not isinstance(node, cst.Assign) or not isinstance(node.targets[0].target, cst.Name):
        return False
    name = node.targets[0].target.value
    return name[:1].isupper() and not name.isupper() and (isinstance(node.value, cst.Subscript) or _is_kept(node.value))


def _is_strict(node: cst.CSTNode) -> bool:
    """strict=True, of zip."""
    return isinstance(node, cst.Arg) and node.keyword is not None and node.keyword.value == "strict"


def _is_for_types(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.If) and isinstance(node.test, cst.Name) and node.test.value == "TYPE_CHECKING"


def of(source: str, lines: Collection[str] | None = None) -> list[Mutant]:
    """All mutants of a module's text that are Python, in the order of the text, without repetitions. If `lines` is
    given, only the mutants whose `before` is one of these."""
    code = _without_comments(source)
    if lines is not None:
        code = _without_other_functions(code, lines)
    wrapper, collector = MetadataWrapper(cst.parse_module(code), unsafe_skip_copy=True), _Collector()
    wrapper.module.visit(collector)
    ranges, text, code_text = wrapper.resolve(WhitespaceInclusivePositionProvider), _Text(source), _Text(code)
    mutants: dict[str, Mutant] = {}
    for node, replacement in collector.found:
        new = wrapper.module.code_for_node(replacement)
        changed = code_text.replaced(ranges[node], new)
        if changed in mutants or changed == code:
            continue
        line, before, after = code_text.difference(ranges[node], changed)
        if (lines is None or before in lines) and _parses(changed):
            mutants[changed] = Mutant(line, before, after, text.replaced(ranges[node], new))
    return list(mutants.values())


def _without_comments(source: str) -> str:
    """The module with blanks for its comments, so that each position of the code stays as it is."""
    lines = source.splitlines(keepends=True)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            rest = lines[row - 1][column + len(token.string) :]
            lines[row - 1] = lines[row - 1][:column] + " " * len(token.string) + rest
    return "".join(lines)


def _without_other_functions(code: str, wanted: Collection[str]) -> str:
    """The module with `pass` for each function that has none of these lines of mutants: reading it takes libcst long.
    Each position of the rest stays as it is."""
    lines = code.splitlines(keepends=True)
    for node in _functions(ast.parse(code)):
        first, last = min([node.lineno, *(each.lineno for each in node.decorator_list)]) - 1, node.end_lineno
        text = _one_line(lines[first:last])
        if not any(line in text for line in wanted):
            lines[first:last] = [" " * node.col_offset + "pass\n", *["\n"] * (last - first - 1)]
    return "".join(lines)


def _functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Those of a module and of its classes; not what is inside of them."""
    for iter_child_node in ast.iter_child_nodes(node):
        if isinstance(iter_child_node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield iter_child_node
        elif isinstance(iter_child_node, ast.ClassDef):
            yield from _functions(iter_child_node)


class _Text:
    """A module's text with one range replaced at a time. Changing a libcst tree takes a hundred times longer."""

    def __init__(self, source: str) -> None:
        self._source, self._lines = source, source.splitlines(keepends=True)
        self._starts = [0, *itertools.accumulate(map(len, self._lines))]

    def replaced(self, span: CodeRange, code: str) -> str:
        start, end = (self._starts[each.line - 1] + each.column for each in (span.start, span.end))
        return self._source[:start] + code + self._source[end:]

    def difference(self, span: CodeRange, changed: str) -> tuple[int, str, str]:
        """The number of the first line that differs, and the lines that differ before and after."""
        new, first, last = changed.splitlines(keepends=True), span.start.line - 1, span.end.line
        behind = len(self._lines) - last  # lines
        while self._lines[first] == new[first]:
            first += 1
        while self._lines[-behind - 1] == new[-behind - 1]:
            behind += 1
        old, now = self._lines[first : len(self._lines) - behind], new[first : len(new) - behind]
        return first + 1, _one_line(old), _one_line(now)


def _one_line(lines: list[str]) -> str:
    return " ".join(line.strip() for line in lines if line.strip())


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True
