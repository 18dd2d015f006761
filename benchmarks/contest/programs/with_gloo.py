"""The worker program of torch.distributed's gloo all-reduce in the kvstore benchmark: the usual CPU alternative."""

import argparse

import torch
import torch.distributed
from contest.loop import serve
from contest.workload import KEYS, bytes_of, shapes_of


class Gloo:
    """One gloo worker; sums the 100 arrays as 100 concurrent operations or as one flat array."""

    def __init__(self, shapes: list[tuple[int, ...]], flat: bool) -> None:
        arena = torch.zeros(bytes_of(shapes) // 4)
        tensors = list(arena.split([torch.Size(shape).numel() for shape in shapes]))
        self.parts = [arena] if flat else tensors
        self.gradients = self.results = [tensor.numpy() for tensor in tensors]  # all-reduce is in place

    def step(self) -> None:
        """Sum over all workers."""
        works = [torch.distributed.all_reduce(part, async_op=True) for part in self.parts]
        for work in works:
            work.wait()

    def close(self) -> None:
        """Leave the group."""
        torch.distributed.destroy_process_group()


def main() -> None:
    """Run one worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["tensors", "flat"], required=True)
    parser.add_argument("--megabytes", type=float)
    parser.add_argument("--keys", type=int, default=KEYS)
    arguments = parser.parse_args()
    torch.distributed.init_process_group("gloo")
    contestant = Gloo(shapes_of(arguments.megabytes, arguments.keys), arguments.mode == "flat")
    serve(contestant, torch.distributed.get_rank(), torch.distributed.get_world_size(), momentum=False)


if __name__ == "__main__":
    main()
