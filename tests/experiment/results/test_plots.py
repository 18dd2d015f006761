"""Plots of made logs: what is drawn, read from the figures; mistakes in their choices."""

import xml.etree.ElementTree as ElementTree

import pytest

from dmltrain.base.errors import UserError
from dmltrain.experiment.results.column import ColumnNames
from dmltrain.experiment.results.fault import Fault
from dmltrain.experiment.results.plots import KINDS, plots
from dmltrain.experiment.results.presentation import presentation
from tests.experiment.results import made

NAMES = ColumnNames(frozenset({"devices", "kv_store"}))
SEEDS = "seeds: [0, 1, 2]\n"


def drawn(tmp_path, plot, more="", log=made.usual):
    """The figure of the first plot."""
    experiment = made.experiment(f"{made.FILE}{more}plots: [{plot}]\n")
    return presentation(experiment).plots[0].draw(made.outcome_of(tmp_path, experiment, log))


def lines(axes):
    """Label -> points of the curves with a label."""
    return {
        line.get_label(): [tuple(map(float, point)) for point in line.get_xydata()]
        for line in axes.lines
        if not line.get_label().startswith("_")
    }


def scaling(settings):
    """100 samples/s on a device, 10 fewer on each more; 50 with dist_async; the seeds differ by 2 %."""
    count = settings["devices"]
    rate = (100 - 10 * (count - 1) / 2) * count * (0.5 if settings["kv_store"] == "dist_async" else 1)
    rate *= 1 + 0.02 * settings.get("seed", 0)
    return made.epochs(*[{"Speed": rate, "Time cost": 5}] * 2, devices=count)


def test_the_speed_up_and_the_ideal(tmp_path):
    rate, ratio = drawn(tmp_path, "speed-up", log=scaling).axes
    sync, other, same = "kv-store dist_sync", "kv-store dist_async", [(1, 1), (2, 1.9), (4, 3.4)]
    assert lines(rate) == {sync: [(1, 100), (2, 190), (4, 340)], other: [(1, 50), (2, 95), (4, 170)]}
    assert lines(ratio) == {sync: same, other: same, "ideal speed-up": [(1, 1), (4, 4)]}
    assert (rate.get_xlabel(), rate.get_ylabel(), ratio.get_ylabel()) == ("workers x devices", "samples/s", "speed-up")
    assert rate.get_ylim()[0] == 0 and all(float(tick).is_integer() for tick in rate.get_xticks())
    assert not rate.containers, "no error bars without seeds"


def test_error_bars_are_there_with_seeds(tmp_path):
    rate, _ = drawn(tmp_path, "speed-up", SEEDS, scaling).axes
    assert lines(rate)["kv-store dist_sync"][0] == (1, pytest.approx(102))
    (bars,) = [one for one in rate.containers[:1]]
    low, high = bars.lines[2][0].get_segments()[0][:, 1]
    assert (high - low) / 2 == pytest.approx(2.0)


def test_rows_and_axes_can_be_chosen(tmp_path):
    plot = "{speed-up: {x: devices, y: steps_per_second, where: devices > 1 and kv_store == 'dist_sync', series: []}}"
    rate, ratio = drawn(tmp_path, plot, log=scaling).axes
    assert [line.get_xydata().tolist() for line in rate.lines] == [[[2, 190 / 64], [4, 340 / 64]]]
    assert rate.get_xlabel() == "devices" and rate.get_ylabel() == "steps/s"
    assert lines(ratio)["ideal speed-up"] == [(2, 1), (4, 2)]


@pytest.mark.parametrize(
    "plot", ["{bars: {series: []}}", "{curves: {series: devices}}", "{parts: {series: [devices]}}"]
)
def test_rows_with_different_settings_are_never_one(tmp_path, plot):
    line = "Communication: bound=0.8 compute=6 own-host=1 wire=2 server=0.5 straggler=0.5\n"
    with pytest.raises(UserError, match="2 rows would be in one place, devices 1: name kv-store in `series`"):
        drawn(tmp_path, plot, log=lambda settings: made.usual(settings) + f"Node[0] Epoch[1] {line}")


def test_curves_over_epochs_with_a_band_of_all_seeds(tmp_path):
    def log(settings):
        accuracy = [0.1, 0.2 + settings["seed"] / 10, 0.5]
        return made.epochs(*({"Validation-accuracy": one, "Time cost": 4} for one in accuracy))

    (axes,) = drawn(tmp_path, "curves", SEEDS, log).axes
    labels = [f"devices {n}, kv-store {name}" for n in (1, 2, 4) for name in ("dist_sync", "dist_async")]
    assert list(lines(axes)) == labels
    assert lines(axes)["devices 1, kv-store dist_sync"] == [(1, pytest.approx(0.1)), (2, pytest.approx(0.3)), (3, 0.5)]
    band = axes.collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == pytest.approx(0.1) and {0.2, 0.4} <= {round(float(y), 6) for y in band[:, 1]}
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("epoch", "validation accuracy")


