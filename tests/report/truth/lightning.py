"""metrics.csv of PyTorch Lightning's CSVLogger: rows of steps and of epochs, and of what follows the fit."""

from random import Random

from tests.report.truth.csv_logger import number
from tests.report.truth.known import Print, Program, Values

NAMES = {"loss": "loss", "acc": "accuracy", "MulticlassAccuracy": "multiclassaccuracy", "f1": "f1"}


def program(random: Random) -> Program:
    names = random.sample(list(NAMES), random.randint(1, 2))
    form = random.choice(("train_{}", "train/{}"))
    kind = random.choice(("both", "epoch", "step"))  # on_step, on_epoch of self.log
    rates, validates = random.random() < 0.3, random.random() < 0.8
    after = random.choice(("", "", "test", "validate" if validates else "", "rate" if rates else ""))
    steps = random.choice((3, 391))
    kinds = {"both": ("_step", "_epoch"), "epoch": ("",), "step": ("",)}[kind]
    keys = {form.format(name) + end: f"train_{NAMES[name]}" for name in names for end in kinds}
    keys |= {form.format(name).replace("train", "val"): f"validation_{NAMES[name]}" for name in names if validates}
    keys |= {form.format(name).replace("train", "test"): f"test_{NAMES[name]}" for name in names if after == "test"}
    keys |= {"lr-SGD": "learning_rate"} if rates else {}
    header = random.choice((sorted([*keys, "epoch", "step"]), [*keys, "epoch", "step"], ["epoch", "step", *keys]))

    def line(columns: list[str], epoch: int | None, step: int, counts: bool) -> Print:
        cells = {"epoch": "" if epoch is None else str(epoch), "step": str(step)}
        values: Values = {}
        for name in columns:
            cells[name], value = number(random)
            values |= {keys[name]: value} if counts else {}
        return Print(",".join(cells.get(name, "") for name in header), values | {"step": float(step)})

    def of(split: str, end: str = "") -> list[str]:
        return [name for name in keys if name.startswith(split) and name.endswith(end)]

    def epoch(number_: int) -> list[Print]:
        start = number_ * steps
        prints = [line(["lr-SGD"], None, start, True)] if rates else []
        rate = prints[0].values if rates else {}  # it belongs to the epoch of the next row
        prints = [each._replace(values={}) for each in prints]
        if kind != "epoch":
            prints += [line(of("train", kinds[0]), number_, start + done, kind == "step") for done in (0, steps - 1)]
        if validates:
            prints.append(line(of("val"), number_, start + steps - 1, True))
        if kind != "step":
            prints.append(line(of("train", kinds[-1]), number_, start + steps - 1, True))
        if rates:
            prints[1] = prints[1]._replace(values=rate | prints[1].values)
        return prints

    def closing(end: int, rows: dict[int, Values]) -> list[str]:
        """`trainer.test` is the last epoch's, `trainer.validate` no epoch's, nor is what begins with step 0."""
        if not after:
            return []
        columns = {"test": of("test"), "validate": of("val"), "rate": ["lr-SGD"]}[after]
        columns = [*dict.fromkeys([*columns, *["lr-SGD"] * (rates and random.random() < 0.5)])]
        if random.random() < 0.3 and after != "rate" and header[-1] != "step":
            return [line(columns, 0, 0, False).text]
        row = line(columns, end, end * steps, after == "test")
        rows[end - 1] |= {key: value for key, value in row.values.items() if key.startswith("test_")}
        return [row.text]

    return Program(epoch, [",".join(header)], closing, is_text=False, name="metrics.csv", again=[",".join(header)])
