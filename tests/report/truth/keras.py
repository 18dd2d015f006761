"""Keras' progress bars from 2015 to Keras 3, on terminals and in files, with bars of `evaluate` after them."""

from random import Random

from tests.report.truth.known import Print, Program, Values, draw

NAMES = {  # the report's name
    **{"acc": "accuracy", "accuracy": "accuracy", "top-5-accuracy": "top_k_accuracy_5", "dense_1_loss": "dense_1_loss"},
    **{"sparse_categorical_accuracy": "accuracy", "factorized_top_k/top_1": "factorized_top_k_top_1", "auc_1": "auc_1"},
}
OF_2015 = {
    "loss": "train_loss",
    "acc.": "train_accuracy",
    "val. loss": "validation_loss",
    "val. acc.": "validation_accuracy",
}


def number(random: Random) -> tuple[str, float]:
    """As Keras prints it: without an exponent above 0.001."""
    value = draw(random)
    text = f"{value:.4f}" if abs(value) > 1e-3 else f"{value:.4e}"
    return text, float(text)


class Bar:
    """A version. drawn: how a bar is drawn again in the same place; "" where each drawing is a line of its own."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.version = random.choice(("2015 first", "2015", "1", "2.0", "2.1", "tf 2.0", "tf 2", "3"))
        self.verbose = random.choice((1, 1, 2)) if self.version not in ("2015 first", "2015") else 1
        self.steps = random.choice((1, 5, 32, 1563, 60000))
        self.drawn = random.choice(("\r", "\b" * 60 + "\r", "\n")) if self.verbose == 1 else ""
        self.colours = self.version == "3" and self.drawn == "\r"
        self.total = random.choice((5, 10, 100))
        names = random.sample([name for name in NAMES if name != "accuracy"], random.randint(1, 2))
        self.names = {name: NAMES[name] for name in names}
        if len(set(self.names.values())) < len(names):
            self.names = {"acc": "accuracy"}
        self.validates, self.rate = random.random() < 0.8, random.random() < 0.15
        self.unknown = self.version in ("tf 2", "3") and random.random() < 0.3

    def metrics(self, complete: bool) -> tuple[str, Values]:
        keys = {"loss": "train_loss"} | {name: f"train_{key}" for name, key in self.names.items()}
        if complete and self.validates:
            keys |= {"val_loss": "validation_loss"} | {
                f"val_{name}": f"validation_{key}" for name, key in self.names.items()
            }
        if complete and self.rate and self.version not in ("2015 first", "2015"):
            keys |= {"learning_rate" if self.version == "3" else "lr": "learning_rate"}
        if self.version == "2015 first":
            keys = dict(list(OF_2015.items())[: 4 if complete and self.validates else 2])
        drawn = {name: number(self.random) for name in keys}
        return "".join(f" - {name}: {text}" for name, (text, _) in drawn.items()), {
            keys[n]: v for n, (_, v) in drawn.items()
        }

    def bar(self, done: int, steps: int, seconds: int, complete: bool, metrics: str) -> str:
        """One drawing. A bar that is not complete says the time that is left, up to Keras 2."""
        share = 30 * done // steps
        speed = {"2.1": " 200us/step", "tf 2.0": " 83us/sample", "tf 2": " 3ms/step", "3": " 3ms/step"}.get(
            self.version, ""
        )
        count = f"{done:{len(str(steps))}}/{'Unknown' if self.unknown and not complete else steps}"
        if self.version == "3":
            full, rest = "━" * (share * 2 // 3), "━" * (20 - share * 2 // 3)
            time = f"{seconds}s" if complete else self.random.choice(("9s", "1:07", "1:02:03"))
            shown = f"{count} {full}{rest} {time}{speed}"
            if self.colours:
                shown = f"\x1b[1m{count}\x1b[0m \x1b[32m{full}\x1b[0m\x1b[37m{rest}\x1b[0m \x1b[1m{time}\x1b[0m{speed}"
            return shown + metrics
        picture = "[" + "=" * max(0, share - 1) + (">" if share < 30 else "=") + "." * (30 - share) + "]"
        left = " - ETA: " + self.random.choice(("9s", "1:07", "1:02:03", "0s"))
        return f"{count} {picture}{f' - {seconds}s{speed}' if complete else left}{metrics}"

    def once(self, steps: int, seconds: int, metrics: str) -> str:
        """verbose=2."""
        if self.version == "3":
            return f"{steps}/{steps} - {seconds}s - 3ms/step{metrics}"
        if self.version in ("tf 2.0", "tf 2"):
            more = f" - {seconds}s/epoch - 3ms/step" if self.version == "tf 2" and self.steps > 5 else ""
            return f"{steps}/{steps} - {seconds}s{metrics}{more}"
        return f" - {seconds}s{metrics}"

    def bars(self, steps: int, of_epoch: bool) -> list[Print]:
        """All drawings of an epoch, or of an evaluation, or of `predict`, which has no metrics."""
        seconds = self.random.choice((0, 1, 7, 59, 60, 3700))
        metrics, values = self.metrics(of_epoch)
        metrics = "" if not of_epoch and self.version != "2015" and self.random.random() < 0.3 else metrics
        values = values | {"seconds": float(seconds)} if of_epoch else {}
        if self.verbose == 2:
            return [Print(self.once(steps, seconds, metrics), values)]
        places = sorted({1, steps // 2, steps - 1} - {0, steps})
        drawings = [self.bar(done, steps, 0, False, self.metrics(False)[0]) for done in places]
        trained: Values = {}
        if of_epoch and self.validates and self.version not in ("2015 first", "2015", "1"):
            before, trained = max(0, seconds - 1), self.metrics(False)
            drawings.append(self.bar(steps, steps, before, True, trained[0]))
            trained = trained[1] | {"seconds": float(before)}
        last = self.bar(steps, steps, seconds, True, metrics)
        if self.drawn == "\n":
            return [
                *(Print(drawing, trained if drawing is drawings[-1] else {}) for drawing in drawings),
                Print(last, values),
            ]
        return [Print("".join(drawing + self.drawn for drawing in drawings) + last, values)]

    def epoch(self, number: int) -> list[Print]:
        old = self.version.startswith("2015")
        prints = [Print(f"Epoch {number}" + ("" if old else f"/{self.total}")), *self.bars(self.steps, True)]
        if self.random.random() < 0.1 and not old and self.verbose == 1:  # of a callback
            prints += self.bars(self.random.choice((self.steps, self.steps // 4 + 2)), False)
        if self.random.random() < 0.1 and not old:
            prints.append(Print(f"Epoch {number:05}: val_loss improved from inf to 0.8, saving model to w.h5"))
        if self.random.random() < 0.05 and not old:
            prints.append(Print(f"\nEpoch {number}: ReduceLROnPlateau reducing learning rate to 0.0001."))
        return prints


def program(random: Random) -> Program:
    bar = Bar(random)
    opening = ["Using TensorFlow backend.", "Train on 60000 samples, validate on 10000 samples"][: random.randint(0, 2)]
    evaluates = random.random() < 0.3 and bar.verbose == 1
    other = bar.steps if random.random() < 0.2 else bar.steps // 4 + 2
    closing = [each.text for each in bar.bars(other, False)] if evaluates else []
    first = 0 if bar.version.startswith("2015") else 1
    return Program(bar.epoch, opening, lambda end, rows: closing, first=first, prefixes="none")
