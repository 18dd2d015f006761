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
DEVICE = ("device/test_codecs", "device/test_counts", "device/test_on_it")
FILES = (*DEVICE, "backends/test_torch_distributed", "backends/test_torch_elastic")
CHOSEN = ("-m", "not thorough and not exhaustive", "-k", "cuda or counts or on_it")
TORCH, OF_ALL = "dmltrain/backends/torch", "dmltrain/backends/torch/distributed"
MUTANTS = (  # file, text, and what takes its place
    (f"{TORCH}/copies.py", "    out.wait_stream(computing(device))\n", ""),
    (f"{TORCH}/copies.py", "    with out:\n", "    if out:\n"),
    (f"{TORCH}/copies.py", "target.copy_(source, non_blocking=True)\n    return", "target.copy_(source)\n    return"),
    (f"{TORCH}/codecs.py", "        torch._foreach_copy_(residuals, totals)\n", ""),
    (f"{TORCH}/codecs.py", "        torch._foreach_copy_(totals, residuals)\n", ""),
    (f"{TORCH}/codecs.py", "        self.residual.copy_(torch", "        (torch"),
    (f"{TORCH}/copies.py", "return out.record_event()", "return computing(device).record_event()"),
    (f"{TORCH}/copies.py", "into.wait_stream(now)", "pass"),
    (f"{TORCH}/copies.py", "into.wait_event(free)", "pass"),
    (f"{TORCH}/copies.py", "    with into:\n", "    if into:\n"),
    (f"{TORCH}/copies.py", "target.copy_(source, non_blocking=True)\n    now", "target.copy_(source)\n    now"),
    (f"{TORCH}/copies.py", "    now.wait_stream(into)\n", ""),
    (f"{TORCH}/copies.py", "slot.copied.synchronize()", "pass"),
    (f"{TORCH}/copies.py", "        with stream:\n", "        if stream:\n"),
    (f"{TORCH}/copies.py", "to(self._device, non_blocking=True)", "to(self._device)"),
    (f"{TORCH}/copies.py", "slot.copied = stream.record_event()", "slot.copied = now.record_event()"),
    (f"{TORCH}/copies.py", "        now.wait_event(slot.copied)\n", ""),
    (f"{TORCH}/copies.py", "        placed.record_stream(now)\n", ""),
    (f"{TORCH}/replicas.py", "self._buffers[device].place(tensor)", "tensor.pin_memory().to(device)"),
    (f"{OF_ALL}/flat.py", "self._copied.synchronize()", "pass"),
    (f"{OF_ALL}/flat.py", "return self._copied is None or self._copied.query()", "return False"),
    (f"{OF_ALL}/buckets.py", "self.on_gpu and keep", "False"),
    (f"{OF_ALL}/buckets.py", "len(self.parameters) == 1 and", "not self.parameters and"),
    (
        f"{OF_ALL}/flat.py",
        "    copied = copies.to_host(device, lambda: _pairs(sources))\n",
        "    for part, place in _pairs(sources):\n        place.copy_(part)\n"
        "    copied = copies.computing(device).record_event()\n",
    ),
    (f"{OF_ALL}/flat.py", "flat.to(device, non_blocking=True)", "flat.cpu().to(device)"),
    (f"{OF_ALL}/flat.py", "here if here.is_pinned() else", "not here.is_pinned() and"),
    (f"{OF_ALL}/layout.py", "found if all(codecs.encodes(encoding.codec) for encoding in found) else ()", "()"),
    (f"{OF_ALL}/layout.py", "    pushed += [each.memory", "    _ = [each.memory"),
    (f"{TORCH}/replicas.py", "on_device(self.devices[0], _gradients(other))", "_gradients(other)"),
    (f"{OF_ALL}/gradients/leaving.py", "        if wait:\n            self._begin()\n", ""),
    (f"{OF_ALL}/gradients/leaving.py", "not bucket.host.encoders or ", ""),
    (f"{OF_ALL}/gradients/leaving.py", ">= ENCODED_TOGETHER", ">= 0"),
    (f"{OF_ALL}/gradients/leaving.py", "        self._gathered.clear()\n        self._copying.clear()\n", ""),
    (f"{OF_ALL}/gradients/round.py", "            self._send_copied(wait=False)\n", ""),
    (f"{OF_ALL}/gradients/round.py", "            self._leaving.add(bucket)\n", "            self._push(bucket)\n"),
    (f"{OF_ALL}/gradients/reducer.py", "at_step, last)\n        self._sent.send_rest()\n", "at_step, last)\n"),
    (f"{OF_ALL}/local_steps.py", "bucket.host.forget(bucket.device)", "pass"),
    (f"{OF_ALL}/flat.py", "copies.computing(device).wait_event(self._copied)", "pass"),
    (f"{OF_ALL}/flat.py", "return torch._foreach_copy_(list(targets), list(sources))", "pass"),
    (f"{OF_ALL}/flat.py", "copies.to_device(torch.from_numpy(total), gradients, unused)", "pass"),
    (f"{OF_ALL}/flat.py", "copies.to_device(torch.from_numpy(self.pulled), self._weights)", "pass"),
    (f"{OF_ALL}/layout.py", "registered.register(", "list("),
    (f"{OF_ALL}/local_steps.py", "if not bucket.on_gpu}\n", "}\n"),
    (f"{OF_ALL}/gradients/pushes.py", "self._send_copied(wait=False)", "pass"),
    (
        f"{OF_ALL}/gradients/pushes.py",
        "        self._send_copied(wait=True)\n\n    def _complete",
        "\n    def _complete",
    ),
    (f"{OF_ALL}/gradients/pushes.py", "        self.leaving.forget()\n", ""),
    (f"{OF_ALL}/gradients/pushes.py", "            self._destination.took()", "            pass"),
    (f"{OF_ALL}/sums.py", "            self._arrived.append(bucket)\n            return\n", ""),
)


def is_noticed(tree: Path, file: str, text: str, other: str) -> bool:
    before = (tree / file).read_text()
    assert before.count(text) == 1, f"{file}: expected one {text!r}"
    (tree / file).write_text(before.replace(text, other))
    try:
        words = [*OPTIONS.split(), *CHOSEN, *(f"tests/{file}.py" for file in FILES)]
        done = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=tree, capture_output=True, timeout=400)
    except subprocess.TimeoutExpired:
        return True
    finally:
        (tree / file).write_text(before)
    return done.returncode != 0


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
