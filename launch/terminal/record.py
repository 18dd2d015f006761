"""job.json: the record of a job, and the version of its format.

Format 1 is the record of 0.4 with the field "format". A record without that field has format 0, that of 0.4 and
before, with the same fields. A change that removes a field or changes its meaning must increase FORMAT.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launch import LaunchError

FORMAT = 1


def read_record(path: Path) -> dict[str, Any]:
    """The record in a job.json. FileNotFoundError if there is none; LaunchError if it is not a valid record."""
    try:
        record = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise LaunchError(f"cannot read {path}: {error}") from None
    if not isinstance(record, dict):
        raise LaunchError(f"cannot read {path}: expected a JSON object with the record of a job")
    version = record.get("format", 0)
    if not isinstance(version, int) or not 0 <= version <= FORMAT:
        by = (record.get("versions") or {}).get("dmltrain", "a newer version")
        raise LaunchError(
            f"{path} has format {version}, and this dmltrain reads formats 0 to {FORMAT}: "
            f"use dmltrain {by}, which wrote it"
        )
    return record
