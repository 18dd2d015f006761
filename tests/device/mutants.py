"""Which copies, events and waits of the GPU path do the tests on the fake device need?

    python -m tests.device.mutants [NUMBER ...]

It leaves out or changes each in a copy of the tree, and prints whether a test has noticed. It ends with 1 if less than
LEAST of them were noticed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.copied_tree import ROOT, copy_packages

LEAST = 0.95
OPTIONS = "-q -x -p tests.device.plugin -p no:cacheprovider -p no:xdist --timeout 60"
OF_JOBS = "device/test_fake_cuda.py::test_torch_distributed_has_the_results_of_gloo_on_the_cpu"
OF_DEVICE = ("device/test_codecs.py", "device/test_counts.py", "device/test_on_it.py")
FILES = (*OF_DEVICE, "backends/test_torch_distributed.py", "backends/test_torch_elastic.py", OF_JOBS)
CHOSEN = ("-m", "not thorough and not exhaustive", "-k", "cuda or counts or on_it")
TORCH, OF_ALL = "dmltrain/backends/torch", "dmltrain/backends/torch/distributed"
GPU = f"{TORCH}/gpu"
PINNED = f"{GPU}/pinned.py"
HOOKS, STAGING = f"{TORCH}/process_group/hooks.py", f"{TORCH}/process_group/staging.py"
MUTANTS = (  # file, text, and what takes its place
    (f"{GPU}/copies.py", "    out.wait_stream(computing(device))\n", ""),
    (f"{GPU}/copies.py", "    with leaving(device) as out:\n", "    if out := leaving(device):\n"),
    (f"{GPU}/copies.py", "target.copy_(source, non_blocking=True)", "target.copy_(source)"),
    (f"{GPU}/codecs.py", "        torch._foreach_copy_([encoder.residual for encoder in encoders], totals)\n", ""),
    (f"{GPU}/codecs.py", "        torch._foreach_copy_(totals, residuals)\n", ""),
    (f"{GPU}/codecs.py", "            self.residual.copy_(torch", "            (torch"),
    (
        f"{GPU}/codecs.py",
        "        with copies.leaving(self._device):\n            values",
        "        if True:\n            values",
    ),
    (
        f"{GPU}/codecs.py",
        "        with copies.leaving(self._device):\n            self",
        "        if True:\n            self",
    ),
    (f"{GPU}/codecs.py", ", self._kept\n        self.is_valid = False\n", ", self._kept\n"),
    (f"{GPU}/codecs.py", "        self._begin()\n", ""),
    ("dmltrain/kvstore/worker/links/worker_slice.py", "self.undo.back_to(op() - 1)", "pass"),
    (f"{GPU}/copies.py", "return out.record_event()", "return computing(device).record_event()"),
    (f"{GPU}/copies.py", "into.wait_stream(now)", "pass"),
    (f"{GPU}/copies.py", "into.wait_event(event)", "pass"),
    (f"{GPU}/copies.py", "    with into:\n", "    if into:\n"),
    (f"{GPU}/copies.py", "    now.wait_stream(into)\n", ""),
    (f"{GPU}/copies.py", "slot.copied.synchronize()", "pass"),
    (f"{GPU}/copies.py", "        with stream:\n", "        if stream:\n"),
    (f"{GPU}/copies.py", "to(self._device, non_blocking=True)", "to(self._device)"),
    (f"{GPU}/copies.py", "slot.copied = stream.record_event()", "slot.copied = now.record_event()"),
    (f"{GPU}/copies.py", "        now.wait_event(slot.copied)\n", ""),
    (f"{GPU}/copies.py", "        placed.record_stream(now)\n", ""),
    (f"{TORCH}/replicas.py", "self._buffers[device].place(tensor)", "tensor.pin_memory().to(device)"),
    (PINNED, "self._copied.synchronize()", "pass"),
    (PINNED, "return self._copied is None or self._copied.query()", "return False"),
    (PINNED, "pin_memory=True) if keep else", "pin_memory=True) if not encodings and False else"),
    (f"{OF_ALL}/buckets.py", "len(self.parameters) == 1 and", "not self.parameters and"),
    (
        PINNED,
        "    copied = copies.to_host(device, lambda: _pairs(sources, factors))\n",
        "    for part, place in _pairs(sources, factors):\n        place.copy_(part)\n"
        "    copied = copies.computing(device).record_event()\n",
    ),
    (PINNED, "place.copy_(part.view(place.dtype), non_blocking=True)", "place.copy_(part.view(place.dtype))"),
    (PINNED, "part.to(device, non_blocking=True)", "part.to(device)"),
    (PINNED, "        decode(codec, data, places, factor)\n", "        pass\n"),
    (f"{OF_ALL}/flat.py", "flat.to(device, non_blocking=True)", "flat.cpu().to(device)"),
    (PINNED, "here if here.is_pinned() else", "not here.is_pinned() and"),
    (PINNED, "found if all(encodes(encoding.codec) for encoding in found) else ()", "()"),
    (PINNED, "*(each.memory for each in encodings if each.memory is not None)", ""),
    (f"{TORCH}/replicas.py", "on_device(self.devices[0], _gradients(other))", "_gradients(other)"),
    (f"{OF_ALL}/gradients/leaving.py", "        if wait:\n            self._begin()\n", ""),
    (f"{OF_ALL}/gradients/leaving.py", "not bucket.host.encoders or ", ""),
    (f"{OF_ALL}/gradients/leaving.py", ">= TOGETHER:\n            self._begin()", ">= 0:\n            self._begin()"),
    (f"{OF_ALL}/gradients/leaving.py", "        if self._gathered:\n            arrive(self._gathered)\n", ""),
    (f"{OF_ALL}/gradients/leaving.py", "        self._gathered.clear()\n        self._copying.clear()\n", ""),
    (f"{OF_ALL}/gradients/parameter_buckets.py", "        arriving.finish()\n", ""),
    (f"{OF_ALL}/gradients/round.py", "            self._send_copied(wait=False)\n", ""),
    (f"{OF_ALL}/gradients/round.py", "            self._leaving.add(bucket)\n", "            self._push(bucket)\n"),
    (f"{OF_ALL}/gradients/reducer.py", "at_step, last)\n        self._sent.send_rest()\n", "at_step, last)\n"),
    (f"{OF_ALL}/local_steps.py", "bucket.host.forget(bucket.device)", "pass"),
    (f"{OF_ALL}/local_steps.py", "        arriving.finish()\n", ""),
    (PINNED, "copies.computing(device).wait_event(self._copied)", "pass"),
    (f"{OF_ALL}/flat.py", "return torch._foreach_copy_(list(targets), list(sources))", "pass"),
    (f"{OF_ALL}/sums.py", "self._arriving.add(arrival(bucket, factor))", "pass"),
    (f"{OF_ALL}/sums.py", "        self._arriving.finish()\n", ""),
    (f"{OF_ALL}/on_servers.py", "self._arriving.add(bucket.weights.arrival())\n        bucket", "pass\n        bucket"),
    (
        f"{OF_ALL}/on_servers.py",
        "took(self) -> None:\n        self._arriving.finish()",
        "took(self) -> None:\n        pass",
    ),
    (PINNED, "registered.register(", "list("),
    (f"{OF_ALL}/local_steps.py", "if not bucket.on_gpu}\n", "}\n"),
    (f"{OF_ALL}/gradients/pushes.py", "self._send_copied(wait=False)", "pass"),
    (
        f"{OF_ALL}/gradients/pushes.py",
        "        self._send_copied(wait=True)\n\n    def _complete",
        "\n    def _complete",
    ),
    (f"{OF_ALL}/gradients/pushes.py", "        self.leaving.forget()\n", ""),
    (f"{OF_ALL}/gradients/pushes.py", "            self._destination.took()", "            pass"),
    (f"{OF_ALL}/sums.py", "            self._arrived.append(bucket)\n", "            pass\n"),
    (f"{OF_ALL}/buckets.py", "        self.unused = None\n        if", "        if"),
    (f"{OF_ALL}/buckets.py", "copies.computing(device).record_event()", "copies.streams(device).into.record_event()"),
    (HOOKS, "            begin_copies(buffer.device, [(known.host, buffer)])\n", ""),
    (HOOKS, "functools.partial(arrive, [Arrival(known.host.arriving, buffer, 1.0 / group.size())])", "bool"),
    (STAGING, "copy.copy_(tensor.detach())", "copy.copy_(tensor.detach(), non_blocking=True)"),
    (STAGING, "        tensor.copy_(copy)\n", "        pass\n"),
    (STAGING, "                self._land()\n", ""),
    (f"{OF_ALL}/factors.py", "values.reshape(-1, width)).to(self.device)", "values.reshape(-1, width))"),
    (f"{TORCH}/sync_bn.py", "self._total.to(values.device)", "self._total"),
    (f"{TORCH}/sync_bn.py", "[part.to(parts[0].device) for part in parts]", "list(parts)"),
    (f"{GPU}/registered.py", "        devices.forget_error()\n", "        pass\n"),
)


def is_noticed(tree: Path, file: str, text: str, other: str) -> bool:
    before = (tree / file).read_text()
    assert before.count(text) == 1, f"{file}: expected one {text!r}"
    (tree / file).write_text(before.replace(text, other))
    try:
        words = [*OPTIONS.split(), *CHOSEN, *(f"tests/{file}" for file in _nearest_first(file))]
        done = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=tree, capture_output=True, timeout=1200)
    except subprocess.TimeoutExpired:
        return True
    finally:
        (tree / file).write_text(before)
    return done.returncode != 0


def _nearest_first(file: str) -> list[str]:
    return sorted(FILES, key=lambda tests: (tests == OF_JOBS) != ("process_group" in file))


def main(numbers: Sequence[str]) -> int:
    chosen = list(map(int, numbers)) or list(range(len(MUTANTS)))
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_packages(Path(folder), "dmltrain", "launch", "tests")
        shutil.copy(ROOT / "pyproject.toml", tree)
        noticed = []
        for number in chosen:
            noticed.append(is_noticed(tree, *MUTANTS[number]))
            print(number, "noticed" if noticed[-1] else f"NOT NOTICED: {MUTANTS[number]}", flush=True)
    print(f"{sum(noticed)} of {len(noticed)} were noticed")
    return 0 if sum(noticed) >= LEAST * len(noticed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
