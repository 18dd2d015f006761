"""Caffe's solver.cpp of all versions, with glog's lines, and that of PMLS-Caffe with its net_outputs file."""

from dataclasses import replace
from random import Random

from tests.report.truth.known import Print, Program, Values, draw

NAMES = {"accuracy": "accuracy", "loss3/top-5": "loss3_top_5", "loss": "loss", "my own metric": "my_own_metric"}


def number(random: Random) -> tuple[str, float]:
    value = draw(random)
    return (
        (random.choice(("nan", "-nan", "-nan(ind)", "-1.#IND", "1.#QNAN")), value)
        if value != value
        else (f"{value:g}", value)
    )


def shown(value: tuple[str, float]) -> float:
    return value[1] if value[1] != value[1] else float(value[0])


class Solver:
    """Tests at an iteration, then displays it and some until the next test."""

    def __init__(self, random: Random, version: str) -> None:
        self.random, self.version = random, version
        self.names = random.sample(list(NAMES), random.randint(1, 3))
        self.tests, self.nets = random.random() < 0.8, random.choice((1, 1, 2))
        self.interval = random.choice((20, 100, 1000))
        self.gpu = "[0] " if version == "nvidia" else ""
        self.says_rate = random.random() < 0.5
        self.before: Values = {}  # displayed last

    def begin(self) -> None:
        self.before = {}

    def said(self, line: int, text: str) -> str:
        return f"solver.cpp:{line}] {self.gpu}{text}"

    def iteration(self, iteration: int, loss: str) -> tuple[str, Values]:
        speed = " (2.5 iter/s, 8s/20 iters)" if self.version in ("2017", "nvidia") else ""
        return f"Iteration {iteration}{speed}, loss = {loss}", {}

    def display(self, iteration: int) -> list[Print]:
        loss = number(self.random)
        line, values = self.iteration(iteration, loss[0])
        prints = [Print(self.said(237, line), {"train_loss": shown(loss)} | values, timed=True)]
        for place, name in enumerate(self.names if self.version != "2014" else ()):
            text = number(self.random)
            weighted = f" (* 1 = {text[0]} loss)" if name == "loss" else ""
            values = {f"train_{NAMES[name]}": shown(text)} if name != "loss" else {}
            prints.append(Print(self.said(253, f"    Train net output #{place}: {name} = {text[0]}{weighted}"), values))
        return [*prints, *([Print(self.said(571, f"Iteration {iteration}, lr = 0.01"))] if self.says_rate else [])]

    def test(self, iteration: int, net: int) -> list[Print]:
        old = self.version == "2014"
        prints = [
            Print(self.said(341, f"Iteration {iteration}, Testing net{'' if old else f' (#{net})'}"), timed=net == 0)
        ]
        for place, name in enumerate(("accuracy", "loss") if old else self.names):
            text = number(self.random)
            line = f"Test score #{place}: {text[0]}" if old else f"    Test net output #{place}: {name} = {text[0]}"
            weighted = f" (* 1 = {text[0]} loss)" if name == "loss" and not old else ""
            values = {f"validation_{NAMES[name]}": shown(text)} if net == 0 else {}
            prints.append(Print(self.said(409, line + weighted), values))
        return prints

    def epoch(self, iteration: int) -> list[Print]:
        if not self.tests:
            return self.display(iteration)
        prints = self.test(iteration, 0)
        prints[1] = prints[1]._replace(values=self.before | prints[1].values)
        for net in range(1, 1 if self.version == "2014" else self.nets):
            prints += self.test(iteration, net)
        for step in range(self.random.randint(1, 2)):
            displayed = self.display(iteration + step * self.interval // 2)
            self.before = {key: value for each in displayed for key, value in each.values.items()}
            prints += [each._replace(values={}, timed=False) for each in displayed]
        return prints

    def program(self) -> Program:
        opening = [self.said(160, "Solving CaffeNet"), self.said(161, "Learning Rate Policy: step")]
        again = [self.said(70, "Restoring previous solver status from x_iter_100.solverstate"), *opening]
        noise = [
            self.said(450, "Snapshotting to binary proto file x_iter_100.caffemodel"),
            "net.cpp:411] conv1 <- data",
        ]
        return Program(
            **{"epoch": self.epoch, "opening": opening, "again": again, "noise": noise, "begin": self.begin},
            **{"first": None, "step": self.interval, "prefixes": "glog", "elapsed": True},
        )


def program(random: Random) -> Program:
    return Solver(random, random.choice(("2014", "2015", "2017", "nvidia"))).program()


# ---- PMLS-Caffe -----------------------------------------------------------------------------------------------------


class PMLSSolver(Solver):
    """Thread 0 of worker 0 prints, also the seconds since the start. A display at a test's iteration counts for it."""

    def __init__(self, random: Random) -> None:
        super().__init__(random, "2015")
        self.words = random.choice(("loss: ", "model version: 17, loss: "))
        self.now = self.row_at = 0.0

    def begin(self) -> None:
        super().begin()
        self.now = self.row_at = 0.0

    def iteration(self, iteration: int, loss: str) -> tuple[str, Values]:
        self.now = float(f"{self.now + self.random.uniform(0.1, 200):g}")
        return f"Iteration {iteration}, {self.words}{loss}, time: {self.now:g}", {"seconds": self.now}

    def epoch(self, iteration: int) -> list[Print]:
        prints = self.test(iteration, 0) if self.tests else []
        if prints and self.before:
            seconds = {"seconds": round(self.now - self.row_at, 6)} if self.now > self.row_at else {}
            prints[1] = prints[1]._replace(values=self.before | seconds | prints[1].values)
        displayed = self.display(iteration)
        values = dict.fromkeys(self.before) | displayed[0].values | {"seconds": round(self.now - self.row_at, 6)}
        displayed[0] = displayed[0]._replace(values=values)
        self.row_at = self.now
        prints += displayed
        if self.tests and self.random.random() < 0.5:
            displayed = self.display(iteration + self.interval // 2)
            prints += [each._replace(values={}) for each in displayed]
        self.before = {key: each.values[key] for each in displayed for key in each.values if key != "seconds"}
        return prints


def pmls(random: Random) -> Program:
    if random.random() < 0.3:
        return tables(random)
    return replace(PMLSSolver(random).program(), elapsed=False)


def tables(random: Random) -> Program:
    """NAME.netoutputs, which the program writes anew at each start: a table for the training net and for each other."""
    unit = random.choice((1, 20, 1_000_000))
    trained = random.random() < 0.8
    train = _table(random, range(0, 5 * unit, unit), random.random() < 0.5, True) if trained else ([], {})
    has_tests = not trained or random.random() < 0.8
    test = _table(random, range(0, 5 * unit, unit * random.randint(1, 2)), True, False) if has_tests else ([], {})
    second = _table(random, range(0, 5 * unit, unit), True, False) if has_tests and random.random() < 0.3 else ([], {})
    rows: dict[int, Values] = {}
    before = 0.0
    for iteration in test[1] or train[1]:
        values = {f"train_{key}": value for key, value in train[1].get(iteration, {}).items()}
        values |= {f"validation_{key}": value for key, value in test[1].get(iteration, {}).items()}
        now = values.pop("validation_time", values.get("train_time", 0.0))
        values.pop("train_time", None)
        rows[iteration] = values | {"seconds": round(now - before, 6)}
        before = now
    return Program(
        **{
            "epoch": lambda number: [],
            "opening": [*train[0], *test[0], *second[0]],
            "closing": lambda _, table: table.update(rows) or (),
        },
        **{"first": None, "is_text": False, "name": "x.netoutputs", "again_and_again": False},
    )


def _table(random: Random, iterations: range, has_loss: bool, trains: bool) -> tuple[list[str], dict[int, Values]]:
    names = [name for name in ("accuracy", "loss3/top-5", "loss") if name != "loss" or has_loss][: random.randint(1, 3)]
    lines, rows, now = ["Iteration,time,loss," + "".join(f"{name}," for name in names)], {}, 0.0
    for iteration in iterations:
        now = float(f"{now + random.uniform(1, 200):g}")
        values = {NAMES[name]: float(f"{random.uniform(0.001, 9):g}") for name in names}
        loss = values.get("loss", float(f"{random.uniform(0.001, 9):g}")) if trains else 0.0
        lines.append(f"{iteration:g},{now:g},{loss:g}," + "".join(f"{value:g}," for value in values.values()))
        rows[iteration] = values | ({"loss": loss} if trains else {}) | {"time": now}
    return [*lines, ""], rows
