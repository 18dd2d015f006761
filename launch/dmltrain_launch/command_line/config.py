"""`--config FILE`: the options of the command line as YAML. Pure except for reading the file.

    hostfile: hosts             # --hostfile hosts; dashes or underscores, with or without leading --
    num-workers: 5
    env: {LR: 0.1, HOME:}       # --env LR=0.1 --env HOME; a list repeats an option: env: [LR=0.1, HOME]
    quiet: true                 # --quiet; false is the same as no line
    program: [train.py, --lr, 0.1]    # or one line, as for a shell: train.py --lr 0.1

Scalars are passed on as they are written: `0.10` stays 0.10 and `on` stays on. Paths are relative to the launcher's
working directory, as on the command line. The command line takes precedence over the file.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable, Iterator, Sequence

import yaml

from dmltrain_launch import LaunchError
from dmltrain_launch.job.options.option import Option

PROGRAM = "program"
TAG = "tag:yaml.org,2002:"
TRUE = ("true", "yes", "on")  # YAML 1.1's, any case

Trial = Callable[[Option, str, str], object]


def arguments(path: str, table: Sequence[Option], trial: Trial | None = None) -> list[str]:
    """The file as argv: its options, then -- and the program if it has one.

    `trial(row, name, value)` raises LaunchError for a wrong value. Every error gets its line number.
    """
    return _File(path, table, trial).read()


class _File:
    def __init__(self, path: str, table: Sequence[Option], trial: Trial | None):
        self.path, self.trial = path, trial
        self.rows = {_bare(name): row for row in table for name in row.names}

    def read(self) -> list[str]:
        options: list[str] = []
        program: list[str] = []
        seen: dict[int, int] = {}  # id of the row -> line; the program's row is None
        for key, node in self._root().value:
            name = _bare(key.value) if isinstance(key, yaml.ScalarNode) else ""
            row = None if name == PROGRAM else self._row(key, name)
            if id(row) in seen:
                first = f"first in line {seen[id(row)]}"
                raise self._error(key, f"{name} is given twice, {first}; a list repeats an option")
            seen[id(row)] = _line(key)
            if row is None:
                program = ["--", *self._program(node)]
            else:
                options += self._option(row, node)
        return options + program

    def _root(self) -> yaml.MappingNode:
        try:
            with open(self.path, encoding="utf-8") as file:
                root = yaml.compose(file, Loader=yaml.SafeLoader)
        except OSError as error:
            raise LaunchError(f"cannot read {self.path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise LaunchError(f"{self.path}: not UTF-8 at byte {error.start}; expected a YAML file") from None
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            reason = error.problem or error.context
            raise LaunchError(f"{self.path}:{mark.line + 1 if mark else 1}: invalid YAML: {reason}") from None
        except yaml.YAMLError as error:  # a character that YAML does not allow
            raise LaunchError(f"{self.path}: invalid YAML: {str(error).splitlines()[0]}") from None
        if isinstance(root, yaml.MappingNode):
            return root
        line = _line(root) if root else 1
        raise LaunchError(f"{self.path}:{line}: expected lines such as `num-workers: 5`, one for each option")

    def _row(self, key: yaml.Node, name: str) -> Option:
        if name in self.rows and name != "config":
            return self.rows[name]
        if name == "config":
            raise self._error(key, "config is only for the command line: a file cannot include another")
        near = difflib.get_close_matches(name, [*self.rows, PROGRAM], 1)
        options = sorted({_bare(_flag(row)) for row in self.rows.values()} - {"config"})
        fix = f"did you mean {near[0]}?" if near else f"expected one of {', '.join([*options, PROGRAM])}"
        raise self._error(key, f"unknown option {name!r}; {fix}")

    def _option(self, row: Option, node: yaml.Node) -> list[str]:
        """`--name value` for each value of the node."""
        name = _flag(row)
        if not row.value:
            if not _is(node, "bool"):
                raise self._error(node, f"{name} takes no value: expected true or false")
            return [name] if node.value.lower() in TRUE else []
        words: list[str] = []
        for each, value in self._values(row, node):
            try:
                if self.trial:
                    self.trial(row, name, value)
            except LaunchError as error:
                raise self._error(each, str(error)) from None
            words += [name, value]
        return words

    def _values(self, row: Option, node: yaml.Node) -> Iterator[tuple[yaml.Node, str]]:
        """The values of a node, each with the node that has its line number."""
        if isinstance(node, yaml.SequenceNode):
            for each in node.value:
                yield each, self._text(each, f"a word or number for each {_flag(row)} {row.value}")
        elif isinstance(node, yaml.MappingNode):
            if "=" not in row.value:
                raise self._error(node, f"{_flag(row)} takes no mapping: expected {row.value}")
            for key, each in node.value:
                variable = self._text(key, "the name of a variable")
                bare = _is(each, "null") and not each.value  # `HOME:` passes on the launcher's value
                yield each, variable if bare else f"{variable}={self._text(each, f'a value for {variable}')}"
        else:
            yield node, self._text(node, f"{_flag(row)} {row.value}")

    def _program(self, node: yaml.Node) -> list[str]:
        if isinstance(node, yaml.SequenceNode):
            words = [self._text(each, "a word or number for each argument") for each in node.value]
        else:
            text = self._text(node, "a list of arguments, or one line as for a shell")
            try:
                words = shlex.split(text)
            except ValueError as error:
                reason = f"{PROGRAM}: {str(error).lower()}; in a list of arguments, quotes are not needed"
                raise self._error(node, reason) from None
        if not words:
            raise self._error(node, f"{PROGRAM} is empty: expected {PROGRAM}: [train.py, --lr, 0.1]")
        return words

    def _text(self, node: yaml.Node, expected: str) -> str:
        """The text of a scalar, as written."""
        if not isinstance(node, yaml.ScalarNode):
            kind = "list" if isinstance(node, yaml.SequenceNode) else "mapping"
            raise self._error(node, f"unexpected {kind}: expected {expected}")
        if _is(node, "null") and not node.value:
            raise self._error(node, f"missing value: expected {expected}")
        text: str = node.value
        return text

    def _error(self, node: yaml.Node, reason: str) -> LaunchError:
        return LaunchError(f"{self.path}:{_line(node)}: {reason}")


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def _is(node: yaml.Node, kind: str) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == TAG + kind


def _flag(row: Option) -> str:
    """Its first long name."""
    return next((name for name in row.names if name.startswith("--")), row.names[0])


def _bare(name: str) -> str:
    return name.lstrip("-").replace("_", "-")
