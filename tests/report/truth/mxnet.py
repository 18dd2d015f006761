"""MXNet's programs: base_module.py's fit of all versions, Scala, Perl, R, gluon, gluoncv, Horovod, and dmltrain.

In `said` a field such as `{train_accuracy:f}` is a value that is drawn, printed in this form and known by this key.
"""

import re
from collections.abc import Callable
from random import Random

from dmltrain.logs import record
from tests.report.truth.known import METRICS, Print, Program, Values, draw, some

_USED = re.compile(r"([\w-]+)=([\d.]+)")
_FIELD = re.compile(r"\{(\w*):(\w+)\}")


def _java(random: Random) -> str:
    number = draw(random) if random.random() < 0.9 else 9.765625e-4
    text = repr(float(f"{number:.8g}")).replace("e-0", "E-").replace("e-", "E-")
    return text.replace("nan", "NaN").replace("inf", "Infinity")


FORMS: dict[str, Callable[[Random], str]] = {
    "f": lambda random: f"{draw(random):f}",
    "r": lambda random: f"{draw(random):.15g}".replace("nan", "NaN").replace("inf", "Inf"),
    "java": _java,
    "share": lambda random: f"{random.uniform(0, 1):f}",
    "long": lambda random: repr(random.uniform(0, 1)),
    "percent": lambda random: f"{random.uniform(0, 99):.1f}",
    "s2": lambda random: f"{random.uniform(0.01, 9000):.2f}",
    "s3": lambda random: f"{random.uniform(0.01, 9000):.3f}",
    "s6": lambda random: f"{random.uniform(0.01, 9000):f}",
    "whole": lambda random: str(random.randint(1, 9000)),
}


def said(random: Random, text: str, batch: int = 0, timed: bool = True, tagged: bool = True) -> Print:
    """batch: its number, of a batch's line."""
    values: Values = {}

    def drawn(field: re.Match[str]) -> str:
        number = FORMS[field[2]](random)
        if field[1]:
            values[field[1]] = float(number)
        return number

    text = _FIELD.sub(drawn, text)
    return Print(text, {} if batch else values, (batch, values), timed and not batch, tagged)


def fields(split: str, names: list[str], form: str = "f") -> list[str]:
    return [f"{name}={{{split}_{METRICS[name]}:{form}}}" for name in names]


def module(random: Random) -> Program:
    """Also FeedForward before 0.9, whose Speedometer has a line for each metric, and Perl."""
    names, word = some(random), random.choice(("Epoch",) * 4 + ("Iteration",))
    batch_word = "Iter" if word == "Iteration" else word
    style, has_train = random.choice(("range", "one line", "line each", "speed")), random.random() < 0.8
    validates, resets = random.random() < 0.8, random.random() < 0.3

    def epoch(number: int) -> list[Print]:
        lines = [f"Train-{field}" for field in fields("train", names)] if has_train else []
        lines += ["Time cost={seconds:s3}"]
        lines += [f"Validation-{field}" for field in fields("validation", names)] if validates else []
        if resets:
            lines.insert(0, "Resetting Data Iterator")
        prints = [said(random, f"{word}[{number}] {line}", timed="Reset" not in line) for line in lines]
        prints.insert(-1, Print(f'Saved checkpoint to "m-{number + 1:04}.params"'))
        return [each for batch in (10, 20) for each in batches(number, batch)] + prints

    def batches(number: int, batch: int) -> list[Print]:
        head = f"{batch_word}[{number}] Batch [{f'{batch - 10}-{batch}' if style == 'range' else batch}]\tSpeed: "
        head += "{:s2} samples/sec"
        if style == "line each":
            return [said(random, f"{head}\tTrain-{field}", batch) for field in fields("train", names)]
        shown = "" if style == "speed" else "".join(f"\t{field}" for field in fields("train", names))
        return [said(random, head + shown, batch)]

    opening = ["start with arguments Namespace(batch_size=128, network='resnet')"][: random.randint(0, 1)]
    noise = ("Already bound, ignoring bind()", "Batch:      10 fc1_weight                     0.0541", "lr=0.1")
    most = 3 if has_train or style == "speed" else 1  # of several workers' batch lines one counts
    return Program(epoch, opening, tag="Node[{}] ", noise=noise, elapsed=True, most_workers=most)


def scala(random: Random) -> Program:
    """Milliseconds, and numbers as Java prints a float."""
    package = random.choice(("org.apache.mxnet", "ml.dmlc.mxnet"))
    ((train,), (test,)) = (
        fields(split, [random.choice(("accuracy", "mse"))], "java") for split in ("train", "validation")
    )
    has_train = random.random() < 0.7

    def epoch(number: int) -> list[Print]:
        head = f"2016-02-03 12:{number:02}:00,123 [main] [{package}.FeedForward] [INFO] - Epoch[{number}]"
        batches = [f"{head} Batch [{batch}]\tSpeed: {{:s2}} samples/sec\tTrain-{train}" for batch in (50, 100)]
        prints = [said(random, line, batch) for batch, line in enumerate(batches, 1)]
        prints += [said(random, f"{head} Train-{train}")] if has_train else []
        cost = random.randint(1, 4_000_000)
        prints.append(Print(f"{head} Time cost={cost}", {"seconds": cost / 1000}))
        return [*prints, said(random, f"{head} Validation-{test}")]

    return Program(epoch, [f"Start training with cpu(0) ({package})"], prefixes="none")


