"""gluon.contrib.estimator: 1.5 has one line for training and validation; later an estimator of its own validates."""

from random import Random

from tests.report.truth.known import Print, Program, Values, draw

NAMES = {
    "accuracy": "accuracy",
    "softmaxcrossentropyloss0": "softmaxcrossentropyloss0",
    "top_k_accuracy_5": "top_k_accuracy_5",
}


def program(random: Random) -> Program:
    names = random.sample(list(NAMES), random.randint(1, 3))
    version = random.choice(("1.5", "1.6", "1.6"))
    word = "train" if version == "1.5" else "training"
    by_batch, validates = random.random() < 0.7, random.random() < 0.8

    def shown(word: str, split: str) -> tuple[str, Values]:
        texts = {name: f"{draw(random):.4f}" for name in names}
        line = ", ".join(f"{word} {name}: {text}" for name, text in texts.items())
        return line, {f"{split}_{NAMES[name]}": float(text) for name, text in texts.items()}

    def epoch(number: int) -> list[Print]:
        prints = [Print(f"[Epoch {number}] Begin, current learning rate: {random.uniform(0, 1):.4f}")]
        for batch in range(2 if by_batch else 0):
            line = (
                f"[Epoch {number}][Batch {batch}][Samples {32 * batch + 32}] time/batch: 0.004s, {shown(word, '')[0]}"
            )
            prints.append(Print(line if version == "1.5" else line.replace("/batch", "/interval")))
        (train, values), (test, tested) = shown(word, "train"), shown("validation", "validation")
        seconds = f"{random.uniform(0, 900):.3f}"
        values["seconds"] = float(seconds)
        if version == "1.5":
            more = f", {test}" if validates else ""
            return [
                *prints,
                Print(
                    f"[Epoch {number}] Finished in {seconds}s, {train}{more}", values | (tested if validates else {})
                ),
            ]
        if validates:
            prints += [Print("Validation Begin"), Print(f"[Epoch 0] Finished in {random.uniform(0, 9):.3f}s, {test}")]
        return [
            *prints,
            Print(f"[Epoch {number}] Finished in {seconds}s, {train}", values | (tested if validates else {})),
        ]

    opening = ["Training begin: using optimizer SGD with current learning rate 0.0010 ", "Train for 5 epochs."]
    ended = "Train finished using total 7s with 5 epochs. " + shown(word, "")[0]
    return Program(epoch, opening if random.random() < 0.8 else (), lambda end, rows: [ended], resumes=False)
