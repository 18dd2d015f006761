"""dmltrain-report: what is on the page, without a browser; what it refuses; that it is the same when made again."""

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from array import array
from importlib import resources
from pathlib import Path

import pytest

from benchmarks import report_page
from dmltrain.report.page import cli, document, html
from dmltrain.report.summaries.statistic import difference
from tests.copied_tree import search_path
from tests.report.page import written
from tests.report.page.written import run

SECTIONS = re.compile(r'<section id="([a-z]+)"')
ROOT = Path(__file__).parents[3]


def data(page: Path) -> dict:
    text = page.read_text().partition('<script type="application/json" id="data">')[2].partition("</script>")[0]
    return json.loads(text)


def test_sections_in_their_order(tmp_path, report):
    folder = written.run(tmp_path / "demo")
    written.samples(folder)
    text = report(folder).read_text()
    expected = "summary accuracy time traffic usage staleness timeline machines commands logs"
    assert SECTIONS.findall(text) == expected.split()
    for other in ("train.py --lr 0.1 --num-epochs 6", "AMD EPYC", "2026-11-22 12:00:00", "after 2 min 03 s"):
        assert other in text
    own = text.replace(document._asset(document.LIBRARY), "")
    assert not re.search(r'(?:src|href)="(?:https?:)?//', own) and "http" not in re.sub(r"http-equiv", "", own)
    log = tmp_path / "old.log"  # has only what it says
    log.write_text("INFO:root:Epoch[0] Train-accuracy=0.5\nINFO:root:Epoch[0] Validation-accuracy=0.4\n")
    page = report(log)
    assert SECTIONS.findall(page.read_text()) == ["summary", "accuracy", "logs"]
    assert [chart["id"] for chart in data(page)["charts"]] == ["accuracy-by-epoch"]


def test_real_logs_of_all_dialects(logs, report):
    files = sorted([*logs.glob("mxnet/*.log"), *logs.glob("other/*.log")])
    page = report(*files, code=2)
    assert len(data(page)["runs"]) >= len(files) > 10
    assert page.stat().st_size < 2_000_000


def test_made_again_it_has_the_same_bytes(tmp_path, report):
    folders = [written.run(tmp_path / f"run-{number}", seed=number) for number in range(3)]
    first = report(*folders).read_bytes()
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for folder in folders:
        shutil.copytree(folder, moved / folder.name)
    program = [sys.executable, "-m", "dmltrain.report.page.cli", *(f"run-{number}" for number in range(3))]
    environment = {**os.environ, "PYTHONPATH": search_path(), "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"}
    subprocess.run([*program, "-o", "report.html"], cwd=moved, env=environment, check=True, capture_output=True)
    assert (moved / "report.html").read_bytes() == first
    assert str(tmp_path) not in first.decode()


def test_what_is_broken_is_said(tmp_path, report):
    """NaN and infinity are gaps; the other runs are shown beside one without epochs."""
    folder = written.run(tmp_path / "demo", workers=1)
    log = folder / "worker-0.log"
    text = re.sub(r"(Epoch\[2\] Validation-accuracy=)\S+", r"\1nan", log.read_text())
    log.write_text(f"{text}Epoch[6] Validation-accuracy=inf\n")
    (folder / "job.json").write_text("{")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "worker-0.log").write_text("starting\n")
    text = report(folder, tmp_path / "empty", code=2).read_text()
    assert "2 values that are not finite (NaN or infinite) are gaps." in text
    assert "no epoch in any of its logs" in text
    assert "job.json is not read" in text and "timeline" not in SECTIONS.findall(text)


def timeline_of(page: Path) -> tuple[str, str]:
    """Its HTML, and its words."""
    timeline = page.read_text().partition('id="timeline"')[2].partition("</section>")[0]
    return timeline, " ".join(re.sub(r"<[^>]*>", " ", timeline).split())


def test_a_restart_is_a_run_of_its_own_and_in_the_timeline(tmp_path, report):
    ends = [{"exit_code": 137, "cause": "worker 1 on h1 was lost", "ended": "2026-11-22T12:01:00+0000", "logs": "x"}]
    folder = written.run(tmp_path / "demo", restarts=ends)
    written.run(folder / "restart-1", epochs=4)
    written.run(folder / "previous-1", exit_code=1, cause="disk full")
    page = report(folder)
    assert data(page)["runs"] == ["demo", "restart-1"]
    timeline, words = timeline_of(page)
    order = ["disk full", "start: 3 workers, 1 server", "after 1 min 00 s", "worker 1 on h1 was lost", "restart 1"]
    places = [words.index(each) for each in [*order, "end, exit code 0"]]
    assert places == sorted(places)
    assert 'href="demo/restart-1/"' in timeline


def test_changes_of_the_kvstore_are_in_the_timeline(tmp_path, report):
    now = "kv_store=dist_ssp staleness=4"
    first = {"after": 61.0, "where": "after step 147", "now": now, "by": "me"}
    changes = [first, {"now": 3, "where": 5}, {"now": "kv_store=a"}]
    page = report(written.run(tmp_path / "demo", kvstore_changes=changes))
    _, words = timeline_of(page)
    assert f"after 1 min 01 s {now} on all workers after step 147; asked for by me kv_store=a on all workers" in words


