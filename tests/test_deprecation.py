"""What goes: the warning names the replacement, and nothing stays longer than its warning says."""

import ast
import linecache
import warnings
from pathlib import Path

from dmltrain import __version__
from dmltrain.base.deprecation import deprecated, end
from tests.test_architecture import ROOT, parsed


def test_the_warning_is_at_the_users_line_and_names_the_replacement():
    def old() -> None:
        deprecated("old()", "new()", "0.9", level=1)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        old()
    (warning,) = caught
    assert warning.category is FutureWarning
    assert linecache.getline(warning.filename, warning.lineno) == "        old()\n"
    assert str(warning.message) == "old() is deprecated since dmltrain 0.9 and will go with 0.11: use new()"


def test_each_is_in_the_list_and_none_is_past_its_end():
    page = (ROOT / "docs/deprecations.md").read_text()
    files = [path for top in ("dmltrain", "launch") for path in (ROOT / top).rglob("*.py") if has_one(path)]
    calls = [node for path in files for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)]
    found = [call for call in calls if getattr(call.func, "id", "") == "deprecated"]
    assert found
    for old, new, since in (map(ast.literal_eval, call.args[:3]) for call in found):
        assert f"| `{old.removeprefix('the import name ')}` | `{new}` | {since} | {end(since)} |" in page
        assert numbers(end(since)) > numbers(__version__), f"{old} may go: remove it"


def has_one(path: Path) -> bool:
    return "deprecated(" in path.read_text()


def numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")[:2]]
