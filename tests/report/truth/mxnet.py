"""MXNet's programs: base_module.py's fit of all versions, Scala, Perl, R, gluon, gluoncv, Horovod, and dmltrain."""

from collections.abc import Callable
from random import Random

from dmltrain import record
from tests.report.truth.known import METRICS, Print, Program, Values, draw, some


def _six(random: Random) -> tuple[str, float]:
    text = f"{draw(random):f}"
    return text, float(text)


def _of(split: str, names: list[str], random: Random, form: Callable[[Random], tuple[str, float]] = _six) -> list:
    """(name, text, values) of each metric."""
    drawn = [(name, *form(random)) for name in names]
    return [(name, text, {f"{split}_{METRICS[name]}": number}) for name, text, number in drawn]


def _joined(values: list) -> Values:
    return {key: number for _, _, each in values for key, number in each.items()}


def _speed(random: Random) -> str:
    return f"{random.uniform(1, 5000):.2f} samples/sec"


def module(random: Random) -> Program:
    """Also FeedForward before 0.9, whose Speedometer has a line for each metric, and Perl."""
    names, word = some(random), random.choice(("Epoch",) * 4 + ("Iteration",))
    batch_word = "Iter" if word == "Iteration" else word
    style, has_train = random.choice(("range", "one line", "line each", "speed")), random.random() < 0.8
    validates, resets = random.random() < 0.8, random.random() < 0.3

    def epoch(number: int) -> list[Print]:
        prints = []
        for batch in (10, 20):
            values = _of("train", names, random)
            head = f"{batch_word}[{number}] Batch [{f'{batch - 10}-{batch}' if style == 'range' else batch}]\tSpeed: "
            if style == "speed":
                prints.append(Print(head + _speed(random)))
            elif style == "line each":
                for name, text, value in values:
                    prints.append(Print(f"{head}{_speed(random)}\tTrain-{name}={text}", batch=(batch, value)))
            else:
                shown = "".join(f"\t{name}={text}" for name, text, _ in values)
                prints.append(Print(head + _speed(random) + shown, batch=(batch, _joined(values))))
        if resets:
            prints.append(Print(f"{word}[{number}] Resetting Data Iterator"))
        for name, text, value in _of("train", names, random) if has_train else ():
            prints.append(Print(f"{word}[{number}] Train-{name}={text}", value, timed=True))
        seconds = f"{random.uniform(0.01, 4000):.3f}"
        prints.append(Print(f"{word}[{number}] Time cost={seconds}", {"seconds": float(seconds)}, timed=True))
        prints.append(Print(f'Saved checkpoint to "m-{number + 1:04}.params"'))
        for name, text, value in _of("validation", names, random) if validates else ():
            prints.append(Print(f"{word}[{number}] Validation-{name}={text}", value, timed=True))
        return prints

    opening = ["start with arguments Namespace(batch_size=128, network='resnet')"][: random.randint(0, 1)]
    noise = ("Already bound, ignoring bind()", "Batch:      10 fc1_weight                     0.0541", "lr=0.1")
    most = 3 if has_train or style == "speed" else 1  # of several workers' batch lines one counts
    return Program(epoch, opening, tag="Node[{}] ", noise=noise, elapsed=True, most_workers=most)


def scala(random: Random) -> Program:
    """Milliseconds, and numbers as Java prints a float."""
    package, name = random.choice(("org.apache.mxnet", "ml.dmlc.mxnet")), random.choice(("accuracy", "mse", "rmse"))
    has_train = random.random() < 0.7

    def java(random: Random) -> tuple[str, float]:
        number = draw(random) if random.random() < 0.9 else 9.765625e-4
        text = repr(float(f"{number:.8g}")).replace("e-0", "E-").replace("e-", "E-").replace("nan", "NaN")
        return text.replace("inf", "Infinity"), float(text.replace("E", "e"))

    def epoch(number: int) -> list[Print]:
        stamp = f"2016-02-03 12:{number:02}:00,123 [main] [{package}.FeedForward] [INFO] - "
        prints = []
        for batch in (50, 100):
            ((_, text, values),) = _of("train", [name], random, java)
            line = f"{stamp}Epoch[{number}] Batch [{batch}]\tSpeed: {_speed(random)}\tTrain-{name}={text}"
            prints.append(Print(line, batch=(batch, values)))
        if has_train:
            ((_, text, values),) = _of("train", [name], random, java)
            prints.append(Print(f"{stamp}Epoch[{number}] Train-{name}={text}", values))
        cost = random.randint(1, 4_000_000)
        prints.append(Print(f"{stamp}Epoch[{number}] Time cost={cost}", {"seconds": cost / 1000}))
        ((_, text, values),) = _of("validation", [name], random, java)
        return [*prints, Print(f"{stamp}Epoch[{number}] Validation-{name}={text}", values)]

    return Program(epoch, [f"Start training with cpu(0) ({package})"], prefixes="none")


