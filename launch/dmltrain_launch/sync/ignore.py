"""Which paths of a folder .gitignore files and --sync-exclude ignore, by git's rules (gitignore(5)).

Paths are relative, with "/" between names; a folder's path ends in "/". Bytes that are not UTF-8 are surrogates
(PEP 383). Files in deeper folders override those above, and --sync-exclude overrides all. As in git, an invalid pattern
is ignored. Callers go from the top down: files below an ignored folder are never checked. Differences from git: "?" and
"[...]" match a character, not a byte, and classes such as [[:alpha:]] are not supported.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec

from dmltrain_launch import LaunchError

GITIGNORE = ".gitignore"
EVERYTHING = re.compile(".*", re.DOTALL)


@dataclass(frozen=True)
class Pattern:
    """One line. Its regular expression matches a whole path, without the "/" at the end of a folder."""

    regex: re.Pattern[str]
    ignores: bool  # False: the line begins with !
    folders_only: bool


@dataclass(frozen=True)
class Rules:
    """The patterns of one file. `base` is its folder in the tree, "" or ending in "/". For a file above the tree,
    `prefix` is the path from its folder to the tree."""

    patterns: tuple[Pattern, ...]
    base: str = ""
    prefix: str = ""

    def ignores(self, path: str) -> bool | None:
        """Whether `path` is ignored; None if no pattern matches it."""
        inside = self.prefix + path[len(self.base) :].removesuffix("/")
        inside = inside.replace("\n", "\0")  # in re, "." does not match a line end
        for pattern in reversed(self.patterns):
            if (path.endswith("/") or not pattern.folders_only) and pattern.regex.fullmatch(inside):
                return pattern.ignores
        return None


Chain = tuple[Rules, ...]  # the last has the highest precedence


def ignored(chain: Chain, path: str) -> bool:
    """Whether `path` is ignored, if its parents are not."""
    for rules in reversed(chain):
        verdict = rules.ignores(path)
        if verdict is not None:
            return verdict
    return False


def chosen(excludes: Sequence[str]) -> Rules:
    """The patterns of --sync-exclude; LaunchError for an invalid pattern."""
    for line in excludes:
        if "\n" in line or _pattern(line) is None:
            what = "expected a pattern as in a .gitignore file, such as *.ckpt or data/"
            raise LaunchError(f"--sync-exclude {line}: {what}")
    return _rules(excludes)


def below(text: bytes, base: str = "", prefix: str = "") -> Rules:
    """The rules of a .gitignore file with this text; `base` and `prefix` as in Rules."""
    lines = text.decode("utf-8", "surrogateescape").removeprefix("\ufeff").split("\n")
    return _rules([line.removesuffix("\r") for line in lines], base, prefix)


def above(folder: Path) -> Chain:
    """The rules of the .gitignore files above `folder` if it is inside a git repository.

    None if they ignore `folder` itself: a user who works there wants to copy it.
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
            if any(below(text).ignores(step) for step in steps):
                return ()
    return chain


def gitignore(folder: Path) -> bytes | None:
    """The text of the folder's .gitignore; None if there is none that git would read."""
    path = folder / GITIGNORE
    try:
        return path.read_bytes() if path.is_file() and not path.is_symlink() else None
    except OSError as error:
        raise LaunchError(f"cannot read {path}: {error.strerror}") from None


def _rules(lines: Sequence[str], base: str = "", prefix: str = "") -> Rules:
    patterns = (_pattern(line) for line in lines)
    return Rules(tuple(pattern for pattern in patterns if pattern is not None), base, prefix)


def _pattern(line: str) -> Pattern | None:
    """The line, translated by pathspec; None for a comment, an empty line or an invalid pattern.

    pathspec's own matching applies a pattern also to everything below a match, and folder/** also to the folder itself.
    That is right for a single path, but wrong from the top down: ! may re-include a folder but not its contents.
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
            warnings.simplefilter("ignore", FutureWarning)  # of re, about sets such as [[:alpha:]]
            (pattern,) = GitIgnoreSpec.from_lines([bare if line[:1] != "!" else "!" + bare]).patterns
    except (ValueError, re.error):
        return None
    return None if pattern.regex is None else Pattern(pattern.regex, bool(pattern.include), folders_only)
