"""What a step of ResNet-50 asks of a GPU beside training alone, counted on the fake device, as docs/gpus.md has it.

    python -m tests.device.counts [KVSTORE [OPTION ...]]

Memory is all that the worker has on the GPU between backward and step, in multiples of the parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests.device import fake_cuda

fake_cuda.install()

from dmltrain import kvstore, models  # noqa: E402
from tests.device.test_counts import HELD, of_a_step  # noqa: E402
from tests.device.test_on_it import in_a_job  # noqa: E402

RESNET_50 = models.create("resnet", 50, 1000, (3, 33, 33))  # the size of images changes activations only


def counts(kind: str, line: str) -> dict[str, float]:
    def of_a_worker(store: kvstore.KVStore, options: str) -> dict[str, float]:
        return of_a_step(store, options, [], RESNET_50, 1)[0]

    alone = of_a_worker(kvstore.create("local"), "")
    ((found, held),) = in_a_job(kind, 1, lambda store: (each := of_a_worker(store, line), each.pop(HELD)))
    beside = {what: number - alone[what] for what, number in found.items()}
    return {**beside, "memory": held / (4 * RESNET_50.num_parameters)}


def main(words: Sequence[str]) -> int:
    kind, *options = words or ["dist_sync"]
    for what, number in counts(kind, " ".join(options)).items():
        print(f"{what}: {number:,.2f}".removesuffix(".00"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