def r(random: Random) -> Program:
    name = random.choice(("accuracy", "rmse", "mae"))
    validates = random.random() < 0.7

    def digits(random: Random) -> tuple[str, float]:
        text = f"{draw(random):.15g}"
        return text.replace("nan", "NaN").replace("inf", "Inf"), float(text)

    def epoch(number: int) -> list[Print]:
        ((_, text, values),) = _of("train", [name], random, digits)
        prints = [Print(f"Batch [{batch}] Train-{name}={digits(random)[0]}") for batch in (100, 200)]
        prints.append(Print(f"[{number}] Train-{name}={text}", values))
        if validates:
            ((_, text, values),) = _of("validation", [name], random, digits)
            prints.append(Print(f"[{number}] Validation-{name}={text}", values))
        return prints

    return Program(epoch, ["Start training with 1 devices"], first=1, prefixes="none")


def gluon(random: Random) -> Program:
    """example/gluon of MXNet."""
    names, old = some(random, 2, 2) if random.random() < 0.7 else some(random, 1, 1), random.random() < 0.5
    training, validation = ("Training", "Validation") if old else ("training", "validation")

    def epoch(number: int) -> list[Print]:
        prints = []
        for batch in (0, 50):
            values = _of("train", names, random)
            shown = ", ".join(f"{name}={text}" for name, text, _ in values)
            head = f"[Epoch {number} Batch {batch}] Training: " if old else f"Epoch[{number}] Batch [{batch}]\tSpeed: "
            batched = (0, {}) if old else (batch + 1, _joined(values))
            prints.append(
                Print(head + ("" if old else f"{random.uniform(1, 900):f} samples/sec\t") + shown, batch=batched)
            )
        values, tested, seconds = (
            _of("train", names, random),
            _of("validation", names, random),
            f"{random.uniform(1, 99):f}",
        )
        shown = ", ".join(f"{name}={text}" for name, text, _ in values)
        prints.append(Print(f"[Epoch {number}] {training}: {shown}", _joined(values), timed=True))
        prints.append(Print(f"[Epoch {number}] time cost: {seconds}", {"seconds": float(seconds)}, timed=True))
        shown = ", ".join(f"{name}={text}" for name, text, _ in tested)
        return [*prints, Print(f"[Epoch {number}] {validation}: {shown}", _joined(tested), timed=True)]

    return Program(epoch, elapsed=True)


def gluoncv_imagenet(random: Random) -> Program:
    """train_imagenet.py; with mixup its training metric is rmse. train_recognizer.py of videos has its own line."""
    name, video = random.choice(("accuracy", "rmse")), random.random() < 0.3

    def epoch(number: int) -> list[Print]:
        prints = []
        for batch in (49, 99):
            ((_, text, values),) = _of("train", [name], random)
            rate = f"{random.uniform(0, 0.4):f}"
            head = f"Epoch[{number}] Batch [{batch}]\tSpeed: {random.uniform(1, 900):f} samples/sec\t"
            prints.append(Print(f"{head}{name}={text}\tlr={rate}", batch=(batch, values)))
        ((_, text, values),) = _of("train", [name], random)
        loss, speed, seconds = _six(random), random.randint(1, 9000), f"{random.uniform(1, 9999):f}"
        more = f"\t loss={loss[0]}" if video else ""
        values |= {"train_loss": loss[1]} if video else {}
        prints.append(Print(f"[Epoch {number}] training: {name}={text}{more}", values, timed=True))
        facts = {"speed": float(speed), "seconds": float(seconds)}
        prints.append(Print(f"[Epoch {number}] speed: {speed} samples/sec\ttime cost: {seconds}", facts, timed=True))
        top1, top5, loss = (f"{random.uniform(0, 1):f}" for _ in range(3))
        if video:
            shown = f"acc-top1={top1} acc-top5={top5} loss={loss}"
            tested = {"validation_accuracy": float(top1), "validation_top_k_accuracy_5": float(top5)}
            tested["validation_loss"] = float(loss)
        else:
            shown = f"err-top1={top1} err-top5={top5}"
            tested = {"validation_err_top1": float(top1), "validation_accuracy": 1 - float(top1)}
            tested |= {"validation_err_top5": float(top5), "validation_top_k_accuracy_5": 1 - float(top5)}
        return [*prints, Print(f"[Epoch {number}] validation: {shown}", tested, timed=True)]

    return Program(epoch, ["Namespace(batch_size=128, mode='hybrid', model='resnet50_v1')"], elapsed=True)


