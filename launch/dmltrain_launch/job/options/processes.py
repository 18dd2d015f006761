"""Options: what the processes of a job find on their hosts, in their environment and on the wire."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dmltrain_launch import LaunchError
from dmltrain_launch.job.job import OWNED, WIRES, Setting
from dmltrain_launch.job.options.option import Apply, Option, choice, option, rows
from dmltrain_launch.job.role import SERVER, WORKER


def _destination(value: str, name: str) -> str:
    if not value.startswith(("/", "~")):
        raise LaunchError(f"{name} is {value!r}: expected a path on every host that starts with / or ~/")
    return value


def _setting(role: str) -> Apply:
    def apply(options: Any, value: str, name: str, environ: Mapping[str, str]) -> Any:
        match = re.fullmatch(r"([A-Za-z_]\w*)(?:[=:](.*))?", value, re.DOTALL | re.ASCII)
        if not match:
            word = re.split("[=:]", value, maxsplit=1)[0]  # the rest may be secret
            raise LaunchError(f"{name} {word}: expected NAME=VALUE, NAME:VALUE, or NAME for the launcher's own value")
        variable, text = match.groups()
        if text is None and variable not in environ:
            raise LaunchError(f"{name} {variable}: not set in the launcher's environment; use {variable}=VALUE")
        return _with_setting(options, name, Setting(variable, environ[variable] if text is None else text, role))

    return apply


def _secret(options: Any, value: str, name: str, environ: Mapping[str, str]) -> Any:
    if value not in environ:
        variable = value.partition("=")[0]
        raise LaunchError(f"{name} {variable}: expected the name of a variable in the launcher's environment")
    return _with_setting(options, name, Setting(value, environ[value], secret=True))


def _with_setting(options: Any, name: str, setting: Setting) -> Any:
    if setting.name in OWNED:
        raise LaunchError(f"{name} {setting.name}: the launcher sets this variable for every process")
    return replace(options, settings=(*options.settings, setting))


@dataclass(frozen=True)
class ProcessOptions:
    """See `Options`. Memory is in MiB; 0: no limit."""

    sync_dst_dir: str = option(
        "DIR", "copy the working directory to DIR (such as '~/job') on every host and run there", _destination
    )
    sync_exclude: tuple[str, ...] = option(
        "PATTERN", "do not copy matching files (syntax of .gitignore); may be repeated", default=()
    )
    settings: tuple[Setting, ...] = rows(
        (),
        Option(
            ("--env",),
            "K[=V]",
            "environment variable for all processes: K=V or K:V; K alone passes on the launcher's value",
            _setting(""),
        ),
        Option(("--env-server",), "K[=V]", "environment variable for the servers only", _setting(SERVER)),
        Option(("--env-worker",), "K[=V]", "environment variable for the workers only", _setting(WORKER)),
        Option(("--secret",), "NAME", "pass on the launcher's variable NAME and never show its value", _secret),
    )
    torch_env: str = option(
        "auto|on|off",
        "set the variables of torch.distributed (RANK, MASTER_ADDR, ...) for workers; auto (default): "
        "unless the script imports dmltrain other than dmltrain.torch",
        choice(("auto", "on", "off")),
        "auto",
    )
    torch_backend: str = option(
        "dmltrain",
        "a script of torch.distributed trains over dmltrain's servers: init_process_group() takes the backend "
        "dmltrain, also where the script names gloo or nccl",
        choice(("dmltrain",)),
    )
    wire: str = option(
        "plain|auth|tls",
        "protect the traffic of dmltrain's processes: authenticate control frames (plain, the default), all frames "
        "(auth), or encrypt everything as well (tls)",
        choice(WIRES),
        "plain",
    )
    worker_memory: int = 0
    server_memory: int = 0
