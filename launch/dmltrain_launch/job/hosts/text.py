"""A hosts file: text -> Host values. Pure. One host or range of hosts per line; see hosts.example.

    line     = [[USER@]NAME[:PORT] {ATTRIBUTE=VALUE}] [# comment]

Files of dmlc, Open MPI and DeepSpeed have this format. So have MPICH's, except `host:4`, which means four slots there
and sshd's port here and in dmlc's files; `dmltrain_launch.job.hosts.entry` refuses such small ports. Quotes work as in
a shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from dmltrain_launch.job.host import Host
from dmltrain_launch.job.hosts.entry import NONE, Given, Text, entry, errors_at

LINE_END = re.compile(r"\r\n|\n|\r")
YAML_STARTS = ("-", "---", "hosts:", "defaults:")
# a comment, or a word of plain, escaped and quoted characters; a # inside a word is part of it, as in a shell
WORD = re.compile(r"""\s*(?:\#.*|((?:[^\s'"\\]|\\.|'[^']*'|"(?:[^"\\]|\\.)*")+))""")


def parse(text: str, path: str) -> list[Host]:
    """The hosts of a file's text; there may be none, or duplicates. A LaunchError begins with path:line."""
    hosts: list[Host] = []
    for number, line in enumerate(LINE_END.split(text), 1):
        hosts += from_line(Text(line, f"{path}:{number}"))
    return hosts


def from_line(line: Text, defaults: Given = NONE) -> list[Host]:
    """The hosts of one line; [] for an empty line or a comment."""
    with errors_at(line.where):
        found = words(line.value)
        if found and found[0] in YAML_STARTS:
            raise ValueError(f"{found[0]} looks like YAML; the name of a YAML inventory must end in .yaml")
        given = _attributes(found[1:], line.where)
    return entry(Text(found[0], line.where), given, defaults=defaults) if found else []


def words(line: str) -> list[str]:
    """The words of a line, without quotes and comment."""
    split_words, at, line = [], 0, line.rstrip()
    while at < len(line):
        match = WORD.match(line, at)
        if not match:
            raise ValueError("unclosed quote, or backslash at the end of the line; quote values as in a shell")
        if match[1]:
            split_words += shlex.split(match[1])
        at = match.end()
    return split_words


def _attributes(line_words: Sequence[str], where: str) -> dict[str, Text]:
    given: dict[str, Text] = {}
    for word in line_words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ValueError(f"{word}: expected ATTRIBUTE=VALUE without spaces, such as slots=4; one host per line")
        if name in given:
            raise ValueError(f"{name}= is given twice")
        given[name] = Text(value, where)
    return given
