"""The old import name of `dmltrain_launch`, in a checkout: `python -m launch.cli` and the like go on for a while.

A wheel has nothing of this name, which is another project's (ROS). No module is loaded a second time: `launch.X` is the
module `dmltrain_launch.X` itself.
"""

import importlib
import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType

from dmltrain.base.deprecation import deprecated

NEW = "dmltrain_launch"
FOLDER = str(Path(__file__).parent)


class OldNames:
    """Finds and loads `launch.X`."""

    def __init__(self) -> None:
        self._own_specs: dict[str, ModuleSpec | None] = {}

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        top, _, rest = name.partition(".")
        found = find_spec(f"{NEW}.{rest}") if top == __name__ and rest else None
        return found and ModuleSpec(name, self, origin=found.origin, is_package=bool(found.submodule_search_locations))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(NEW + spec.name.removeprefix(__name__))
        self._own_specs[module.__name__] = module.__spec__  # the import of `launch.X` replaces it
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has been executed under its own name."""
        module.__spec__ = self._own_specs[module.__name__]

    def get_code(self, name: str) -> CodeType | None:  # for python -m
        found = find_spec(NEW + name.removeprefix(__name__))
        return found.loader.get_code(found.name)


def own_package_first() -> None:
    """`dmltrain_launch` is the package of this folder, whatever is installed; also in programs that this one starts."""
    found = find_spec(NEW)
    if found is None or Path(found.origin).parents[1] != Path(FOLDER):
        sys.path.insert(0, FOLDER)
        known = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [FOLDER, known]))


own_package_first()
deprecated("the import name launch", "dmltrain_launch", "0.5")
sys.meta_path.insert(0, OldNames())
