"""The experiment file: what it means, and the error for each mistake with its line; expressions."""

from pathlib import Path

import pytest

from dmltrain.base.errors import UserError
from dmltrain.experiment.plan import expression
from dmltrain.experiment.plan.cell import Cell, cells
from dmltrain.experiment.plan.expression import as_text, filled, found_in, names_in
from dmltrain.experiment.plan.file import load, parse
from dmltrain.options import FLAGS


def made(text: str, small: bool = False, flags=FLAGS) -> list[Cell]:
    return list(cells(parse(text.encode(), Path("x.yaml"), small), flags).all)


def ids(text: str, small: bool = False) -> list[str]:
    return [each.id for each in made(text, small)]


PROGRAM = "program: train.py\n"
WHOLE = f"""{PROGRAM}
title: Ten
launch: {{workers: 1, servers: 0, args: [--wire, plain, 3]}}
options: {{num_epochs: 12, devices: "cpu:{{devices}}", lr: 0.05 * devices}}
grid: {{num-layers: [50, 110], devices: [1, 2, 4]}}
where: devices * num_layers <= 200
seeds: [0, 1]
time-limit: 60
small: {{grid: {{devices: [1, 2]}}, options: {{num-epochs: 2, lr: 0.1}}, launch: {{servers: 1}}, seeds: 7, where: ""}}
"""


def test_cells_in_their_order():
    found = made(WHOLE)
    assert [each.id for each in found][:5] == [
        *("num-layers=50,devices=1,seed=0", "num-layers=50,devices=2,seed=0", "num-layers=50,devices=4,seed=0"),
        *("num-layers=110,devices=1,seed=0", "num-layers=50,devices=1,seed=1"),
    ]
    assert len(found) == 8
    assert found[2].settings == {"num_layers": 50, "devices": 4, "seed": 0}
    assert " ".join(found[2].words) == "--num-epochs 12 --devices cpu:4 --lr 0.2 --num-layers 50 --seed 0"
    assert (found[2].workers, found[2].servers) == (1, 0)


def test_small_merges_options_and_replaces_the_grid():
    (first, second) = made(WHOLE, small=True)
    assert first.id == "devices=1,seed=7"
    assert " ".join(second.words) == "--num-epochs 2 --devices cpu:2 --lr 0.1 --seed 7"
    assert second.servers == 1
    experiment = parse(WHOLE.encode(), Path("x.yaml"), True)
    assert experiment.name == "x-small" and experiment.arguments == ("--wire", "plain", "3")
    assert experiment.small == (
        "2 cells (whole: 8); num-epochs 2 (whole: 12); devices cpu:1 or cpu:2 (whole: cpu:1 or cpu:2 or cpu:4); "
        "lr 0.1 (whole: 0.05 or 0.1 or 0.2); servers 1 (whole: 0); seed 7 (whole: 0 or 1); "
        "num-layers not given (whole: 50 or 110)"
    )


def test_zip_lists_of_grids_and_cells_that_are_the_same():
    text = PROGRAM + (
        "options: {batch-size: 128}\n"
        "grid:\n"
        "- zip: {kv_store: [local, dist_sync], workers: [1, 5]}\n"
        "- {kv-store: [dist_ssp], staleness: [0, 3]}\n"
        "- {kv-store: [dist_ssp], staleness: [3, 10], batch-size: [64]}\n"
        "- {kv-store: [dist_ssp], staleness: [0, 3]}\n"
    )
    found = made(text)
    assert [each.id for each in found] == [
        *("kv-store=local,workers=1", "kv-store=dist_sync,workers=5"),
        *("kv-store=dist_ssp,staleness=0", "kv-store=dist_ssp,staleness=3"),
        *("kv-store=dist_ssp,staleness=3,batch-size=64", "kv-store=dist_ssp,staleness=10,batch-size=64"),
    ]
    assert [each.workers for each in found] == [1, 5, 1, 1, 1, 1]
    assert [each.options["batch-size"] for each in found] == [128] * 4 + [64] * 2  # a fixed entry is a default
    assert cells(parse(text.encode(), Path("x.yaml")), FLAGS).merged == 2


