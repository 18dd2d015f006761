"""A hosts file: text -> Host values. Pure. One host or range of hosts per line, as hosts.example explains.

    line     = [[USER@]NAME[:PORT] {ATTRIBUTE=VALUE}] [# comment]

dmlc's, Open MPI's and DeepSpeed's files are such files. MPICH's are too, but for `host:4`: its four slots would be
sshd's port here, as in dmlc's, and `launch.job.hosts.entry` refuses ports that small. Values are quoted as in a shell.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from launch.job.host import Host
from launch.job.hosts.entry import NONE, Given, Text, entry, errors_at

LINE_END = re.compile(r"\r\n|\n|\r")
YAML_STARTS = ("-", "---", "hosts:", "defaults:")
# a comment, or a word of plain, escaped and quoted characters; a # inside a word is part of it, as in a shell
WORD = re.compile(r"""\s*(?:\#.*|((?:[^\s'"\\]|\\.|'[^']*'|"(?:[^"\\]|\\.)*")+))""")


def parse(text: str, path: str) -> list[Host]:
    """The hosts of a file's text; LaunchError says path:line: what is wrong. They may be none, and twice the same."""
    hosts: list[Host] = []
    for number, line in enumerate(LINE_END.split(text), 1):
        hosts += from_line(Text(line, f"{path}:{number}"))
    return hosts


def from_line(line: Text, defaults: Given = NONE) -> list[Host]:
    """The hosts of one line; [] when there is nothing but a comment."""
    with errors_at(line.where):
        found = words(line.value)
        if found and found[0] in YAML_STARTS:
            raise ValueError(f"{found[0]} is no host but YAML; the name of a YAML inventory ends in .yaml")
        given = _attributes(found[1:], line.where)
    return entry(Text(found[0], line.where), given, defaults=defaults) if found else []


def words(line: str) -> list[str]:
    """The words of a line, without quotes and comment."""
    found, at, line = [], 0, line.rstrip()
    while at < len(line):
        match = WORD.match(line, at)
        if not match:
            raise ValueError("a quote is not closed, or a backslash ends the line; quote values as in a shell")
        if match[1]:
            found += shlex.split(match[1])
        at = match.end()
    return found


def _attributes(found: Sequence[str], where: str) -> dict[str, Text]:
    given: dict[str, Text] = {}
    for word in found:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ValueError(f"{word}: expected ATTRIBUTE=VALUE without spaces, such as slots=4; one host per line")
        if name in given:
            raise ValueError(f"{name}= is given twice")
        given[name] = Text(value, where)
    return given