def test_long_curves_keep_their_extremes(tmp_path, report, monkeypatch):
    folder = written.run(tmp_path / "demo", epochs=400, workers=1)
    log = folder / "worker-0.log"
    for epoch, peak in ((123, "0.999000"), (321, "0.001000")):
        log.write_text(re.sub(rf"(Epoch\[{epoch}\] Validation-accuracy=)\S+", rf"\g<1>{peak}", log.read_text()))
    monkeypatch.setattr(document, "MOST_BYTES", 775_000)  # as if there were many runs
    page = report(folder)
    values = data(page)
    curve = next(c for c in values["charts"] if c["id"] == "accuracy-by-epoch")["curves"][0]
    x, y = (array("f", base64.b64decode(values["arrays"][curve[name]])) for name in "xy")
    assert len(x) < 200
    points = {int(at): value for at, value in zip(x, y, strict=True)}
    assert points[124] == pytest.approx(0.999) and points[322] == pytest.approx(0.001)
    assert {1, 400} <= set(points)
    assert re.search(r"Long curves have at most \d+ points here, of up to 400", page.read_text())


def test_what_is_not_a_page_is_not_replaced(tmp_path, capsys):
    """A pipe or a device, as of -o /dev/null, would become a file for root."""
    folder = written.run(tmp_path / "demo")
    before = (folder / "worker-0.log").read_bytes()
    os.mkfifo(tmp_path / "pipe")
    for log, output, reason in (
        (folder, folder / "worker-0.log", "is not a page of dmltrain-report"),
        (folder, tmp_path / "missing/report.html", "cannot be written: "),
        (folder, tmp_path, "cannot be written: "),
        (folder, tmp_path / "pipe", "pipe is no regular file"),
        (tmp_path / "nothing", tmp_path / "report.html", "cannot be read"),
    ):
        assert cli.main([str(log), "-o", str(output)]) == 2
        said = capsys.readouterr().err
        assert "dmltrain-report: error: " in said and reason in said
    assert (folder / "worker-0.log").read_bytes() == before and not (tmp_path / "report.html").exists()


def test_an_experiment_shows_its_table_first_and_its_cells(tmp_path, report):
    experiment = tmp_path / "exp"
    for cell in ("devices=1", "devices=2"):
        written.run(experiment / "cells" / cell)
    (experiment / "results.json").write_text(json.dumps(written.RESULTS))
    (experiment / "plots").mkdir()
    for name in ("plots/1-speed.svg", "../secret.svg"):
        (experiment / name).write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    page = report(experiment)
    text = page.read_text()
    assert SECTIONS.findall(text)[:2] == ["experiment", "summary"]
    assert data(page)["runs"] == ["devices=1", "devices=2"]
    for part in ("ResNets &lt;b&gt;", "Made small: 2 epochs instead of 12", "0.75 ± 0.01 (n=3)", "error: killed"):
        assert part in text
    for part in ("Published: Theirs. a paper", "0.93 (printed as 93: in percent)", "is devices 2.", "On h0."):
        assert part in text
    assert text.count('src="data:image/svg+xml') == 1
    assert 'href="exp/cells/devices%3D1/"' in text and 'href="exp/cells/devices%3D2/worker-0.log"' in text


def test_the_library_is_the_one_that_is_recorded():
    vendor = resources.files("dmltrain.report.page") / "vendor"
    record = json.loads((vendor / "library.json").read_text())
    for name, digest in record["sha256"].items():
        assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == digest, name
    assert f'version="{record["version"]}"' in (vendor / "echarts.common.min.js").read_text()[-400:]
    assert set(record["sha256"]) == {path.name for path in vendor.iterdir() if path.suffix in (".js", ".txt")}


LONG = "9" * 400


@pytest.mark.parametrize("number", ["1e308", "-1e308", LONG])
def test_a_page_of_absurd_numbers(tmp_path: Path, report, number: str) -> None:
    folder = run(tmp_path / "job", workers=2)
    for log in folder.glob("worker-*.log"):
        text = log.read_text().replace("lr=0.1", f"lr=0.1, seed={LONG}, macrobatch_size={LONG}")
        log.write_text(re.sub(r"(?<=\d )(.* Epoch\[.*?)=[\d.e+-]+", rf"\1={number}", text))
    hosts = [f"{time},h{host},{number},1e308,1,1,1,1\n" for host in range(8) for time in ("1e308", "-1e308", "5", "6")]
    (folder / "usage.csv").write_text("time,host,cpu,memory,job_cpu,job_memory,gpu,gpu_memory\n" + "".join(hosts))
    report(folder)


def test_no_difference_between_absurd_numbers() -> None:
    assert difference([1e308, 1e308], [1.0, 2.0]) is None
    assert difference([1e100, 2e100], [1.0, 2.0]) is None


def test_text_that_html_may_not_have_is_shown_as_a_question_mark():
    assert html.text("a\0b\x1b<\n") == "a?b?&lt;\n"


@pytest.mark.alone
@pytest.mark.thorough
def test_a_large_page_takes_less_than_4_s_300_mb_and_2_mb(tmp_path):
    folders = report_page.write(tmp_path, runs=8, epochs=300, workers=3)
    measured = report_page.measure(folders, tmp_path / "report.html")
    assert measured.cpu_seconds < 4
    assert measured.mib < 300
    assert measured.page_bytes < 2_000_000