def test_values_as_words_and_expressions():
    text = PROGRAM + (
        "options: {lr: 1e-3, wd: -0.5, data-dir: no, lr-step-epochs: '30,60', mom: null,\n"
        " add-stn: true, monitor: false, model-prefix: 'runs/{cell}', data-train: 'p{rank}.rec', disp-batches: 010}\n"
        "grid: {batch-size: [8]}"
    )
    assert made(text)[0].words == (
        *("--lr", "0.001", "--wd=-0.5", "--data-dir", "no", "--lr-step-epochs", "30,60", "--add-stn"),
        *("--model-prefix", "runs/batch-size=8", "--data-train", "p{rank}.rec", "--disp-batches", "10"),
        *("--batch-size", "8"),
    )
    text = PROGRAM + "grid: {lr: [0.05, 0.05 * devices], devices: [1, 2]}\noptions: {devices: 'cpu:{devices}'}\n"
    assert ids(text) == ["lr=0.05,devices=1", "lr=0.05,devices=2", "lr=0.1,devices=2"]
    # a foreign program gets every variable that is not set to null
    text = PROGRAM + "grid: {depth: [3], rule: [fast]}\noptions: {speed: 2 if rule == 'fast' else 1, rule: null}\n"
    assert made(text, flags=None)[0].words == ("--speed", "2", "--depth", "3")


def test_ids_are_safe_names_and_differ():
    text = PROGRAM + "grid: {network: ['a/b', 'a-b', 'a,b=c', '..', ä, '" + "n" * 300 + "']}\n"
    found = ids(text)
    assert len(set(found)) == 6 and all(len(each) <= 120 + 9 and each.isascii() and "/" not in each for each in found)
    assert found[1] == "network=a-b" and ids(PROGRAM) == ["cell"]
    assert found == ids(text)


