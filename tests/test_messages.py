"""The list of messages is up to date: it shows also what is found in the source, and in which order."""

from __future__ import annotations

import difflib

from tests.messages import LIST, ROOT, listed


def test_the_list_is_up_to_date():
    old, new = LIST.read_text().splitlines(), listed().splitlines()
    diff = difflib.unified_diff(old, new, str(LIST.relative_to(ROOT)), "the source", n=1, lineterm="")
    changed = "\n".join(diff)
    assert not changed, f"read the changes, and take them over with python -m tests.messages:\n{changed}"
