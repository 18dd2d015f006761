"""What the commands print of a stranger's folders, names, records and logs neither controls a terminal nor hides."""

import contextlib
import io
import json
import re
import tarfile
from pathlib import Path

import pytest

import dmltrain_launch.cli
from dmltrain.base import safe_text
from dmltrain.data_command import cli as data
from dmltrain.experiment import cli as experiment
from dmltrain.logs import record
from dmltrain.report import cli as parse
from dmltrain.report.page import cli as page
from dmltrain_launch.agent import text
from tests.image_records import jpeg

EVIL = "\x1b]0;t\x07\x9b31m\u202e"
CONTROL = re.compile(rb"[\x01-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]|\xe2\x80\xae|(?<![\x80-\xff])[\x80-\x9f]")


@pytest.fixture
def strange(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path(f"j{EVIL}")
    folder.mkdir()
    facts = {key: EVIL for key in ("job", "started", "ended", "cause", "workdir", "control", "mark")}
    facts |= {"format": 1, "command": ["python", EVIL, "--network", EVIL], "launcher": "local", "exit_code": 1}
    facts |= {"launched_from": {"host": EVIL, "pid": 1}, "hosts": [{"name": EVIL, "address": EVIL}], "seconds": 3.0}
    facts |= {"processes": [{"role": EVIL, "rank": 0, "host": EVIL, "signal": EVIL}], "versions": {EVIL: EVIL}}
    (folder / "job.json").write_text(json.dumps(facts))
    lines = f"Options: network={EVIL!r}\nEpoch[0] Train-accuracy=0.5\nEpoch[0] {EVIL}=1\nEpoch[0] Train-x{EVIL}=1\n"
    (folder / "worker-0.log").write_bytes(lines.encode() + f"{EVIL}\n".encode() + b"\x9b31m \xff\n")
    (folder / f"agent-h{EVIL}.log").write_text("x\n")
    (folder / f"no{EVIL}.csv").write_text(f"epoch,loss{EVIL}\n0,1{EVIL}\n")
    for number, name in enumerate((f"a{EVIL}", "b\udc9b")):
        Path("images", name).mkdir(parents=True)
        Path("images", name, f"1{EVIL}.jpg").write_bytes(jpeg(number, 0) if number else b"no image")
    Path("x.lst").write_text("".join(f"{n}\t{n}\tn{EVIL}{n}.png\n" for n in range(3)))
    with tarfile.open("t.tar", "w") as tar:
        found = tarfile.TarInfo(f"c{EVIL}/1{EVIL}.jpg")
        found.size = len(jpeg(0, 0)) - 30
        tar.addfile(found, io.BytesIO(jpeg(0, 0)))
    Path(f"e{EVIL}.toml").write_text(f'name = "{EVIL}"\n')
    return str(folder)


def job(words: list[str]) -> None:
    dmltrain_launch.cli.end_with("x", dmltrain_launch.cli.job, words)


def commands(folder: str) -> list[tuple[object, list[str]]]:
    forms = ("markdown", "csv", "json", "none")
    parsed = [["--format", form, *more, folder] for form in forms for more in ([], ["--summary"])]
    parsed += [["--compare", folder, folder], [f"{folder}/no{EVIL}.csv"], [f"none{EVIL}"], [f"--{EVIL}"]]
    checked = ["verify images", "verify t.tar", "verify x.lst --root images", "show images", "index t.tar"]
    checked += ["speed t.tar", "pack --recursive packed images", "partition images --parts 2 --out parts"]
    return [
        *((parse.main, words) for words in parsed),
        (page.main, [folder, "-o", f"p{EVIL}.html"]),
        *((data.main, words.split()) for words in checked),
        (data.main, ["verify", f"none{EVIL}"]),
        *((experiment.main, [f"e{EVIL}.toml", more]) for more in ("--dry-run", "--status")),
        *((job, [verb, folder]) for verb in ("ps", "kill", "logs", "attach")),
        (job, ["ls", "."]),
        (job, ["logs", f"none{EVIL}"]),
    ]


def test_no_command_prints_a_control_character_of_a_strangers(strange, capfd):
    for main, words in commands(strange):
        with contextlib.suppress(SystemExit):
            main(words)
        said = b"".join(part.encode("utf-8", "surrogateescape") for part in capfd.readouterr())
        assert said or words[0] == "kill", words
        assert not CONTROL.search(said), (words, said)


def test_what_is_printed_says_which_characters_there_are(capsys):
    with safe_text.printed():
        print(f"a\t\xe9\u4e2d\udcff{EVIL}", end="\n")
    assert capsys.readouterr().out == "a\t\xe9\u4e2d\\udcff\\x1b]0;t\\x07\\x9b31m\\u202e\n"
    assert safe_text.one_line("a\tb\nc\r") == "a\\tb\\nc\\r" and safe_text.safe_lines("a\tb\nc\r") == "a\tb\nc\\r"
    log = record.logger(0, stream := io.StringIO())
    log.warning("left out: %s", EVIL)
    assert stream.getvalue().endswith("left out: \\x1b]0;t\\x07\\x9b31m\\u202e\n")


def test_a_line_of_a_log_keeps_its_bytes_but_for_controls():
    kept = b"bar \r 5\x08\x08\t\xff\xe9 " + "\u4e2d\xe9".encode()
    assert text.safe_output(kept) == kept
    assert text.safe_output(b"\x1b[31m \x9b \xc2\x9b" + kept) == b"\\x1b[31m \\x9b \\x9b" + kept
