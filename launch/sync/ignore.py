"""What .gitignore files and --sync-exclude say about the paths of a folder, as git reads them (gitignore(5)).

Paths are relative, with "/" between names; a folder's ends in "/". Bytes that are no UTF-8 are surrogates (PEP 383).
Nearer files win over farther ones, --sync-exclude over all. A line that is not a pattern is ignored, as in git.
Callers ask from the top down: files below an ignored folder are never looked at. Unlike git's, "?" and "[...]" stand
for a character, not a byte, and [[:alpha:]] and its like are not known.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec

from launch import LaunchError

GITIGNORE = ".gitignore"
EVERYTHING = re.compile(".*", re.DOTALL)


@dataclass(frozen=True)
class Pattern:
    """One line. Its regular expression is about a whole path, without the "/" at a folder's end."""

    regex: re.Pattern[str]
    ignores: bool  # else it begins with !
    folders_only: bool


@dataclass(frozen=True)
class Rules:
    """The patterns of one file. `base` is its folder in the tree, "" or ending in "/"; `prefix` is the way from a
    folder above the tree to the tree."""

    patterns: tuple[Pattern, ...]
    base: str = ""
    prefix: str = ""

    def says(self, path: str) -> bool | None:
        """Whether `path` is ignored; None when no pattern is about it."""
        inside = self.prefix + path[len(self.base) :].removesuffix("/")
        inside = inside.replace("\n", "\0")  # in re, "." does not match a line end
        for pattern in reversed(self.patterns):
            if (path.endswith("/") or not pattern.folders_only) and pattern.regex.fullmatch(inside):
                return pattern.ignores
        return None


Chain = tuple[Rules, ...]  # from the one that is asked last to the one that is asked first


def ignored(chain: Chain, path: str) -> bool:
    """Whether `path`, whose parents are not ignored, is."""
    for rules in reversed(chain):
        said = rules.says(path)
        if said is not None:
            return said
    return False


def chosen(excludes: Sequence[str]) -> Rules:
    """The patterns of --sync-exclude; LaunchError for one that is none."""
    for line in excludes:
        if "\n" in line or _pattern(line) is None:
            what = "expected a pattern as in a .gitignore file, such as *.ckpt or data/"
            raise LaunchError(f"--sync-exclude {line}: {what}")
    return _rules(excludes)


def below(text: bytes, base: str = "", prefix: str = "") -> Rules:
    """What the text of a .gitignore file says; `base` and `prefix` as in Rules."""
    lines = text.decode("utf-8", "surrogateescape").removeprefix("\ufeff").split("\n")
    return _rules([line.removesuffix("\r") for line in lines], base, prefix)


def above(folder: Path) -> Chain:
    """What the .gitignore files above `folder` say when it is inside a git repository.

    Nothing when they ignore `folder` itself: a user who works there wants it copied.
    """
    around = [folder, *folder.parents]
    top = next((number for number, each in enumerate(around) if (each / ".git").exists()), 0)
    chain: Chain = ()
    for parent in reversed(around[1 : top + 1]):
        text = gitignore(parent)
        if text is not None:
            inner = folder.relative_to(parent).parts
            chain = (*chain, below(text, prefix="/".join(inner) + "/"))
            steps = ["/".join(inner[: number + 1]) + "/" for number in range(len(inner))]
            if any(below(text).says(step) for step in steps):
                return ()
    return chain


def gitignore(folder: Path) -> bytes | None:
    """The text of the folder's .gitignore; None when it has none that git would read."""
    path = folder / GITIGNORE
    try:
        return path.read_bytes() if path.is_file() and not path.is_symlink() else None
    except OSError as error:
        raise LaunchError(f"cannot read {path}: {error.strerror}") from None


def _rules(lines: Sequence[str], base: str = "", prefix: str = "") -> Rules:
    patterns = (_pattern(line) for line in lines)
    return Rules(tuple(each for each in patterns if each is not None), base, prefix)


def _pattern(line: str) -> Pattern | None:
    """The line as pathspec translates it; None for a comment, an empty line or what is no pattern.

    pathspec's own matching lets a pattern hold for all below what it matches, and folder/** for the folder too. That is
    right for a path alone, and wrong on the way down, where ! may have brought back a folder but not what is in it.
    """
    if not line.endswith("\\ "):
        line = line.rstrip(" ")
    bare = line[1:] if line.startswith("!") else line
    folders_only = bare.endswith("/")
    if bare.rstrip("/") in ("*", "**"):
        return Pattern(EVERYTHING, bare is line, folders_only)
    anchored = "/" if folders_only and "/" in bare[:-1] and not bare.startswith("/") else ""
    bare = re.sub(r"/\*\*$", "/**/*", anchored + bare.rstrip("/"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # re's, about sets such as [[:alpha:]]
            (found,) = GitIgnoreSpec.from_lines([bare if line[:1] != "!" else "!" + bare]).patterns
    except (ValueError, re.error):
        return None
    return None if found.regex is None else Pattern(found.regex, bool(found.include), folders_only)
