"""The CSV files that TensorBoard exports of a run: one for each tag, which only its name says."""

from random import Random

from tests.report.truth.known import Case, Start, Values, draw

TAGS = {  # file -> the report's key
    "run-train-tag-epoch_accuracy.csv": "train_accuracy",
    "run-validation-tag-epoch_accuracy.csv": "validation_accuracy",
    "run-train-tag-epoch_loss.csv": "train_loss",
    "run-validation-tag-epoch_loss.csv": "validation_loss",
    "run-resnet_train-tag-epoch_f1.csv": "train_f1",
}
OF_STEPS = {"run-.-tag-train_loss.csv": "train_loss", "run-.-tag-val_acc.csv": "validation_accuracy"}


def case(random: Random) -> Case:
    """Each file has a start's steps again from its first one, and a time for each."""
    by_epoch = random.random() < 0.7
    files = random.sample(sorted(TAGS if by_epoch else OF_STEPS), random.randint(1, 2))
    spans, at = [], 0
    while not spans or (random.random() < 0.3 and len(spans) < 3):
        # a start that goes on is told from the one before by its time, if there are others
        spans.append((at if spans and spans[-1][1] > 3 and random.random() < 0.5 else 0, random.randint(1, 6)))
        at = sum(spans[-1]) - random.randint(0, 1)
    step = 1 if by_epoch else random.choice((50, 391))
    lines = {file: ["Wall time,Step,Value"] for file in files}
    starts: list[Start] = []
    now, usual = float(random.randint(10**9, 17 * 10**8)), random.uniform(0.1, 900)
    for first, count in spans:
        start = Start(first * step, [{} for _ in files])
        for file, rows in zip(files, start.rows, strict=True):
            time = now
            for number in range(first * step, (first + count) * step, step):
                seconds, value = round(usual * random.uniform(0.9, 1.1), 2), draw(random)
                values: Values = {(TAGS | OF_STEPS)[file]: value}
                if rows:
                    values["seconds"] = seconds
                    time = round(time + seconds, 2)
                rows[number] = values
                text = {"nan": "NaN", "inf": "Infinity"}.get(repr(value), repr(value))
                lines[file].append(f"{time:.6f},{number},{text}")
        now += 1e6
        starts.append(start)
    ending = random.choice(("\n", "\r\n"))
    data = {file: (ending.join(rows) + ending).encode() for file, rows in lines.items()}
    return Case(data, starts, 0 if by_epoch else None, f"{spans} in {len(files)} files")