def r(random: Random) -> Program:
    names, validates = [random.choice(("accuracy", "rmse", "mae"))], random.random() < 0.7

    def epoch(number: int) -> list[Print]:
        prints = [Print(f"Batch [{batch}] Train-{names[0]}={draw(random):.15g}") for batch in (100, 200)]
        prints.append(said(random, f"[{number}] Train-{fields('train', names, 'r')[0]}"))
        if validates:
            prints.append(said(random, f"[{number}] Validation-{fields('validation', names, 'r')[0]}"))
        return prints

    return Program(epoch, ["Start training with 1 devices"], first=1, prefixes="none")


def gluon(random: Random) -> Program:
    """example/gluon of MXNet."""
    names, old = some(random, 1, 2), random.random() < 0.5
    train, test = (", ".join(fields(split, names)) for split in ("train", "validation"))
    training, validation = ("Training", "Validation") if old else ("training", "validation")

    def epoch(number: int) -> list[Print]:
        if old:
            prints = [
                Print(said(random, f"[Epoch {number} Batch {batch}] Training: {train}").text) for batch in (0, 50)
            ]
        else:
            head = f"Epoch[{number}] Batch [%d]\tSpeed: {{:s6}} samples/sec\t{train}"
            prints = [said(random, head % batch, batch) for batch in (1, 50)]
        lines = (f"{training}: {train}", "time cost: {seconds:s6}", f"{validation}: {test}")
        return prints + [said(random, f"[Epoch {number}] {line}") for line in lines]

    return Program(epoch, elapsed=True)


def gluoncv_imagenet(random: Random) -> Program:
    """train_imagenet.py; with mixup its training metric is rmse. train_recognizer.py of videos has its own line."""
    name, video = random.choice(("accuracy", "rmse")), random.random() < 0.3

    def epoch(number: int) -> list[Print]:
        head = f"Epoch[{number}] Batch [%d]\tSpeed: {{:s6}} samples/sec\t{name}={{train_{name}:f}}\tlr={{:share}}"
        prints = [said(random, head % batch, batch) for batch in (49, 99)]
        tested = "acc-top1={validation_accuracy:share} acc-top5={validation_top_k_accuracy_5:share}"
        if not video:
            tested = "err-top1={validation_err_top1:share} err-top5={validation_err_top5:share}"
        lines = [
            f"training: {name}={{train_{name}:f}}" + "\t loss={train_loss:f}" * video,
            "speed: {speed:whole} samples/sec\ttime cost: {seconds:s6}",
            f"validation: {tested}" + " loss={validation_loss:share}" * video,
        ]
        prints += [said(random, f"[Epoch {number}] {line}") for line in lines]
        values = dict(prints[-1].values)
        for error, accuracy in (("err_top1", "accuracy"), ("err_top5", "top_k_accuracy_5")):
            if not video:
                values[f"validation_{accuracy}"] = 1 - values[f"validation_{error}"]
        return [*prints[:-1], prints[-1]._replace(values=values)]

    return Program(epoch, ["Namespace(batch_size=128, mode='hybrid', model='resnet50_v1')"], elapsed=True)


def gluoncv_cifar(random: Random) -> Program:
    """train_cifar10.py: accuracies that rise, as trained ones do."""

    def epoch(number: int) -> list[Print]:
        train = round(1 - 0.6 / (number + 1) ** 0.5 + random.uniform(0, 0.02), 6)
        rest = said(random, " loss={train_loss:share} time: {seconds:s6}")
        values = {"train_accuracy": train, "validation_accuracy": round(train - 0.05, 6), **rest.values}
        return [Print(f"[Epoch {number}] train={train:f} val={train - 0.05:f}{rest.text}", values, timed=True)]

    return Program(epoch, elapsed=True)


