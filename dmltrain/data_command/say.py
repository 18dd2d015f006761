"""Messages of dmltrain-data: on standard error, so that standard output has results only."""

import sys


def say(text: str) -> None:
    print(f"dmltrain-data: {text}", file=sys.stderr, flush=True)