def gluoncv_cifar(random: Random) -> Program:
    """train_cifar10.py: accuracies that rise, as trained ones do."""

    def epoch(number: int) -> list[Print]:
        train = 1 - 0.6 / (number + 1) ** 0.5 + random.uniform(0, 0.02)
        texts = [f"{each:f}" for each in (train, train - 0.05, random.uniform(0.1, 2), random.uniform(1, 99))]
        values = dict(
            zip(("train_accuracy", "validation_accuracy", "train_loss", "seconds"), map(float, texts), strict=True)
        )
        line = "[Epoch {}] train={} val={} loss={} time: {}".format(number, *texts)
        return [Print(line, values, timed=True)]

    return Program(epoch, elapsed=True)


def gluoncv_detection(random: Random) -> Program:
    """train_ssd.py, train_yolo3.py, train_faster_rcnn.py: a validation of many lines, in COCO's form, too."""
    names = random.choice(
        (("CrossEntropy", "SmoothL1"), ("ObjLoss", "BoxCenterLoss"), ("RPN_Conf", "RCNN_CrossEntropy"))
    )
    keys = {"CrossEntropy": "crossentropy", "SmoothL1": "smoothl1", "ObjLoss": "objloss"}
    keys |= {"BoxCenterLoss": "boxcenterloss", "RPN_Conf": "rpn_conf", "RCNN_CrossEntropy": "rcnn_crossentropy"}
    places, coco, tests_each = random.choice((3, 6)), random.random() < 0.3, random.randint(1, 2)
    classes = random.sample(("aeroplane", "bus", "train", "person", "diningtable", "tvmonitor"), 2)

    def epoch(number: int) -> list[Print]:
        prints = []
        for batch in (49, 99):
            losses = [f"{random.uniform(0, 9):.{places}f}" for _ in names]
            shown = ", ".join(f"{name}={text}" for name, text in zip(names, losses, strict=True))
            line = f"[Epoch {number}][Batch {batch}], Speed: {random.uniform(1, 99):.3f} samples/sec, {shown}"
            values = {f"train_{keys[name]}": float(text) for name, text in zip(names, losses, strict=True)}
            prints.append(Print(line, batch=(batch, values)))
        seconds = f"{random.uniform(1, 9000):.{places}f}"
        losses = [f"{random.uniform(0, 9):.{places}f}" for _ in names]
        shown = ", ".join(f"{name}={text}" for name, text in zip(names, losses, strict=True))
        values = {f"train_{keys[name]}": float(text) for name, text in zip(names, losses, strict=True)}
        line = f"[Epoch {number}] Training cost: {seconds}, {shown}"
        prints.append(Print(line, {"seconds": float(seconds)} | values, timed=True))
        if number % tests_each:
            return prints
        average = f"{random.uniform(0, 99):.1f}" if coco else repr(random.uniform(0, 1))
        if coco:
            parts, tested = ["~~~~ Summary metrics ~~~~\n= Average Precision (AP) @[ IoU=0.50:0.95 ] = 0.269"], {}
        else:
            drawn = [(name, repr(random.uniform(0, 1))) for name in classes]
            parts = [f"{name}={text}" for name, text in drawn]
            tested = {f"validation_{name}": float(text) for name, text in drawn}
            tested = {"validation_train": tested.pop("validation_train"), **tested} if "train" in classes else tested
        parts.append(f"~~~~ MeanAP @ IoU=[0.50,0.95] ~~~~\n={average}" if coco else f"mAP={average}")
        tested |= {"validation_map": float(average)}
        return [*prints, Print(f"[Epoch {number}] Validation: \n" + "\n".join(parts), tested, timed=True)]

    return Program(epoch, ["Start training from [Epoch {first}]"], elapsed=True)


