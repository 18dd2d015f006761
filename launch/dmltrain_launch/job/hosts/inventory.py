"""A YAML inventory: text -> Host values. Pure.

    defaults: {user: anna, env: {NCCL_DEBUG: INFO}}     for all hosts, unless a host sets it
    hosts:                                              or the list alone
      - node[01-08] slots=2                             a line of a hosts file
      - {name: h9, gpus: [0, 2], env: {A: b}}           or the same attributes as a mapping

Scalars are texts, never other YAML types: `yes` is the text yes, and 010 keeps its zero.
"""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from dmltrain_launch import LaunchError
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.hosts.attribute import ATTRIBUTES, ENV, check_known, unknown
from dmltrain_launch.job.hosts.entry import EACH, NONE, Given, Text, entry, errors_at
from dmltrain_launch.job.hosts.text import from_line

LISTS = ("gpus", "roles")
EXPECTED = "expected a list of hosts, or a mapping with hosts: and optionally defaults:"


def parse(text: str, path: str) -> list[Host]:
    """The hosts of an inventory; there may be none, or duplicates. A LaunchError begins with path:line."""
    root = _compose(text, path)
    if root is None:
        return []
    defaults, hosts = NONE, root
    if isinstance(root, yaml.MappingNode):
        parts = dict(_items(root, path))
        for name, (mark, _) in parts.items():
            if name not in ("defaults", "hosts"):
                raise LaunchError(f"{mark}: {unknown('key', name, ['defaults', 'hosts'])}; {EXPECTED}")
        if "hosts" not in parts:
            raise LaunchError(f"{_where(root, path)}: hosts: is missing; {EXPECTED}")
        hosts = parts["hosts"][1]
        defaults = _defaults(parts["defaults"][1], path) if "defaults" in parts else NONE
    if not isinstance(hosts, yaml.SequenceNode):
        raise LaunchError(f"{_where(hosts, path)}: {EXPECTED}")
    return [host for node in hosts.value for host in _hosts(node, path, defaults)]


def _compose(text: str, path: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        raise LaunchError(f"{path}{line}: invalid YAML: {reason}") from None
    except yaml.YAMLError as error:
        raise LaunchError(f"{path}: invalid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise LaunchError(f"{path}: nested too deeply; {EXPECTED}") from None


def _hosts(node: yaml.Node, path: str, defaults: Given) -> list[Host]:
    where = _where(node, path)
    if isinstance(node, yaml.ScalarNode) and not _is_null(node):
        return from_line(Text(node.value, where), defaults)
    if not isinstance(node, yaml.MappingNode):
        raise LaunchError(f"{where}: expected a host: a line such as h1 slots=2, or a mapping with name:")
    given = _attributes(node, path)
    if "name" not in given:
        raise LaunchError(f"{where}: name: is missing")
    return entry(given.pop("name"), given, defaults=defaults)


def _defaults(node: yaml.Node, path: str) -> Given:
    if not isinstance(node, yaml.MappingNode):
        raise LaunchError(f"{_where(node, path)}: defaults: expected a mapping of attributes, such as user: anna")
    given = _attributes(node, path)
    for name, text in given.items():
        with errors_at(text.where):
            if name in ("name", *EACH):
                raise ValueError(f"defaults: {name} must differ between hosts; set it for each host")
            check_known(name)
    return given


def _attributes(node: yaml.MappingNode, path: str) -> dict[str, Text]:
    given: dict[str, Text] = {}
    for name, (where, value) in _items(node, path):
        if name == "env" and isinstance(value, yaml.MappingNode):
            given.update((ENV + key, _text(ENV + key, each, path)) for key, (_, each) in _items(value, path))
        elif name == "env":
            raise LaunchError(f"{where}: env: expected a mapping such as {{NCCL_DEBUG: INFO}}")
        else:
            given[name] = _text(name, value, path)
    return given


def _text(name: str, node: yaml.Node, path: str) -> Text:
    """The value of an attribute in the syntax of a hosts file."""
    if isinstance(node, yaml.SequenceNode) and name in LISTS:
        return Text(",".join(_scalar(name, each, path).value for each in node.value), _where(node, path))
    return _scalar(name, node, path)


def _scalar(name: str, node: yaml.Node, path: str) -> Text:
    where = _where(node, path)
    if not isinstance(node, yaml.ScalarNode):
        example = f", such as {ATTRIBUTES[name].example}" if name in ATTRIBUTES else ""
        raise LaunchError(f"{where}: {name}: expected one value{example}")
    if _is_null(node):
        raise LaunchError(f"{where}: {name}: has no value; write '' for an empty one")
    return Text(node.value, where)


def _items(node: yaml.MappingNode, path: str) -> Iterator[tuple[str, tuple[str, yaml.Node]]]:
    """(key, (line, value)) of a mapping; LaunchError for a duplicate key."""
    seen: dict[str, str] = {}
    for key, value in node.value:
        where = _where(key, path)
        if not isinstance(key, yaml.ScalarNode):
            raise LaunchError(f"{where}: expected the name of an attribute")
        if key.value in seen:
            raise LaunchError(f"{where}: {key.value}: is already given at {seen[key.value]}")
        seen[key.value] = where
        yield key.value, (where, value)


def _is_null(node: yaml.ScalarNode) -> bool:
    return node.tag == "tag:yaml.org,2002:null"


def _where(node: yaml.Node, path: str) -> str:
    return f"{path}:{node.start_mark.line + 1}"
