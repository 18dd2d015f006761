"""Waits between tries, each twice as long as the one before."""

MOST_DOUBLINGS = 30  # more than lead to any limit


def backoff(first: float, longest: float, doublings: int) -> float:
    """`first`, doubled so many times (never if that is negative), but at most `longest`; s."""
    return min(longest, first * 2.0 ** min(MOST_DOUBLINGS, max(0, doublings)))
