"""Ranges of names: `node[01-03,07]` is node01, node02, node03 and node07. Pure; ValueError for wrong syntax."""

from __future__ import annotations

import itertools
import math
import re

MOST = 10_000  # names in one range; more is probably a typing error
RANGE = re.compile(r"\[([^\[\]]*)\]")
NUMBERS = re.compile(r"(\d{1,12})(?:-(\d{1,12}))?", re.ASCII)


def expand(text: str) -> list[str]:
    """Every name that `text` stands for, in order. Several ranges give all combinations."""
    pieces = RANGE.split(text)  # text, range, text, range, ..., text
    if any(bracket in piece for piece in pieces[::2] for bracket in "[]"):
        raise ValueError(f"{text}: unbalanced bracket; a range is written node[01-08] or node[1,3,5-7]")
    choices = [_numbers(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
    if math.prod(map(len, choices)) > MOST:
        raise ValueError(f"{text} stands for more than {MOST} names")
    return ["".join(choice) for choice in itertools.product(*choices)]


def split_list(text: str) -> list[str]:
    """The items of a comma-separated list. Commas in brackets belong to ranges: `a,n[1,3]` is a and n[1,3]."""
    return [part.strip() for part in re.split(r",(?![^\[\]]*\])", text)]


def _numbers(inside: str) -> list[str]:
    """The numbers of one range, with their leading zeros: `01-03,7` is 01, 02, 03 and 7."""
    numbers: list[str] = []
    for part in inside.split(","):
        match = NUMBERS.fullmatch(part.strip())
        if not match:
            raise ValueError(f"[{inside}] is not a range: expected numbers such as [01-08] or [1,3,5-7]")
        first, last = match[1], match[2] or match[1]
        padded = any(len(each) > 1 and each[0] == "0" for each in (first, last))
        if padded and len(first) != len(last):
            raise ValueError(f"[{inside}]: {first} and {last} differ in width; write the same number of digits")
        if int(first) > int(last):
            raise ValueError(f"[{inside}]: {first} is greater than {last}; write the smaller number first")
        if len(numbers) + int(last) - int(first) >= MOST:
            raise ValueError(f"[{inside}] stands for more than {MOST} names")
        width = len(first) if padded else 0
        numbers += [f"{number:0{width}d}" for number in range(int(first), int(last) + 1)]
    return numbers
