"""The page in headless Chromium: what it draws, and what a reader can do with it."""

import base64
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from dmltrain.report import reading
from dmltrain.report.page import cli
from dmltrain.report.summaries.series import points
from tests.browser import Page
from tests.report.page import written

SERIES = """(id => {
  const chart = echarts.getInstanceByDom(document.querySelector(`#${id} .chart`));
  return chart.getOption().series.map(s => ({id: s.id, name: s.name, data: s.data, type: s.type}));
})"""


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> list[Path]:
    """Two runs of three workers."""
    folder = tmp_path_factory.mktemp("logs")
    runs = [written.run(folder / f"run-{number}", seed=number) for number in range(2)]
    written.samples(runs[0])
    return runs


@pytest.fixture(scope="module")
def made(two, tmp_path_factory) -> Path:
    """Their page."""
    file = tmp_path_factory.mktemp("page") / "report.html"
    assert cli.main([*map(str, two), "-o", str(file)]) == 0
    return file


@pytest.fixture
def opened(made, page) -> Page:
    page.open(made)
    return page


@pytest.fixture(scope="module")
def seen(made, browser) -> Iterator[Page]:
    """The same page in one tab for all tests that change nothing on it that another one reads."""
    with browser.page() as shared:
        shared.open(made)
        yield shared
        assert shared.problems() == []


def series(page: Page, chart: str) -> list[dict]:
    return page.value(f"{SERIES}({chart!r})")


def curves(page: Page, chart: str) -> dict[str, list[list[float]]]:
    """The curves of a chart without the edges of their bands."""
    return {each["name"]: each["data"] for each in series(page, chart) if each.get("name") and each["id"].isdigit()}


def move_to(page: Page, chart: str, at: float) -> str:
    """Move the pointer to a share of the plot's width; returns what appears."""
    page.middle(f"#{chart} .chart")
    x, y = page.value(
        f"(c => {{ const r = c.getDom().getBoundingClientRect(), g = c.getModel().getComponent('grid').coordinateSystem"
        f".getRect(); return [r.x + g.x + g.width * {at}, r.y + g.y + g.height / 2]; }})"
        f"(echarts.getInstanceByDom(document.querySelector('#{chart} .chart')))"
    )
    page.point(x - 3, y)
    page.point(x, y)
    return page.wait(f"document.querySelector('#{chart} .hover')?.innerText")


def test_every_curve_has_the_values_of_the_logs(seen, two):
    """A band reaches from the smallest to the largest worker, and time counts from the start of training."""
    for number, folder in enumerate(two):
        [run] = reading.read(str(folder))
        for key, name in (("validation_accuracy", "validation"), ("train_accuracy", "train")):
            drawn = curves(seen, "accuracy-by-epoch")[f"run-{number} {name}"]
            assert [x for x, _ in drawn] == [epoch + 1 for epoch in run.epochs]
            expected = [sum(values[key]) / len(values[key]) for values in run.epochs.values()]
            assert [y for _, y in drawn] == pytest.approx(expected, rel=1e-6)
        ends = [x for x, _ in points(run, "validation_accuracy", "time")]
        drawn = curves(seen, "accuracy-by-time")[f"run-{number} validation"]
        assert ends and [x for x, _ in drawn] == pytest.approx(ends, rel=1e-6)
    [run] = reading.read(str(two[0]))
    found = {each["id"]: each["data"] for each in series(seen, "accuracy-by-epoch")}
    lows = [y for _, y in found["0 low"]]
    highs = [low + height for low, (_, height) in zip(lows, found["0 high"], strict=True)]
    values = [epoch["validation_accuracy"] for epoch in run.epochs.values()]
    assert lows == pytest.approx([min(value) for value in values], rel=1e-6)
    assert highs == pytest.approx([max(value) for value in values], rel=1e-5)


