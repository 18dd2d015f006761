"""The agent as one text: the sources of this package and of what it shares with dmltrain, and the few lines that import
modules from them."""

from __future__ import annotations

from pathlib import Path

from dmltrain.base import capacity

# Python 3.8. A module is compiled when it is first imported: few jobs need all of them.
LOAD = """
import sys
from importlib.machinery import ModuleSpec
class Sources:
    def __init__(self, texts, packages):
        self.texts, self.packages = texts, packages
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=name in self.packages) if name in self.texts else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        exec(compile(self.texts[module.__name__], module.__name__, "exec"), module.__dict__)
"""


def text() -> bytes:
    """Python source that, when executed, runs the agent."""
    here = Path(__file__).parent
    packages = ["dmltrain_launch", "dmltrain", "dmltrain.base"]
    sources = {**dict.fromkeys(packages, ""), capacity.__name__: Path(capacity.__file__).read_text()}
    for path in sorted(here.rglob("*.py")):
        name = ".".join(("dmltrain_launch.agent", *path.relative_to(here).with_suffix("").parts))
        if path.stem == "__init__":
            name = name.removesuffix(".__init__")
            packages.append(name)
        if path != here / "bundle.py":
            sources[name] = path.read_text()
    find = f"sys.meta_path.insert(0, Sources({sources!r}, {packages!r}))"
    return f"{LOAD}\n{find}\nfrom dmltrain_launch.agent.serve import main\nmain()\n".encode()
