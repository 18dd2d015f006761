"""The pages for those who come from other programs: their scripts, under the launcher, print what the pages show."""

import re

import pytest

from tests.forked_job import forked
from tests.launch.conftest import ROOT

FRAMEWORK = re.compile("^(?:import|from) (?:horovod|accelerate|lightning)", re.MULTILINE)  # not among the requirements


DDP = pytest.param("ddp", marks=pytest.mark.exhaustive)  # nearly the script of the page for Horovod


@pytest.mark.thorough
@pytest.mark.parametrize("page", [DDP, "horovod", "torchrun"])
def test_the_script_of_the_page_has_the_loss_of_the_page(launcher, page):
    text = (ROOT / f"docs/moving-from-{page}.md").read_text()
    scripts = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (script,) = (each for each in scripts if "dmltrain" in each and not FRAMEWORK.search(each))
    of_torch = "on" if "init_process_group" in script else "off"
    options = ("--torch-env", of_torch, "--env", f"TORCHINDUCTOR_CACHE_DIR={launcher.folder / 'inductor'}")
    done = launcher.start("-n", 2, "-s", 2, *options, *forked(launcher.script(script))).wait(240.0)  # it trains
    assert done.code == 0, done
    for rank in range(2):
        pattern = rf"rank {rank} of 2: loss ([\d.]+)\n"
        (shown,) = set(re.findall(pattern, text[text.index("-s 2 train") :].partition("```")[0]))
        (loss,) = re.findall(pattern, launcher.log(f"worker-{rank}").decode())
        assert float(loss) == pytest.approx(float(shown), rel=1e-3)
