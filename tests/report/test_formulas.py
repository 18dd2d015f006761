"""What a log says is no formula in a spreadsheet that opens the CSV."""

from __future__ import annotations

import pytest

from dmltrain.report.spreadsheet import quoted
from dmltrain.report.summary_text import plain


@pytest.mark.parametrize("show", [plain, quoted])
def test_texts_that_a_spreadsheet_would_compute_are_quoted(show):
    for text in ("=HYPERLINK(1)", "@SUM(1)", "+cmd|' /C calc'!A0", "-2+cmd|' /C calc'!A0", "\t=1", "\r=1"):
        assert show(text) == f"'{text}"
    for text in ("-1e-3", "+5", "-", "-1,2", "dist_sync", "a=b", "", "--lr"):
        assert show(text) == text
    assert plain(-0.5) == "-0.5" and plain(-3) == "-3"