def gluoncv_detection(random: Random) -> Program:
    """train_ssd.py, train_yolo3.py, train_faster_rcnn.py: a validation of many lines, in COCO's form, too."""
    names = random.choice(
        (("CrossEntropy", "SmoothL1"), ("ObjLoss", "BoxCenterLoss"), ("RPN_Conf", "RCNN_CrossEntropy"))
    )
    form, tests_each = random.choice(("s3", "s6")), random.randint(1, 2)
    losses = ", ".join(f"{name}={{train_{name.lower()}:{form}}}" for name in names)
    classes = random.sample(("aeroplane", "bus", "train", "person", "diningtable", "tvmonitor"), 2)
    tested = "".join(f"{name}={{validation_{name}:long}}\n" for name in classes) + "mAP={validation_map:long}"
    if random.random() < 0.3:
        tested = "~~~~ Summary metrics ~~~~\n= Average Precision (AP) @[ IoU=0.50:0.95 ] = 0.269\n"
        tested += "~~~~ MeanAP @ IoU=[0.50,0.95] ~~~~\n={validation_map:percent}"

    def epoch(number: int) -> list[Print]:
        batches = [f"[Epoch {number}][Batch {n}], Speed: {{:s3}} samples/sec, {losses}" for n in (49, 99)]
        prints = [said(random, line, batch) for batch, line in enumerate(batches, 1)]
        prints.append(said(random, f"[Epoch {number}] Training cost: {{seconds:{form}}}, {losses}"))
        return prints + [said(random, f"[Epoch {number}] Validation: \n{tested}")] * (number % tests_each == 0)

    return Program(epoch, ["Start training from [Epoch {first}]"], elapsed=True)


def horovod_mnist(random: Random) -> Program:
    tested = "Validation: accuracy={validation_accuracy:f}"

    def epoch(number: int) -> list[Print]:
        return [
            said(random, f"[Epoch {number} Batch 100] Training: accuracy={{:f}}", timed=False),
            said(random, f"Epoch[{number}]\tSpeed={{speed:s2}} samples/s\tTime cost={{seconds:s6}}"),
            said(random, f"Epoch[{number}]\tTrain: accuracy={{train_accuracy:f}}\t{tested}"),
        ]

    return Program(epoch, elapsed=True)


def horovod_imagenet(random: Random) -> Program:
    """Each rank prints its line of the epoch; validation is rank 0's or every rank's."""
    validates = random.choice(("{tag}", ""))
    tested = "\tValidation-accuracy={validation_accuracy:f}" + random.choice(("", " " * 25))
    tested += "\tValidation-top_k_accuracy_5={validation_top_k_accuracy_5:f}"

    def epoch(number: int) -> list[Print]:
        head = f"Epoch[{number}] "
        return [
            said(random, head + "{tag}Batch[400]\taccuracy={train_accuracy:f}\tlr={:share}", batch=400),
            said(random, head + "Batch[400]\tSpeed: {:s2} samples/sec", timed=False, tagged=False),
            said(random, head + "{tag}Batch[625]\tTime cost={seconds:s2}\tTrain-accuracy={train_accuracy:f}"),
            said(random, (head + validates).strip() + tested, tagged=bool(validates)),
        ]

    return Program(epoch, tag="Rank[{}] ", prefixes="none")


def dmltrain(random: Random) -> Program:
    names = {"accuracy": "accuracy", "cross-entropy": "cross_entropy", "top_k_accuracy_5": "top_k_accuracy_5"}

    def epoch(number: int) -> list[Print]:
        batch = {name: round(random.uniform(0.01, 5), 6) for name in names}
        known = {f"train_{key}": batch[name] for name, key in names.items()}
        prints = [Print(record.batch(number, 10, random.uniform(1, 9000), batch), batch=(10, known))]
        facts = {f"Train-{name}": (f"train_{key}", random.uniform(0.01, 5)) for name, key in names.items()}
        facts |= {"Time cost": ("seconds", random.uniform(1, 900)), "Speed": ("speed", random.uniform(1, 9000))}
        facts |= {
            "Memory": ("memory", random.uniform(1, 9000)),
            "Device-Memory": ("device_memory", random.uniform(1, 9)),
        }
        facts |= {"Received": ("received", random.randrange(10**12))}
        facts |= {"Sent": ("sent", random.randrange(10**12)), "Staleness": ("staleness", float(random.randint(0, 9)))}
        facts |= {"Learning-rate": ("learning_rate", 10 ** random.uniform(-7, 0))}
        facts |= {f"Validation-{name}": (f"validation_{key}", random.uniform(0.01, 5)) for name, key in names.items()}
        for name, (key, value) in facts.items():
            line = record.value(number, name, value)
            prints.append(Print(line, {key: float(line.partition("=")[2])}, timed=True))
        spent = {name: round(random.uniform(0, 9), 3) for name in record.COMMUNICATION}
        keys = {name.replace("-", "_"): value for name, value in spent.items()}
        used = record.usage(number, {name: random.uniform(0, 9000) for name in record.USAGE})
        shown = {f"usage_{each[1].replace('-', '_')}": float(each[2]) for each in _USED.finditer(used)}
        return [*prints, Print(record.communication(number, spent), keys, timed=True), Print(used, shown, timed=True)]

    opening, noise = ["Training epochs 0 to 9, 391 batches each"], ("Step[700] Validation-accuracy=0.512000",)
    return Program(epoch, opening, tag="Node[{}] ", noise=noise, elapsed=True)


VERSIONS = (
    *(module, module, module, scala, r, gluon, gluoncv_imagenet, gluoncv_cifar, gluoncv_detection),
    *(horovod_mnist, horovod_imagenet, dmltrain),
)


def program(random: Random) -> Program:
    return random.choice(VERSIONS)(random)