AFTER_THE_PROGRAM = [
    ("opitons: {}", "2: opitons: unknown section, did you mean options?; valid: title"),
    ("title: [1]", "2: title: expected text"),
    ("options: 3", "2: options: expected a mapping"),
    ("options:\n  lr: [1, 2]", "3: options.lr: expected one value"),
    ("options:\n  num-epoch: 2", "3: options.num-epoch: train.py has no option --num-epoch, did you"),
    ("options:\n  num_epochs: 2\n  num-epochs: 3", "4: options.num-epochs: given twice, also as num_"),
    ("options:\n  lr: 1\n  lr: 2", "4: options.lr: given twice"),
    ("options: {lr: 'x{bad}'}", "2: options.lr: {bad}: no variable bad; the variables are cell"),
    ("grid:\n  lr: []", "3: grid.lr: the list is empty"),
    ("grid: []", "2: grid: the list is empty"),
    ("grid:\n  lr: [1, 2, 1]", "3: grid.lr: 1 is given twice"),
    ("grid:\n  lr: [[1]]", "3: grid.lr[0]: expected one value"),
    ("grid:\n  depth: [1]", "3: grid.depth: the variable depth has no effect: train.py has no option"),
    ("grid:\n  zip: {lr: [1], wd: [1, 2]}", "3: grid.zip: zipped lists need the same length: lr has 1"),
    ("grid: {lr: 1, zip: {lr: 1}}", "2: grid.zip: the variable lr is in this grid twice"),
    ("grid: {cell: 1}", "2: grid.cell: expected the name of a variable"),
    ("grid: {lr: wd, wd: 2 * mom, mom: lr}", "these variables need each other: lr -> wd -> mom -> lr"),
    ("grid: {lr: 1 / (wd - 1), wd: 1}", "2: grid.lr: 1 / (wd - 1): division by zero"),
    ("grid: [{lr: 1}, {wd: lr}]", "2: grid[1].wd: lr needs the variable lr, which this grid does not"),
    ("grid: [{lr: 1}, {wd: 2}]\noptions: {mom: lr / 2}", "3: options.mom: lr / 2 needs the variable"),
    ("where: lr >", "2: where: 'lr >' is no expression"),
    ("where: lr > 1", "2: where: lr is no variable: the variables are none"),
    ("grid: {lr: 1}\nwhere: lr > 1", "3: where: none of 1 combinations has lr > 1"),
    ("grid: {lr: 1}\nwhere: lr > 'a'", "3: where: lr > 'a': '>' not supported"),
    ("seeds: [0, 0]", "2: seeds[1]: 0 is given twice"),
    ("seeds: -1", "2: seeds[0]: expected a number"),
    ("seeds: 1\ngrid: {seed: [1]}", "2: seeds: the grid has a variable seed"),
    ("time-limit: 0", "2: time-limit: expected seconds above 0"),
    ("launch: {worker: 2}", "2: launch.worker: unknown name, did you mean workers?"),
    ("launch: {workers: two}", "2: launch.workers: two: expected a number of at least 1"),
    ("launch: {args: '-v'}", "2: launch.args: expected a list of words"),
    ("grid: {workers: [0]}", "expected a number of at least 1"),
    ("small: 1", "2: small: expected sections"),
    ("small: {columns: 1}", "2: small.columns: unknown section of small"),
    ("small: {options: {lr: [1]}}", "2: small.options.lr: expected one value"),
    ("plots: 3", "2: plots: expected a list"),
    ("transpose: 3", "2: transpose: expected true or false"),
    ("grid: {" + ", ".join(f"v{n}: [1, 2, 3, 4]" for n in range(40)) + "}", "combinations: expected at most"),
    ("a: &a [b, *a]", "more than"),
    (r'launch: {args: ["\0"]}', "2: invalid YAML: a text with NUL"),
    (r'options: {lr: "\uD800"}', "2: invalid YAML: a text with NUL or half a character"),
    ("grid: {" + ", ".join(f"v{n}: v{n + 1}" for n in range(101)) + "}", "101 variables: expected at most"),
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((PROGRAM + text, expected) for text, expected in AFTER_THE_PROGRAM),
        *(("", "1: expected sections such as"), ("- 1", "1: expected sections such as")),
        ("title: x", "1: program: missing"),
        (
            "a: &a [x, x]\n"
            + "".join(f"b{n}: &b{n} [{', '.join([f'*b{n - 1}' if n else '*a'] * 9)}]\n" for n in range(9)),
            "more than 20000 values",
        ),
        ("a: " + "[" * 100, "1: invalid YAML: more than 16 levels"),
        ("a: !!python/object:os.system x", "1: invalid YAML: unexpected tag tag:yaml.org,2002:python/object:os.sys"),
        ("a: {b", "1: invalid YAML: "),
        ("a: !!set {b}", "1: invalid YAML: unexpected tag"),
        *(("a: \x00", " invalid YAML: "), ("<<: {}", "1: merge keys"), ("[1]: 2", "1: a key is a list")),
        ("a: 1e999", "1: a: 1e999 is too large"),
        ("a: " + "x" * 200_000, "x.yaml is larger than 128 KiB"),
    ],
)
def test_mistakes(text, expected):
    with pytest.raises(UserError, match="^x.yaml") as error:
        made(text)
    assert expected in str(error.value)


def test_a_file_that_cannot_be_read_or_has_no_section_small(tmp_path):
    with pytest.raises(UserError, match="--small needs a section `small`"):
        parse(PROGRAM.encode(), Path("x.yaml"), True)
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(UserError, match="expected an experiment file"):
            load(path)
    with pytest.raises(UserError, match="not UTF-8 at byte 3"):
        parse(b"a: \xff", Path("x.yaml"))


def test_the_digest_changes_with_what_decides_the_cells_only():
    def digest(text: str) -> str:
        return parse((PROGRAM + text).encode(), Path("x.yaml")).digest

    same = {digest("grid: {lr: [1, 2]}\ntitle: a"), digest("# b\ncolumns: [lr]\ngrid:\n  lr: [1, 2]")}
    assert len(same) == 1
    for text in ("grid: {lr: [1, 3]}", "grid: {lr: [1, 2]}\nseeds: 1", "grid: {lr: [1, 2]}\nlaunch: {workers: 2}"):
        assert digest(text) not in same


def with_set(*words: str, small: bool = False):
    return parse(WHOLE.encode(), Path("x.yaml"), small, words)