def horovod_mnist(random: Random) -> Program:
    def epoch(number: int) -> list[Print]:
        train, test, seconds, speed = (
            _six(random),
            _six(random),
            f"{random.uniform(1, 99):f}",
            f"{random.uniform(1, 9000):.2f}",
        )
        facts = {"speed": float(speed), "seconds": float(seconds)}
        values = {"train_accuracy": train[1], "validation_accuracy": test[1]}
        return [
            Print(f"[Epoch {number} Batch 100] Training: accuracy={_six(random)[0]}"),
            Print(f"Epoch[{number}]\tSpeed={speed} samples/s\tTime cost={seconds}", facts, timed=True),
            Print(f"Epoch[{number}]\tTrain: accuracy={train[0]}\tValidation: accuracy={test[0]}", values, timed=True),
        ]

    return Program(epoch, elapsed=True)


def horovod_imagenet(random: Random) -> Program:
    """Each rank prints its line of the epoch; validation is rank 0's or every rank's."""
    continued, validates = random.choice(("", " " * 25)), random.choice(("{tag}", ""))  # every rank, or rank 0

    def epoch(number: int) -> list[Print]:
        text, seconds, tests = _six(random), f"{random.uniform(1, 9000):.2f}", [_six(random) for _ in range(2)]
        rate = f"{random.uniform(0, 1):f}"
        batch = _six(random)
        tested = {"validation_accuracy": tests[0][1], "validation_top_k_accuracy_5": tests[1][1]}
        end = f"Epoch[{number}] {{tag}}Batch[625]\tTime cost={seconds}\tTrain-accuracy={text[0]}"
        validation = f"Validation-accuracy={tests[0][0]}{continued}\tValidation-top_k_accuracy_5={tests[1][0]}"
        return [
            Print(
                f"Epoch[{number}] {{tag}}Batch[400]\taccuracy={batch[0]}\tlr={rate}",
                batch=(400, {"train_accuracy": batch[1]}),
            ),
            Print(f"Epoch[{number}] Batch[400]\tSpeed: {_speed(random)}", tagged=False),
            Print(end, {"seconds": float(seconds), "train_accuracy": text[1]}),
            Print(f"Epoch[{number}] {validates}".strip() + f"\t{validation}", tested, tagged=bool(validates)),
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
        facts |= {"Sent": ("sent", random.randrange(10**12)), "Staleness": ("staleness", float(random.randint(0, 9)))}
        facts |= {"Learning-rate": ("learning_rate", 10 ** random.uniform(-7, 0))}
        facts |= {f"Validation-{name}": (f"validation_{key}", random.uniform(0.01, 5)) for name, key in names.items()}
        for name, (key, number_) in facts.items():
            line = record.value(number, name, number_)
            prints.append(Print(line, {key: float(line.partition("=")[2])}, timed=True))
        spent = {name: round(random.uniform(0, 9), 3) for name in record.COMMUNICATION}
        keys = {name.replace("-", "_"): number for name, number in spent.items()}
        prints.append(Print(record.communication(number, spent), keys, timed=True))
        return prints

    opening = ["Training epochs 0 to 9, 391 batches each"]
    return Program(epoch, opening, tag="Node[{}] ", noise=("Step[700] Validation-accuracy=0.512000",), elapsed=True)


VERSIONS = (
    *(module, module, module, scala, r, gluon, gluoncv_imagenet, gluoncv_cifar, gluoncv_detection),
    *(horovod_mnist, horovod_imagenet, dmltrain),
)


def program(random: Random) -> Program:
    return random.choice(VERSIONS)(random)
