"""Which packages the interpreter of a job's script would import, found by that interpreter without importing them.

`SOURCE` is what it runs; it runs on any Python, 2.7 too, so that one that is too old can report its version.
"""

from __future__ import annotations

import json
import os
from typing import Any

MARK = "dmltrain-inspection "  # the line of the answer; other lines come from a sitecustomize
SOURCE = (
    r'''
import glob, json, os, re, sys
request = json.loads(sys.argv[1])
folder = request["folder"]
if not getattr(sys.flags, "safe_path", False):
    sys.path[0] = folder  # as when the script itself runs
try:
    from importlib.util import find_spec
except ImportError:
    find_spec = None

def spec_of(name):
    try:
        return find_spec(name)
    except Exception:
        return None

def place(spec):
    """The folder that holds the package or module."""
    return os.path.dirname((list(spec.submodule_search_locations or []) or [spec.origin or ""])[0])

def version(name, spec):
    """Of what would be imported: its own word, else its distribution's, which may be called mxnet_cu112."""
    try:
        with open(spec.origin) as source:
            match = re.search("^__version__ *= *[\"']([^\"']+)", source.read(65536), re.M)
        if match:
            return match.group(1)
    except Exception:
        pass
    for pattern in (name + "-*-info", name + "_*-*-info"):
        for path in sorted(glob.glob(os.path.join(place(spec), pattern))):
            return re.sub("[.](dist|egg)-info$", "", os.path.basename(path)).split("-")[1]
    try:
        from importlib import metadata
        return metadata.version(name)
    except Exception:
        return "unknown"

answer = {"executable": sys.executable, "version": "%d.%d.%d" % sys.version_info[:3],
          "packages": {}, "missing": [], "local": []}
if find_spec:
    for name in request["packages"]:
        spec = spec_of(name)
        answer["packages"][name] = version(name, spec) if spec else None
    for name in request["needs"]:
        spec = spec_of(name)
        if not spec:
            answer["missing"].append(name)
        elif place(spec) == folder and name not in request["packages"]:
            answer["local"].append(name)
'''
    + f'print("\\n{MARK}" + json.dumps(answer))\n'
)


def command(python: str, request: dict[str, Any]) -> list[str]:
    """The command to run in the working directory; see `launch.agent.probe` for the request."""
    workdir, script = request.get("workdir") or "/", request.get("script")
    asked = {  # Python follows a link to a script
        "folder": os.path.dirname(os.path.realpath(os.path.join(workdir, script))) if script else workdir,
        "needs": request.get("needs") or [],
        "packages": request["packages"],
    }
    return [python, "-c", SOURCE, json.dumps(asked)]


def answer(printed: bytes) -> dict[str, Any] | None:
    """The child's answer; None when there is none."""
    for line in printed.decode(errors="replace").splitlines():
        if line.startswith(MARK):
            found: dict[str, Any] = json.loads(line[len(MARK) :])
            return found
    return None