def test_all_charts_are_there_and_drawn(seen):
    charts = seen.value("data = JSON.parse(document.getElementById('data').textContent).charts.map(c => c.id)")
    assert seen.value("[...document.querySelectorAll('figure .chart svg')].map(e => e.closest('figure').id)") == charts
    expected = "accuracy-by-epoch accuracy-by-time cross-entropy-by-epoch cross-entropy-by-time seconds speed sent "
    expected += "received staleness usage-cpu usage-host-cpu usage-memory host-cpu host-memory host-job-cpu "
    expected += "parts-by-worker-0 parts-by-epoch-0 parts-by-worker-1 parts-by-epoch-1 learning-rate"
    assert set(expected.split()) <= set(charts)


def test_bars_have_each_workers_seconds(seen, two):
    [worker] = reading.read(str(two[0] / "worker-2.log"))
    bars = {each["name"]: each["data"] for each in series(seen, "parts-by-worker-0")}
    assert list(bars) == ["compute", "own host", "wire", "server", "straggler"]
    mean = sum(values["wire"][0] for values in worker.epochs.values()) / len(worker.epochs)
    assert bars["wire"][2] == pytest.approx(mean, rel=1e-6)
    names = ["mean of all workers", "worker-0", "worker-1", "worker-2"]
    assert seen.value("[...document.querySelectorAll('#parts-by-epoch-0 option')].map(o => o.text)") == names
    select = "document.querySelector('#parts-by-epoch-0 select')"
    seen.value(f"(s => {{ s.value = '3'; s.dispatchEvent(new Event('change')); }})({select})")
    bars = {each["name"]: each["data"] for each in series(seen, "parts-by-epoch-0")}
    assert bars["compute"] == pytest.approx([values["compute"][0] for values in worker.epochs.values()], rel=1e-6)


def test_the_pointer_reads_all_runs_and_bars_off_a_chart(seen, two):
    shown = move_to(seen, "accuracy-by-epoch", 0.6)  # epoch 4 of 1 to 6
    assert shown.startswith("epoch 4")
    for number, folder in enumerate(two):
        [run] = reading.read(str(folder))
        values = run.epochs[3]["validation_accuracy"]
        line = next(line for line in shown.splitlines() if line.strip().startswith(f"run-{number} validation"))
        assert f"{sum(values) / len(values):.4f}"[:6] in line
    assert "run-1 train" in shown
    assert f"{min(values):.5f}" in line, "the band is there, too"
    shown = move_to(seen, "parts-by-worker-1", 0.5)
    assert shown.startswith("worker worker-1") and "straggler" in shown and "together" in shown


def test_a_click_on_a_run_hides_it_everywhere(seen):
    seen.click("[data-toggle='0']")
    assert seen.value("document.querySelector('[data-toggle=\"0\"]').getAttribute('aria-pressed')") == "false"
    assert set(curves(seen, "accuracy-by-epoch")) == {"run-1 validation", "run-1 train"}
    assert set(curves(seen, "staleness")) == {"run-1"}
    assert seen.value("getComputedStyle(document.getElementById('parts-by-worker-0')).display") == "none"
    assert "run-0" not in move_to(seen, "accuracy-by-epoch", 0.5)
    seen.click("#show-all")
    assert "run-0 train" in curves(seen, "accuracy-by-epoch")
    seen.value("document.querySelector('[data-toggle=\"1\"]').focus()")
    seen.key("Enter", "\r")
    assert set(curves(seen, "accuracy-by-epoch")) == {"run-0 validation", "run-0 train"}
    seen.click("#show-all")


COLUMN = "[...document.querySelectorAll('#summary tbody tr')].map(r => r.cells[0].textContent)"


