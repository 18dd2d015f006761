"""The errors of connecting to another host's agent: reach.py reports, `dmltrain_launch.preflight` explains them."""

from __future__ import annotations

REFUSED, TIMED_OUT, NO_ROUTE = "refused", "timed out", "no route"
SILENT, UNAUTHENTICATED = "connected, but no answer", "another program or host answers there"