def test_curves_over_iterations_in_panels_of_a_variable(tmp_path):
    def log(settings):
        return made.epochs({"Validation-accuracy": 0.25}, {"Validation-accuracy": "nan"}, {"Validation-accuracy": 0.75})

    left, right = drawn(tmp_path, "{curves: {x: iteration, y: test_error, panels: kv-store}}", log=log).axes
    assert (left.get_title(), right.get_title()) == ("kv-store dist_sync", "kv-store dist_async")
    assert lines(left) == {f"devices {n}": [(391, 0.75), (1173, 0.25)] for n in (1, 2, 4)}


def test_bars_in_groups(tmp_path):
    (axes,) = drawn(tmp_path, "bars", SEEDS, scaling).axes
    sync, other = [one for one in axes.containers if hasattr(one, "patches")]
    assert (sync.get_label(), other.get_label()) == ("kv-store dist_sync", "kv-store dist_async")
    assert [bar.get_height() for bar in sync.patches] == [pytest.approx(1.02 * rate) for rate in (100, 190, 340)]
    centres = [bar.get_x() + bar.get_width() / 2 for bar in (*sync.patches, *other.patches)]
    assert centres == [pytest.approx(each) for each in (-0.2, 0.8, 1.8, 0.2, 1.2, 2.2)]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "2", "4"]
    assert axes.get_ylim()[0] == 0


def test_the_parts_of_an_epoch(tmp_path):
    def log(settings):
        line = "Communication: bound=0.8 compute=6.0 own-host=1.0 wire=2.0 server=0.5 straggler=0.5\n"
        log = made.epochs(*[{"Time cost": 10}] * 2).splitlines(keepends=True)
        ends = (f"2026-11-22 04:12:52,047 Node[0] Epoch[{epoch}] {line}" for epoch in (0, 1))
        return "".join([*log[:-1], next(ends), log[-1], next(ends)])

    (axes,) = drawn(tmp_path, "{parts: {where: devices == 1}}", log=log).axes
    assert [one.get_label() for one in axes.containers] == ["compute", "own host", "wire", "server", "straggler"]
    widths = [[bar.get_width() for bar in one.patches] for one in axes.containers]
    assert widths == [[pytest.approx(each)] * 2 for each in (6, 1, 2, 0.5, 0.5)]
    assert [bar.get_x() for bar in axes.containers[2].patches] == [pytest.approx(7)] * 2
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["kv-store dist_sync", "kv-store dist_async"]


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_are_hard_to_draw(tmp_path, kind):
    numbers = {1: "nan", 2: "inf", 4: "1e308"}

    def log(settings):
        one = {name: numbers[settings["devices"]] for name in ("Speed", "Time cost", "Validation-accuracy")}
        return made.epochs(one, one, devices=settings["devices"])

    experiment = made.experiment(f"{made.FILE}plots: [{kind}]\n")
    content = presentation(experiment).plots[0].svg(made.outcome_of(tmp_path, experiment, log))
    assert content == b"" or ElementTree.fromstring(content).tag.endswith("svg")
    assert drawn(tmp_path / "failed", kind, log=lambda settings: None) is None, "there is nothing to draw"


def test_a_title_stands_in_the_figure_and_says_what_was_emulated(tmp_path):
    plot = '{bars: {title: "Of $10 <b>"}}'
    assert drawn(tmp_path / "a", plot)._suptitle.get_text() == r"Of \$10 <b>"
    figure = drawn(tmp_path / "b", plot.replace("title", "title"), "speed-up: {of: samples_per_second}\n")
    assert "emulated" not in figure._suptitle.get_text()
    experiment = made.experiment(made.FILE.replace("num-layers: 20", "emulate-step: 0.1") + "plots: [bars]\n")
    figure = presentation(experiment).plots[0].draw(made.outcome_of(tmp_path, experiment))
    assert figure._suptitle.get_text() == "samples/s (computing emulated)"


@pytest.mark.parametrize(
    "given, place, part",
    [
        ("curves", (), "expected a list"),
        (["curve"], (0,), "did you mean curves?"),
        ([5], (0,), "expected a kind of plot"),
        ([{"curves": 5}], (0, "curves"), "expected choices"),
        ([{"curves": {"z": 5}}], (0, "curves", "z"), "there is no 'z'"),
        ([{"curves": {"x": "epochs"}}], (0, "curves", "x"), "did you mean epoch?"),
        ([{"curves": {"y": "acuracy"}}], (0, "curves", "y"), "did you mean train_accuracy?"),
        ([{"curves": {"panels": ["devices"]}}], (0, "curves", "panels"), "expected one variable"),
        (["bars", {"bars": {"x": "device"}}], (1, "bars", "x"), "did you mean devices?"),
        ([{"bars": {"where": "devises > 1"}}], (0, "bars", "where"), "did you mean devices?"),
        ([{"bars": {"where": "devices >"}}], (0, "bars", "where"), "is no expression"),
        ([{"bars": {"title": 5}}], (0, "bars", "title"), "expected a text"),
        ([{"curves": {"log": 1}}], (0, "curves", "log"), "expected true or false"),
        ([{"speed-up": {"series": ["lr"]}}], (0, "speed-up", "series"), "there is no variable 'lr'"),
    ],
)
def test_mistakes_in_plots(given, place, part):
    with pytest.raises(Fault) as fault:
        plots(given, NAMES)
    assert fault.value.place == ("plots", *place) and part in str(fault.value)
