"""dmltrain.distribute as users call it."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FRAME = 200  # bytes of a frame without values, at most
PROGRAMS = Path(__file__).parent / "programs"


def trained(job, compression):
    """Weights and sent bytes of each worker of a job that sets the compression of its kvstore itself."""
    from dmltrain.backends.torch.distributed import distribute
    from tests.kvstore import pulling

    def one(store):
        store.set_gradient_compression({"type": compression})
        return pulling.train(store.rank, lambda model, optimizer: distribute(model, optimizer, store))

    found = job.all(one)
    job.all(lambda store: store.close())
    assert job.ended() == ["", "", ""]
    return found


def test_a_scripts_compression_sends_a_quarter_and_computes_what_the_kvstore_does(whole_job, tmp_path):
    """A second model of the process has to use the same kvstore."""
    pytest.importorskip("torch", reason="torch is not installed")
    launch = f"-m launch.cli -n 2 -s 2 --log-dir {tmp_path}".split()
    command = [sys.executable, *launch, PROGRAMS / "compressed_script.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DMLTRAIN_PROBE": "0"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    plain = trained(whole_job(), "none")
    told = [
        r"0\.weight \(3 x 500\) sends gradients",
        "^kvstore='dist_async': .*'dist_sync'",
        "^compression='none': .*'int8'",
        "^transport='tcp': .*'auto'",
    ]
    for rank, (weights, sent) in enumerate(trained(whole_job(), "int8")):
        found = json.loads((tmp_path / f"worker-{rank}.log").read_text().splitlines()[-1])
        assert found["digest"] == hashlib.sha256(weights.tobytes()).hexdigest()
        # bytes are counted after they were sent, so those of the last frames without values may be missing
        assert found["sent"] == pytest.approx(sent, abs=4 * FRAME)
        assert 0.25 < sent / plain[rank][1] < 0.27
        assert all(map(re.search, told, found["told"])) and len(found["told"]) == len(told), found["told"]
    assert plain[0][0].tobytes() != weights.tobytes()


def test_a_scripts_staleness_bounds_its_steps_and_its_residual_keeps_what_is_below_the_threshold(whole_job, tmp_path):
    """The script is worker 0. Each gradient is half a threshold, so each second step changes the weights. Its second
    step waits for the first of worker 1, with the default of 3 its fourth would."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from dmltrain.backends.torch.backend import make_step
    from dmltrain.backends.torch.distributed import distribute

    job = whole_job("dist_ssp", servers=1, staleness=1.0, make_step=make_step, outside=1)
    key = tmp_path / "key"
    key.write_bytes(job.environment.key)
    own = {
        **{"DMLC_ROLE": "worker", "DMLC_WORKER_ID": "0", "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1"},
        **{"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(job.environment.root_port)},
        **{"DMLTRAIN_JOB": job.environment.job, "DMLTRAIN_KEY_FILE": str(key), "PYTHONPATH": str(ROOT)},
    }
    command = [sys.executable, str(PROGRAMS / "stale_script.py")]
    script = subprocess.Popen(command, env={**os.environ, **own}, stdout=subprocess.PIPE, text=True)
    try:
        (store,) = job.stores
        store.set_gradient_compression({"type": "2bit", "threshold": 1.0})
        model = torch.nn.Linear(3, 1, bias=False)
        optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), store)
        store.barrier()
        store.barrier()
        model(torch.full((1, 3), 0.25)).backward()
        optimizer.step()
        output, _ = script.communicate()
        store.close()
    finally:
        script.kill()
        script.wait()
    assert script.returncode == 0
    assert json.loads(output) == {"weights": [[0.0] * 3, [0.0] * 3, [-1.0] * 3], "waits": [True], "over": "tcp"}
