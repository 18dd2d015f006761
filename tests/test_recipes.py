"""--recipe: published recipes and files of one's own, between a program's defaults and its command line."""

import dataclasses
import os

import numpy as np
import pytest

from dmltrain import fit, options, recipes
from dmltrain.base.errors import UserError
from dmltrain.train.plan import plan_of, schedule_of
from tests.forked_job import run_forked

IMAGENET = {"dataset": "imagenet", "network": "resnet", "num_layers": 18, "lr_step_epochs": "30,60"}
PUBLISHED = (
    *("cifar10-94", "inception-v3-2016", "resnet50-2015"),
    *("resnet50-ffcv", "resnet50-ffcv-16", "resnet50-ffcv-40", "resnet50-strikes-back-a3"),
)


def parse(*words):
    return options.parse(words, "train", defaults=IMAGENET)


def test_recipes_that_are_listed_and_what_the_list_says_of_them(capsys):
    assert recipes.names() == sorted(PUBLISHED)
    with pytest.raises(SystemExit) as ended:
        fit.main(["--recipe", "list"], prog="train")
    shown = " ".join(capsys.readouterr().out.split())
    assert not ended.value.code
    for recipe in map(recipes.find, PUBLISHED):
        assert recipe.differs
        for text in (*map(recipe.text, recipes.TEXTS), *recipe.differs):
            assert text in shown and text != "not given"


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_is_what_its_options_on_the_command_line_are(name):
    spelled = [word for key, words in recipes.find(name).words.items() for word in (f"--{key}", *words)]
    found = parse("--recipe", name)
    without = dict(IMAGENET) if "--num-layers" in spelled else {**IMAGENET, "num_layers": None}
    assert dataclasses.replace(found, recipe=None) == options.parse(spelled, "train", defaults=without)
    assert f"recipe='{name}'" in str(found)


FFCV = {"resnet50-ffcv-16": (16, 11, 13), "resnet50-ffcv-40": (40, 29, 34), "resnet50-ffcv": (88, 65, 76)}


@pytest.mark.parametrize("name", FFCV)
def test_ffcvs_rates_and_sizes_are_those_of_its_program(name):
    """get_cyclic_lr, the interpolation in train_loop and get_resolution of its train_imagenet.py; its start_ramp and
    end_ramp."""
    (epochs, first, last), given, steps = FFCV[name], parse("--recipe", name), 5
    schedule = schedule_of(given, plan_of(given, steps, 8))
    at_epochs = np.interp(np.arange(epochs + 1), [0, 2, epochs], [1.7e-4, 1.7, 0.0])
    for epoch in range(epochs):
        expected = np.interp(np.arange(steps), [0, steps], at_epochs[epoch : epoch + 2])
        assert [schedule(epoch, step) for step in range(steps)] == pytest.approx(expected.tolist())
        pixels = int(np.round(np.interp(epoch, [first, last], [160, 192]) / 32)) * 32
        assert [shape for start, shape in given.image_stages if start <= epoch][-1] == (3, pixels, pixels)


def test_the_command_line_is_above_the_recipe_and_the_recipe_above_the_program(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("options:\n  lr: 0.5\n  wd: 1e-3\n  random_crop: true\n  image-shape: ['3,24,24:0', '3,32,32:3']\n")
    found = parse(f"--recipe={file}", "--wd", "0.25")
    assert (found.lr, found.wd, found.random_crop, found.num_layers) == (0.5, 0.25, True, 18)
    assert found.image_stages == ((0, (3, 24, 24)), (3, (3, 32, 32)))
    assert parse("--image-shape", "3,28,28", "--recipe", str(file)).image_stages == ()
    assert parse("--recipe", "resnet50-2015").num_layers == 50
    for words in (("--recipe", "resnet50-2015", "--network", "alexnet"), ("--recipe", "inception-v3-2016")):
        assert parse(*words).num_layers is None, "the depth is that of another network"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("options: {lr: fast}", ":1: options.lr: --lr: 'fast' is not a number"),
        ("options:\n  wd: 0\n  lr-polici: step", ":3: options.lr-polici: unknown option --lr-polici (did you"),
        ("options: {base-lr: 1}", "--base-lr: here its name is --lr; use --lr"),
        ("options: {recipe: resnet50-2015}", "a recipe cannot start from another one"),
        ("options: {no-wd-on: [norms, biases]}", "expected one value, not a list of 2"),
        ("options: {lr: }", "expected a number, a text, true, false, or a list"),
        ("lr: 1", "expected a recipe, with a section `options`"),
        ("options: {}\nresult: 1", ":2: result: unknown section; valid: source"),
        ("options: {lr-policy: step, min-lr: 0.01, lr-step-epochs: 2}", "gives --lr-policy, --min-lr; the command"),
    ],
)
def test_a_wrong_file(tmp_path, text, expected):
    file = tmp_path / "mine.yml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        parse("--recipe", str(file))
    assert expected in str(caught.value) and str(file) in str(caught.value)


def test_errors_name_the_recipes_options_that_are_not_on_the_command_line():
    for line, expected in (
        ("resnet50", "unknown recipe; valid: list, cifar10-94, "),
        ("none.yaml", "none.yaml: No such file or directory: expected a recipe"),
        ("resnet50-ffcv --backend mxnet", "does not support this: its loss is"),
        ("resnet50-ffcv --lr 1e-5", "(--recipe resnet50-ffcv gives --warmup-lr; the command line takes precedence)"),
    ):
        with pytest.raises(UserError) as caught:
            parse("--recipe", *line.split())
        assert expected in str(caught.value)


PROGRAM = """
import sys
from dmltrain import fit
for line in sys.argv[1:]:
    assert fit.main(line.split(), prog="train") == 0, line
"""


def test_each_starts(tmp_path):
    jpeg = pytest.importorskip("simplejpeg")
    pytest.importorskip("cv2")
    pixels = np.random.default_rng(0).integers(0, 255, (40, 48, 3), dtype=np.uint8)
    for number in range(4):
        folder = tmp_path / "images" / str(number % 2)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(jpeg.encode_jpeg(pixels))
    lines = []
    for name in PUBLISHED:
        words = [
            "--recipe",
            name,
            "--data-train images --data-val images --num-val-examples 2 --batch-size 2 --max-iter 2",
        ]
        words += ["--max-iter 1" if name.startswith("inception") else "--image-shape 3,28,28"]
        words += ["--val-image-shape 3,28,28"] if "val-image-shape" in recipes.find(name).words else []
        lines.append(" ".join(words))
    (tmp_path / "all.py").write_text(PROGRAM)
    code, log = run_forked(tmp_path, tmp_path / "all.py", *lines, environment=dict(os.environ))
    assert code == 0 and log.count("Validation-accuracy") >= len(PUBLISHED), log
