"""Run the system's own tools (ip, tc, ssh-keygen, ...)."""

import json
import subprocess
from typing import Any

# Of the tools and of what a host starts by itself; sbin is in few users' PATH.
ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}


class TestbedError(Exception):
    """The test bed cannot do what was asked; the message is complete."""

    __test__ = False  # no class of tests, whatever pytest thinks of its name


def run(*argv: str, text: str = "") -> str:
    """Standard output of a command that is given `text`; TestbedError with what it said when it fails."""
    done = subprocess.run(argv, input=text, text=True, capture_output=True, env=ENVIRONMENT, check=False)
    if done.returncode:
        raise TestbedError(f"{' '.join(argv)}: {done.stderr.strip() or f'exit code {done.returncode}'}\n{text}".strip())
    return done.stdout


def attempt(*argv: str) -> None:
    """Run a command that may well have nothing to do, such as removing what is not there."""
    subprocess.run(argv, capture_output=True, env=ENVIRONMENT, check=False)


def ip(namespace: str, *lines: str) -> None:
    """Lines of `ip` in a network namespace, in one process, up to the first that fails."""
    run("ip", "-n", namespace, "-batch", "-", text="\n".join(lines) + "\n")


def tc(namespace: str, *lines: str) -> None:
    """The same with `tc`."""
    run("tc", "-n", namespace, "-batch", "-", text="\n".join(lines) + "\n")


def ip_json(*argv: str) -> list[dict[str, Any]]:
    """What `ip -j` lists."""
    return json.loads(run("ip", "-j", *argv) or "[]")


def namespaces() -> list[str]:
    """The names of the machine's network namespaces."""
    return [each["name"] for each in ip_json("netns", "list")]
