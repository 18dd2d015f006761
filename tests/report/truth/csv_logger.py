"""CSV files with a row for each epoch: Keras' CSVLogger, and those of fastai and timm."""

from random import Random

from tests.report.truth.keras import NAMES
from tests.report.truth.known import Print, Program, draw


def number(random: Random) -> tuple[str, float]:
    value = draw(random)
    text = random.choice((repr(value), f"{value:.16g}", f"{value:f}"))
    return text, float(text)


def keras(random: Random) -> Program:
    """Sorted columns; `append=True` goes on without a header, or a user joined files, whose columns may be others."""
    separator, quoted = random.choice(",,,;\t"), random.random() < 0.1
    name = random.choice(list(NAMES))
    columns = {"loss": "train_loss", name: f"train_{NAMES[name]}"}
    if random.random() < 0.8:
        columns |= {"val_loss": "validation_loss", f"val_{name}": f"validation_{NAMES[name]}"}
    if random.random() < 0.2:
        columns |= {random.choice(("lr", "learning_rate")): "learning_rate"}
    names = sorted(columns)
    timed = random.choice(("", "", "", "time", "elapsed", "timestamp"))
    seconds, start = random.uniform(1, 900), float(random.randint(10**9, 17 * 10**8)) if timed == "timestamp" else 0.0
    clock = {"": start}
    names += ["time"] if timed else []

    def headed() -> str:
        return separator.join(f'"{name}"' if quoted else name for name in ("epoch", *names))

    def begin() -> None:
        if again and clock.pop("began", None):
            some = random.sample(names, random.randint(0, len(names)))
            names[:] = dict.fromkeys([*some, "loss", *["time"] * bool(timed)])
            again[:] = [headed()]
        clock.update({"": start, "began": 1.0})

    def epoch(number_: int) -> list[Print]:
        drawn = {name: number(random) for name in columns}
        values = {columns[name]: value for name, (_, value) in drawn.items() if name in names}
        if timed:
            own = round(seconds * random.uniform(0.95, 1.05), 2)
            clock[""] += own
            drawn["time"] = f"{own if timed == 'time' else clock['']:.6f}", own
            values |= {"seconds": own} if timed != "timestamp" or number_ else {}
        return [Print(separator.join([str(number_), *(drawn[name][0] for name in names)]), values)]

    again = random.choice(([], [headed()]))
    once = timed == "timestamp"
    return Program(
        **{"epoch": epoch, "opening": [headed()], "is_text": False, "name": "x.csv", "again": again},
        **{"again_and_again": not once, "resumes": timed != "elapsed", "begin": begin},
    )


def timm(random: Random) -> Program:
    columns = {"train_loss": "train_loss", "eval_loss": "validation_loss", "eval_top1": "validation_accuracy"}
    columns |= {"eval_top5": "validation_top_k_accuracy_5"} | ({"lr": "learning_rate"} if random.random() < 0.5 else {})

    def epoch(number_: int) -> list[Print]:
        drawn = {name: number(random) for name in columns}
        cells = [str(number_), *(text for text, _ in drawn.values())]
        return [Print(",".join(cells), {columns[name]: value for name, (_, value) in drawn.items()})]

    return Program(epoch, [",".join(("epoch", *columns))], is_text=False, name="summary.csv")


def fastai(random: Random) -> Program:
    """Metrics without a split are those of validation; times are minutes and seconds."""
    columns = {"train_loss": "train_loss", "valid_loss": "validation_loss", "accuracy": "validation_accuracy"}
    columns |= {"error_rate": "validation_error_rate"} if random.random() < 0.3 else {}

    def epoch(number_: int) -> list[Print]:
        drawn = {name: number(random) for name in columns}
        seconds = random.choice((0, 7, 59, 60, 754, 3700, 7384))
        hours, rest = divmod(seconds, 3600)
        time = f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60:02}:{rest % 60:02}"
        cells = [str(number_), *(text for text, _ in drawn.values()), time]
        values = {columns[name]: value for name, (_, value) in drawn.items()} | {"seconds": float(seconds)}
        return [Print(",".join(cells), values)]

    return Program(epoch, [",".join(("epoch", *columns, "time"))], is_text=False, name="history.csv")


def program(random: Random) -> Program:
    return random.choice((keras, keras, keras, timm, fastai))(random)
