"""Random programs of the grammar: a seed gives a program, which is a list of pieces of code."""

from __future__ import annotations

import string
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from tests.scripts_grammar import idioms, world
from tests.scripts_grammar.idioms import EXTRAS, NONE, ONE_OF, STYLES, USUAL, Idiom


@dataclass(frozen=True)
class Piece:
    """Lines of a program, and the idioms that they come from (none: every program has them). `kept`: a smaller program
    has it, too."""

    idioms: tuple[str, ...]
    code: str
    kept: bool = False


@dataclass(frozen=True)
class Program:
    """What is run. `idioms`: all that the pieces come from."""

    workers: int
    pieces: tuple[Piece, ...]

    @property
    def text(self) -> str:
        return "".join(f"{piece.code}\n" for piece in self.pieces if piece.code)

    @property
    def idioms(self) -> set[str]:
        return {name for piece in self.pieces for name in piece.idioms}

    def listing(self) -> str:
        """A file for `python -m tests.scripts_grammar.run --listing FILE`."""
        return f"# {self.workers} workers: {', '.join(sorted(self.idioms))}\n{self.text}"

    def without(self, places: set[int]) -> Program:
        left = (piece for place, piece in enumerate(self.pieces) if piece.kept or place not in places)
        return replace(self, pieces=tuple(left))


def program(seed: int, attempt: int = 0, elastic: bool = False) -> Program:
    """The same for the same numbers, as long as the idioms are the same. `elastic`: for an elastic job."""
    return _Drawing(Random(f"{seed} {attempt}"), elastic).program()


class _Drawing:
    """The choices of one program."""

    def __init__(self, random: Random, elastic: bool) -> None:
        self.random, self.is_elastic = random, elastic
        self.model = random.choice(world.MODELS)
        styles = [each for each in STYLES if each.elastic or not elastic]
        self.style = STYLES[0] if random.random() < 0.5 else random.choice(styles)
        if not self.style.ddp:  # which are refused: fewer of them
            self.style = random.choice(styles)
        fitting = [each for each in EXTRAS if self._fits(each)]
        often = [5 if each.needs not in ("", "plain", "arrives_once") else 1 for each in fitting]
        self.extras = [*dict.fromkeys(random.sample(fitting, random.choice((1, 2, 2, 3, 3, 4, 5)), counts=often))]
        self.steps = random.choice((2, 3, 3, 4, 5))
        self.pieces: list[Piece] = []
        optimizers = idioms.BY_STYLE.get(self.style.name, idioms.OPTIMIZERS)
        self.optimizers = self.model.optimizers or optimizers
        groups = [extra.code["groups"] for extra in self.extras if "groups" in extra.code]
        chosen = random.choice(self.optimizers)
        self.values: dict[str, Any] = {
            "scale": "scaler.scale" if self.style.name == "amp" else "",
            "optimizer": chosen.replace("$groups", groups[0] if groups else USUAL["groups"]),
            "first": chosen.replace("$groups", "model.first.parameters()"),
            "last": random.choice(self.optimizers).replace("$groups", "model.last.parameters()"),
            "another": random.choice(self.optimizers).replace("$groups", "model.parameters()"),
        }
        self.layers = {each.name: random.choice(("first", "last")) for each in EXTRAS}

    def _fits(self, idiom: Idiom) -> bool:
        """Whether the program can have it. A style that says what a place is leaves no choice there."""
        if self.is_elastic and not idiom.elastic:
            return False
        if any(place in self.style.code for place in idiom.code if place in ONE_OF):
            return False
        return not idiom.needs or idiom.needs == self.style.name or getattr(self.model, idiom.needs, False)

    def program(self) -> Program:
        number = self.random.randrange(1000)
        self.pieces.append(Piece((self.model.__name__,), f"model = made({self.model.__name__}, {number})", True))
        self._add("before")
        groups = (extra for extra in self.extras if "groups" in extra.code)
        self._piece(self.style.code.get("optimizer", USUAL["optimizer"]), self.style, *groups, kept=True)
        self._add("after")
        at = {extra.name: sorted(self.random.sample(range(self.steps), 2)) for extra in self.extras}
        for step in range(self.steps):
            self.values["batch"] = step
            for extra in self.extras:
                for place, when in zip(("early", "late"), at[extra.name], strict=True):
                    if step == when and place in extra.code:
                        self._piece(extra.code[place], extra)
            self._step()
        return Program(self.random.choice((2, 2, 3)), tuple(self.pieces))

    def _step(self) -> None:
        self._piece(*self._chosen("zero"))
        loss, of_loss = self._chosen("loss")
        self.values["loss"] = self._filled(loss, of_loss)
        backward, of_backward = self._chosen("backward")
        self._piece(backward, of_backward, of_loss)
        local = of_loss.local or of_backward.local
        if not local:
            self._add("gradients", 0.6)
        step, of_step = self._chosen("step")
        self._piece(*((USUAL["step"], NONE) if local and of_step.looks else (step, of_step)))
        self._add("stepped", 0.6)
        self._add("always")
        self._piece(self.style.code.get("note", USUAL["note"]), NONE)

    def _add(self, place: str, chance: float = 1.0) -> None:
        for each in (self.style, *self.extras):
            if place in each.code and self.random.random() < chance:
                self._piece(each.code[place], each)

    def _chosen(self, place: str) -> tuple[str, Idiom]:
        """What is done at this place of this step."""
        if place in self.style.code:
            return self.style.code[place], self.style
        others = [extra for extra in self.extras if place in extra.code]
        if others and ("always" in others[0].code or self.random.random() < 0.6):
            chosen = self.random.choice(others)
            return chosen.code[place], chosen
        return USUAL[place], NONE

    def _piece(self, code: str, *of: Idiom, kept: bool = False) -> None:
        names = tuple(each.name for each in of if each.name)
        self.pieces.append(Piece(names, self._filled(code, of[0]), kept))

    def _filled(self, code: str, idiom: Idiom) -> str:
        drawn = {
            "number": self.random.randrange(1000),
            "small": self.random.choice((0.01, 0.05, 0.3)),
            "large": self.random.choice((0.5, 1.0, 2.0)),
            "layer": self.layers.get(idiom.name, "first"),
        }
        before = ""
        while code != before:
            before, code = code, string.Template(code).safe_substitute(self.values | drawn)
        return code