def test_set_replaces_an_option_of_all_cells():
    found = with_set("num_epochs=3", "--servers=2", "lr=0.2 * devices", "wd=1e-4", "data-dir='7'")
    first = cells(found, FLAGS).all[0]
    expected = "--num-epochs 3 --devices cpu:1 --lr 0.2 --wd 0.0001 --data-dir 7 --num-layers 50 --seed 0"
    assert " ".join(first.words) == expected
    assert first.servers == 2 and found.digest != with_set().digest
    assert with_set("num-epochs=3").changed == "num-epochs 3 (in the file: 12)"
    small = with_set("num-epochs=3", "lr=", small=True)
    assert small.changed == "num-epochs 3 (in the file: 2); lr not given (in the file: 0.1)"
    assert "num-epochs 2 (whole: 12)" in small.small
    assert "gpu:1 or gpu:2 or gpu:4 (in the file: cpu:1 or cpu:2 or cpu:4)" in with_set("devices=gpu:{devices}").changed
    assert with_set("num-epochs=12").changed == "" and with_set("num-epochs=12").digest == with_set().digest


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("num-epochs", "--set num-epochs: expected NAME=VALUE, such as --set num-epochs=3"),
        *(("=3", "--set =3: expected NAME=VALUE"), ("devices=3", "devices varies in"), ("seed=3", "seed varies")),
        ("lr=[1, 2]", "--set lr=[1, 2]: expected one value"),
        ("lr=[1", "--set lr=[1:1: invalid YAML"),
        ("lr=cpu:{device}", "--set lr: {device}: no variable device"),
        ("num-epoch=3", "--set num-epoch: train.py has no option --num-epoch, did you mean num-epochs?"),
        ("workers=0", "--set workers: 0: expected a number of at least 1"),
    ],
)
def test_a_mistake_in_set(word, expected):
    with pytest.raises(UserError) as error:
        cells(with_set(word), FLAGS)
    assert expected in str(error.value)


# -- a file that extends another one -----------------------------------------------------------------------------------


@pytest.fixture
def extending(tmp_path):
    """Makes the file below/own.yaml, which extends base.yaml, and loads it."""

    def load_with(own, base=WHOLE):
        (tmp_path / "base.yaml").write_text(base)
        (tmp_path / "below").mkdir(exist_ok=True)
        (tmp_path / "below" / "own.yaml").write_text("extends: ../base.yaml\n" + own)
        return load(tmp_path / "below" / "own.yaml")

    return load_with


def test_what_a_file_does_not_say_is_that_of_the_one_it_extends(extending):
    found = extending("title: Mine\nwhere: null\noptions: {num-epochs: 1, mom: 0}\ngrid: {devices: [8]}\nseeds: 3")
    assert (found.name, found.program, found.title, found.where) == ("own", "../train.py", "Mine", "")
    assert [each.id for each in cells(found, FLAGS).all] == ["devices=8,seed=3"]
    assert found.options == {"devices": "cpu:{devices}", "lr": "0.05 * devices", "num-epochs": 1, "mom": 0}
    assert found.launch == {"workers": 1, "servers": 0} and found.arguments == ("--wire", "plain", "3")
    assert found.time_limit == 60


def test_paths_stay_relative_to_the_file_that_names_them_and_dashes_do_not_matter(extending, tmp_path):
    base = "program: ~/train.py\nlaunch: {hosts: racks/hosts}\n"
    found = extending("", base)
    assert (found.program, found.launch["hosts"]) == ("~/train.py", "../racks/hosts")
    found = extending("program: own.py\nlaunch: {hosts: hosts}", base)
    assert (found.program, found.launch["hosts"]) == ("own.py", "hosts")
    found = extending("time_limit: 7\noptions: {--num_epochs: 2}")
    assert found.time_limit == 7 and found.options["num-epochs"] == 2 and len(found.options) == 3
    with pytest.raises(UserError, match="--small needs a section `small`"):  # that of the other is not taken over
        load(tmp_path / "below" / "own.yaml", make_small=True)


