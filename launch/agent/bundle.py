"""The agent as one text: the sources of this package, and the few lines that import modules from them."""

from __future__ import annotations

from pathlib import Path

# Python 3.8. A module is compiled when it is first imported: few jobs need all of them.
LOAD = """
import sys
from importlib.machinery import ModuleSpec
class Sources:
    def __init__(self, texts):
        self.texts = texts
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=name.count(".") < 2) if name in self.texts else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        exec(compile(self.texts[module.__name__], module.__name__, "exec"), module.__dict__)
"""


def text() -> bytes:
    """Python source that, when executed, runs the agent."""
    sources = {"launch": ""}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem != "bundle":
            sources["launch.agent" if path.stem == "__init__" else f"launch.agent.{path.stem}"] = path.read_text()
    start = f"sys.meta_path.insert(0, Sources({sources!r}))\nfrom launch.agent.serve import main\nmain()\n"
    return f"{LOAD}\n{start}".encode()
