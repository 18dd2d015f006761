"""dmltrain.distribute as users call it."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kvstore.whole_job import WholeJob

ROOT = Path(__file__).parents[2]
FRAME = 200  # bytes of a frame without values, at most
PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.parametrize(
    "kind, when",
    [
        ("dist_sync", "at once"),
        pytest.param("dist_async", "at once", marks=pytest.mark.exhaustive),
        pytest.param("dist_async", "deferred", marks=pytest.mark.thorough),
    ],
)
def test_typical_uses(start_forked, kind, when):
    job = start_forked("distribute.py", kind, when, workers=2, servers=2)
    job.succeed()
    assert "all as expected" in job.output("worker-0") and "all as expected" in job.output("worker-1")


@pytest.mark.thorough
def test_deferred_steps_equal_immediate_steps_bit_for_bit(start_forked):
    job = start_forked("deferred.py", workers=2, servers=2)
    job.succeed()
    assert "all as expected" in job.output("worker-0")
    assert job.output("worker-0") == job.output("worker-1")


# -- what the script chooses ------------------------------------------------------------------------------------------


def trained(compression):
    """Weights and sent bytes of each worker of a job that sets the compression of its kvstore itself."""
    from dmltrain.backends.torch.distributed import distribute
    from tests.kvstore import pulling

    def one(store):
        store.set_gradient_compression({"type": compression})
        return pulling.train(store.rank, lambda model, optimizer: distribute(model, optimizer, store))

    job = WholeJob()
    try:
        found = job.all(one)
        job.all(lambda store: store.close())
        assert job.ended() == ["", "", ""]
    finally:
        job.close()
    return found


def test_a_scripts_compression_sends_a_quarter_and_computes_what_the_kvstore_does(tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    command = ["-m", "launch.cli", "-n", "2", "-s", "2", "--log-dir", tmp_path, PROGRAMS / "compressed_script.py"]
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "DMLTRAIN_PROBE": "0"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    plain = trained("none")
    for rank, (weights, sent) in enumerate(trained("int8")):
        found = json.loads((tmp_path / f"worker-{rank}.log").read_text().splitlines()[-1])
        assert found["digest"] == hashlib.sha256(weights.tobytes()).hexdigest()
        # bytes are counted after they were sent, so those of the last frames without values may be missing
        assert found["sent"] == pytest.approx(sent, abs=4 * FRAME)
        assert 0.25 < sent / plain[rank][1] < 0.27
        assert found["told"] == [
            "0.weight (3 x 500) sends gradients: factors are not smaller (0.0 MB of factors a step, 0.0 MB of "
            "gradients)",
            "kvstore='dist_async': this process already uses kvstore='dist_sync'; use that for every model",
            "compression='none': this process already uses compression='int8'; use that for every model",
            "transport='tcp': this process already uses transport='auto'; use that for every model",
        ]
    assert plain[0][0].tobytes() != weights.tobytes()


def test_a_scripts_staleness_bounds_its_steps_and_its_residual_keeps_what_is_below_the_threshold(tmp_path):
    """The script is worker 0. Each gradient is half a threshold, so each second step changes the weights. Its second
    step waits for the first of worker 1, with the default of 3 its fourth would."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from dmltrain.backends.torch.backend import make_step
    from dmltrain.backends.torch.distributed import distribute

    job = WholeJob("dist_ssp", servers=1, staleness=1.0, make_step=make_step, outside=1)
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
        output, _ = script.communicate(timeout=60)
        store.close()
    finally:
        script.kill()
        script.wait()
        job.close()
    assert script.returncode == 0
    assert json.loads(output) == {"weights": [[0.0] * 3, [0.0] * 3, [-1.0] * 3], "waits": [True], "over": "tcp"}


@pytest.mark.thorough
def test_a_script_with_local_steps(start_forked):
    job = start_forked("local_script.py", workers=2, servers=1)
    job.succeed()
    first, second = job.results(0), job.results(1)
    assert [each["error"] for each in first[:2]] == [
        "local_steps is an option of kvstore dist_local; this is dist_sync: use dist_local, or leave local_steps out",
        "local_steps 0: expected a whole number of steps, at least 1",
    ]
    assert len(first) == len(second) == 5
    for one, other in zip(first[2:], second[2:], strict=True):
        assert one["between"] != other["between"] and one["after"] == other["after"]
    assert first[2]["after"] != first[3]["after"] and first[4]["lr"] == 0.01 / 8
