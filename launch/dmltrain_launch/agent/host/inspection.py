"""Which packages the interpreter of a job's script would import. The interpreter finds them without importing them.

`SOURCE` is the program that it runs. It runs on any Python from 2.7 on, so that an old Python can report its version.
"""

from __future__ import annotations

import json
import os
from typing import Any

MARK = "dmltrain-inspection "  # begins the line of the answer; a sitecustomize may print other lines
SOURCE = (
    r'''
import sys
sys.path = [each for each in sys.path if each]  # the current folder has no say in what is imported here
import glob, json, os, re
request = json.loads(sys.argv[1])
folder = request["folder"]
try:
    from importlib.util import find_spec
except ImportError:
    find_spec = None

def spec_of(name):
    own = list(sys.path)
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)  # as when the script itself runs
    try:
        return find_spec(name)
    except Exception:
        return None
    finally:
        sys.path = own

def folder_of(spec):
    """The folder that holds the package or module."""
    return os.path.dirname((list(spec.submodule_search_locations or []) or [spec.origin or ""])[0])

def version(name, spec):
    """The __version__ of the module, or in its version.py, else its distribution's version; that may have another name,
    such as mxnet_cu112."""
    for place in (spec.origin, os.path.join(os.path.dirname(spec.origin or ""), "version.py")):
        try:
            with open(place) as source:
                match = re.search("^__version__ *= *[\"']([^\"']+)", source.read(65536), re.M)
            if match:
                return match.group(1)
        except Exception:
            pass
    for pattern in (name + "-*-info", name + "_*-*-info"):
        for path in sorted(glob.glob(os.path.join(folder_of(spec), pattern))):
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
        elif folder_of(spec) == folder and name not in request["packages"]:
            answer["local"].append(name)
'''
    + f'print("\\n{MARK}" + json.dumps(answer))\n'
)


def command(python: str, request: dict[str, Any]) -> list[str]:
    """The command, to be run in the working directory. `dmltrain_launch.agent.host.probe` describes the request."""
    workdir, script = request.get("workdir") or "/", request.get("script")
    inspected = {  # sys.path has the folder that a symbolic link to the script leads to
        "folder": os.path.dirname(os.path.realpath(os.path.join(workdir, script))) if script else workdir,
        "needs": request.get("needs") or [],
        "packages": request["packages"],
    }
    return [python, "-c", SOURCE, json.dumps(inspected)]


def answer(printed: bytes) -> dict[str, Any] | None:
    """The child's answer; None if it printed none."""
    for line in printed.decode(errors="replace").splitlines():
        if line.startswith(MARK):
            report: dict[str, Any] = json.loads(line[len(MARK) :])
            return report
    return None