@pytest.mark.parametrize(
    "own, base, expected",
    [
        ("seeds: 0", PROGRAM + "\noptions: {lr: [1]}", r"base\.yaml:3: options\.lr: expected one value"),
        ("options: {lr: [1]}", PROGRAM + "\noptions: {mom: 0}", r"own\.yaml:2: options\.lr: expected one value"),
        ("options: {lr: 1}", PROGRAM + "\noptions: {mom: [0]}", r"base\.yaml:3: options\.mom: expected one value"),
        ("", "- 1", r"base\.yaml:1: expected sections"),
        ("", "extends: none.yaml", r"base\.yaml:1: extends: .*none\.yaml: No such file"),
        ("", "extends: below/own.yaml", r"extends: more than 4 files"),
        ("", "extends: [1]", r"base\.yaml:1: extends: expected the path of a file"),
    ],
)
def test_mistakes_are_those_of_the_file_where_they_stand(extending, own, base, expected):
    with pytest.raises(UserError, match=expected):
        extending(own, base)


# Expressions: what they compute, what is text, and what is refused


VARIABLES = frozenset({"devices", "workers", "kv_store"})
VALUES = {"devices": 4, "workers": 2, "kv_store": "dist_sync"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("0.05 * devices", "0.2"), ("0.1 * 3 * workers", "0.6"), ("512 // workers", "256"), ("512 / workers", "256")),
        *(("devices ** 2 - 1", "15"), ("-devices % 3", "2")),
        ("'local' if workers == 1 else kv_store", "dist_sync"),
        ("kv_store in ['dist_sync', 'local'] and devices > workers > 1", "true"),
        *(("not devices", "false"), ("workers not in (2, 3) or null", "null"), ("min(devices, workers, 3)", "2")),
        *(("round(devices / 3, 2)", "1.33"), ("int(devices / 3)", "1"), ("2 ** 0.5 * workers", "2.82842712475")),
        ("True if devices else None", "true"),
    ],
)
def test_values(text, value):
    assert as_text(expression.parse(text).value(VALUES)) == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("devices / (workers - 2)", "division by zero"),
        ("kv_store * 2", "expected a number, found 'dist_sync'"),
        ("'a' * 1000000000", "expected a number"),
        ("(devices > 1) + 1", "expected a number, found True"),
        *(("9 ** 9 ** 9", "no number below 1e300"), ("10.0 ** 299 * 100", "no number below 1e300")),
        ("(-devices) ** 0.5", "1e300"),
        ("devices < kv_store", "not supported between"),
        *(("devices in workers", "needs a list"), ("[devices]", "its value is a list"), ("max()", "max")),
        ("nothing + 1", "nothing has no value"),
    ],
)
def test_without_a_value(text, expected):
    with pytest.raises(UserError) as error:
        expression.parse(text).value(VALUES)
    assert text in str(error.value) and expected in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        *("__import__('os')", "devices.real", "[d for d in devices]", "lambda: 1", "devices[0]", "f'{devices}'"),
        *("abs(devices)", "min(key=devices)", "(devices := 3)", "devices and", "", "b'1'", "1j", "min", "devices @ 2"),
        *("1e400", "9" * 30, "-" * 200 + "1", "(" * 300 + "1", "1 + " * 200 + "1"),
        *("devices is None", "*devices", "{1}"),
    ],
)
def test_refused(text):
    try:
        made = expression.parse(text)
    except UserError as error:
        assert str(error)
    else:
        assert text == "min" and made.names == {"min"}  # a name like any other


def test_a_text_is_an_expression_only_if_all_its_names_are_variables():
    for text in ("resnet", "dist_sync", "0.05", "2 * 3", "devices-x", "cpu:{devices}", "data/x.rec", "", "null"):
        assert found_in(text, VARIABLES) is None, text
    assert found_in(3, VARIABLES) is None
    assert found_in("kv_store", VARIABLES).names == {"kv_store"}


def test_braces():
    assert names_in("cpu:{devices}-{workers * 2}", VARIABLES) == {"devices", "workers"}
    assert filled("cpu:{devices}-{workers * 2}", VALUES) == "cpu:4-4"
    assert filled("part-{rank}.rec {{x}} {} {a b}", VALUES) == "part-{rank}.rec {x} {} {a b}"
    with pytest.raises(UserError, match="no variable device; .*devices, kv_store, workers"):
        names_in("cpu:{device}", VARIABLES)