def test_tables_sort(report, page, tmp_path):
    others = [tmp_path / f"run-{number}.log" for number in (10, 2, 9)]
    for count, log in enumerate(others, 3):
        log.write_text("".join(f"Epoch[{epoch}] Train-accuracy=0.5\n" for epoch in range(count)))
    page.open(report(*others))
    heading = "#summary thead th:first-child button"
    page.click(heading)
    assert page.value(COLUMN) == ["run-2", "run-9", "run-10"]
    page.value(f"document.querySelector({heading!r}).focus()")
    page.key("Enter", "\r")
    assert page.value(COLUMN) == ["run-10", "run-9", "run-2"]
    place = page.value("[...document.querySelectorAll('#summary thead th')].findIndex(h => h.textContent === 'epochs')")
    page.click(f"#summary thead th:nth-child({place + 1}) button")
    cells = page.value(f"[...document.querySelectorAll('#summary tbody tr')].map(r => +r.cells[{place}].textContent)")
    assert cells == sorted(cells) and len(set(cells)) > 1
    assert page.value(f"document.querySelectorAll('#summary thead th')[{place}].ariaSort") == "ascending"


def test_values_are_there_as_a_table(seen):
    seen.click("#accuracy-by-epoch summary")
    seen.wait("document.querySelector('#accuracy-by-epoch details table') !== null")
    assert seen.value("document.querySelectorAll('#accuracy-by-epoch details tbody tr').length") == 6
    seen.click("#accuracy-by-epoch summary")
    seen.wait("!document.querySelector('#accuracy-by-epoch details').open")


def test_text_of_charts_and_tables_can_be_selected_and_links_lead_to_logs(seen, two):
    seen.value("getSelection().selectAllChildren(document.querySelector('#accuracy-by-epoch'))")
    assert "accuracy" in seen.value("getSelection().toString()")
    seen.value("getSelection().selectAllChildren(document.querySelector('#accuracy-by-epoch .chart'))")
    assert seen.value("getSelection().toString()").count("0.") >= 3, "numbers at the axis"
    links = seen.value("[...document.querySelectorAll('#logs a')].map(a => [a.textContent, a.href])")
    assert {name for name, _ in links} >= {"worker-0.log", "worker-2.log", "server-0.log", "job.json", "usage.csv"}
    assert (two[0] / "worker-0.log").resolve().as_uri() in [href for _, href in links]


def brightness(page: Page, selector: str, style: str) -> int:
    colour = f"getComputedStyle(document.querySelector({selector!r})).{style}"
    return sum(page.value(f"{colour}.match(/\\d+/g).slice(0, 3).map(Number)"))


def ink(page: Page) -> str:
    return page.value("document.querySelector('#accuracy-by-epoch svg text').getAttribute('fill')")


def test_dark_mode_changes_page_and_charts_and_it_prints_with_all_in_light_colours(opened):
    assert brightness(opened, "body", "backgroundColor") > 700 > 200 > brightness(opened, "body", "color")
    light = ink(opened)
    opened.media("screen", "dark")
    opened.wait(f"document.querySelector('#accuracy-by-epoch svg text').getAttribute('fill') !== {light!r}")
    assert brightness(opened, "body", "backgroundColor") < 120 < 600 < brightness(opened, "body", "color")
    assert len(curves(opened, "accuracy-by-epoch")) == 4
    pdf = opened.printed()
    assert pdf.startswith(b"%PDF") and pdf.count(b"/Type /Page\n") >= 3
    opened.media("print", "dark")
    opened.wait("getComputedStyle(document.body).backgroundColor === 'rgb(255, 255, 255)'")
    opened.wait("document.querySelector('#accuracy-by-epoch svg text').getAttribute('fill') === '#444444'")
    assert opened.value("getComputedStyle(document.querySelector('nav')).display") == "none"
    widths = opened.value("[...document.querySelectorAll('.chart svg')].map(e => e.getBoundingClientRect().width)")
    assert widths and set(widths) == {660}


def test_it_fits_a_narrow_window(made, page):
    page.size(360, 740)
    page.open(made)
    assert page.value("document.documentElement.scrollWidth") <= 360
    widest = "Math.max(...[...document.querySelectorAll('.chart svg')].map(e => e.width.baseVal.value))"
    assert page.value(widest) < 360


