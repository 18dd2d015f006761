"""The agent as one text: the sources of this package, and the few lines that make modules of them again."""

from __future__ import annotations

from pathlib import Path

MODULES = ("__init__", "cores", "process", "spawn", "ending", "interface", "inspection", "probe", "reach",
           "throughput", "destination", "compare", "receive", "listing", "serve")

# Python 3.8: a module for each source, in an order in which each finds those that it imports
LOAD = """
import sys, types
def load(sources):
    sys.modules["launch"] = types.ModuleType("launch")
    sys.modules["launch"].__path__ = []
    for name, text in sources:
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = []
        exec(compile(text, name, "exec"), module.__dict__)
        parent, _, child = name.rpartition(".")
        setattr(sys.modules[parent], child, module)
"""


def text() -> bytes:
    """Python source that, when executed, runs the agent."""
    folder = Path(__file__).parent
    sources = [
        ("launch.agent" if name == "__init__" else f"launch.agent.{name}", (folder / f"{name}.py").read_text())
        for name in MODULES
    ]
    return f"{LOAD}\nload({sources!r})\nsys.modules['launch.agent.serve'].main()\n".encode()