def test_it_can_be_read_without_eyes(seen):
    assert seen.value("document.querySelectorAll('h1').length") == 1
    levels = seen.value("[...document.querySelectorAll('h1, h2, h3')].map(h => +h.tagName[1])")
    assert levels[0] == 1 and all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False))
    tables = "[...document.querySelectorAll('main table:not(.hover table)')]"
    assert seen.value(f"{tables}.every(t => t.caption.textContent)")
    labels = seen.value("[...document.querySelectorAll('.chart')].map(e => e.getAttribute('aria-label'))")
    assert all(labels) and any("run-0 validation from 0.11729 to 0.28837" in label for label in labels)
    assert seen.value("document.documentElement.lang") == "en"


def test_no_picture_is_blank(seen):
    """The charts are drawn in colour: a picture of one has the colours of both runs."""
    x, y, width, height = seen.value(
        "(r => [r.x + scrollX, r.y + scrollY, r.width, r.height])"
        "(document.querySelector('#accuracy-by-epoch .chart').getBoundingClientRect())"
    )
    picture = seen.picture(clip=(x, y, width, height))
    assert struct.unpack(">II", picture[16:24]) == (int(width), int(height))
    colours = seen.value(
        f"new Promise(done => {{ const image = new Image(); image.onload = () => {{"
        f" const c = document.createElement('canvas'); c.width = image.width; c.height = image.height;"
        f" const g = c.getContext('2d'); g.drawImage(image, 0, 0);"
        f" const d = g.getImageData(0, 0, c.width, c.height).data, found = {{}};"
        f" for (let i = 0; i < d.length; i += 4) {{ const k = [d[i], d[i + 1], d[i + 2]].join(); found[k] ="
        f" (found[k] || 0) + 1; }} done(found); }};"
        f" image.src = 'data:image/png;base64,{base64.b64encode(picture).decode()}'; }})"
    )
    assert colours.get("0,114,178", 0) > 100 and colours.get("213,94,0", 0) > 100  # --run-0 and --run-1


HOSTILE = '<img src=x onerror="window.hit=1">"\'&</script><script>window.hit=1</script><!--'


def test_html_in_names_is_text(report, page, tmp_path):
    name = "r</script><script>window.hit=1<".replace("/", "\u2215")  # as a folder's name can be
    folder = written.run(tmp_path / name, 2, 1, host=f"{HOSTILE}-", cause=f"lost {HOSTILE}", exit_code=1)
    written.samples(folder)
    usage = folder / "usage.csv"
    quoted = HOSTILE.replace('"', '""')
    usage.write_text(usage.read_text().replace("h0", f'"{quoted}"'))
    log = folder / "worker-0.log"
    log.write_text(log.read_text().replace("network='resnet'", f"network={HOSTILE!r}").replace("--lr 0.1", HOSTILE))
    other = written.run(tmp_path / "javascript:alert(1)&b", 2, 1)
    page.open(report(folder, other))
    move_to(page, "accuracy-by-epoch", 0.5)
    move_to(page, "host-cpu", 0.5)
    page.click("#accuracy-by-epoch summary")
    page.media("print")
    assert page.value("window.hit") is None
    text = page.value("document.body.textContent")
    assert f"lost {HOSTILE}" in text and f"{HOSTILE}-0" in text
    assert page.value("document.querySelectorAll('img').length") == 0
    assert page.value("[...document.querySelectorAll('a')].every(a => ['file:'].includes(a.protocol))")


@pytest.mark.thorough
def test_its_policy_lets_nothing_else_run(seen):
    found = seen.value(
        "(() => { const made = document.createElement('script'); made.textContent = 'window.hit = 1';"
        " document.body.append(made); return new Promise(done => fetch('https://example.org')"
        ".then(() => done('fetched'), () => done(window.hit || 'none'))); })()"
    )
    assert found == "none"
    assert len(seen.problems()) >= 2, "the browser reports both, and asked nobody"
    assert not any("request" in problem for problem in seen.problems())
    seen.forget()
