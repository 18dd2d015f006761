"""A worker whose DistributedDataParallel has a communication hook: python torch_hooks.py FILE [CODEC ...]"""

import pickle
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch_backend import DEVICE, begin, random, say, sent

from dmltrain.base.errors import UserError
from dmltrain.kvstore import codec as codecs
from dmltrain.torch import hooks

WIDTH, STEPS = 150, 4
HOOKS = {"none": hooks.none, "bf16": hooks.bf16, "int8": hooks.int8, "2bit": hooks.two_bit, "topk": hooks.topk}


def wrapped():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 2)]
    return torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers).to(DEVICE), bucket_cap_mb=0.08)


def train(model, state, hook):
    """Returns the gradients and the means of each bucket of each step, and the bytes that each step has sent."""
    seen, carried = [], []

    def recording(state, bucket):
        own, index = bucket.buffer().cpu().numpy().copy(), bucket.index()

        def keep(future):
            seen[-1][index] = own, future.value().cpu().numpy().copy()
            return future.value()

        return hook(state, bucket).then(keep)

    model.register_comm_hook(state, recording)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        seen.append({})
        before = sent()
        optimizer.zero_grad()
        model(random(16, WIDTH, seed=step).to(DEVICE)).square().mean().backward()
        optimizer.step()
        carried.append(sent() - before)
    return seen, carried


class Reference:
    """One bucket's sum in one process. `slices`: (start, length) of each; `residuals`: of each worker, (elements,)."""

    def __init__(self, name, slices, residuals):
        self.codec, self.slices = codecs.make({"type": name}), slices
        self.residuals, self.of_sum = [each.copy() for each in residuals], np.zeros_like(residuals[0])

    def mean(self, gradients):
        result = np.empty_like(gradients[0])
        for start, length in self.slices:
            part = slice(start, start + length)
            total = np.zeros(length, np.float32)
            for number, (gradient, residual) in enumerate(zip(gradients, self.residuals, strict=True)):
                self._coded(self.codec, gradient[part], residual[part], total, first=number == 0)
            self._coded(self.codec.of_sum(len(gradients)), total.copy(), self.of_sum[part], result[part], first=True)
        return result * np.float32(1.0 / len(gradients))

    @staticmethod
    def _coded(codec, values, residual, out, first):
        data = np.empty(codec.nbytes(len(values)), np.uint8)
        codec.encode(values, data, residual if codec.needs_residual else None)
        codec.decode(data, out) if first else codec.add(data, out)


def everyone(value):
    dist.all_gather_object(found := [None] * dist.get_world_size(), value)
    return found


def slices_of(state):
    store = dist.distributed_c10d._get_default_group().sums.store
    entries = [store._entries.find(key) for key in state._keys]
    return [[(each.range.start, each.range.length) for each in entry.slices] for entry in entries]


def compares(name):
    """Each mean equals what one process computes of all gradients, also after state and hook have been loaded."""
    rank, size, saved, checkpoint = dist.get_rank(), dist.get_world_size(), None, None
    for turn in range(2 if name == "topk" else 1):
        state, hook = pickle.loads(checkpoint) if checkpoint else (hooks.State(), HOOKS[name])
        seen, carried = train(model := wrapped(), state, hook)
        seen, right, references = everyone(seen), True, {}
        loaded = everyone(saved and [each.numpy() for each in saved["residuals"]])
        for step in range(STEPS):
            for index in range(len(seen[0][step])):
                gradients, means = zip(*(each[step][index] for each in seen), strict=True)
                if step < 2 or name == "none":  # buckets that come for the first time travel as they are
                    mean = sum(gradient / np.float32(size) for gradient in gradients)
                else:
                    if index not in references:
                        zeros = [np.zeros_like(gradients[0]) for _ in gradients]
                        begun = [each[index] if each and len(each[index]) else zeros[0] for each in loaded]
                        references[index] = Reference(name, slices_of(state)[index], begun)
                    mean = references[index].mean(gradients)
                right &= all(np.array_equal(each, mean) for each in means)
        saved, checkpoint = state.state_dict(), pickle.dumps([state, hook])
        residuals = [each.residuals[rank] + (rank == 0) * each.of_sum for _, each in sorted(references.items())]
        kept = all(map(np.array_equal, residuals, [each.numpy() for each in saved["residuals"]]))
        weights = [each.detach().cpu().numpy() for each in model.parameters()]
        same = all(map(np.array_equal, everyone(weights)[0], weights))
        coded_there = sum(each.host is not None for each in state._buckets.values())
        facts = {"coded": len(references), "coded there": coded_there}
        say(turn=turn, right=bool(right), kept=kept or name == "bf16", same=same, **facts)
    elements = sum(each.numel() for each in model.parameters())
    say(share=carried[-1] / (4 * elements))


def refused(*states):
    """What the hook says to each state, without looking at gradients."""
    for state in states:
        try:
            hooks.int8(state, None)
        except (UserError, AttributeError) as error:  # None is right if there are servers
            say(refused=str(error))


if __name__ == "__main__":
    file, *names = sys.argv[1:]
    begin(file)
    refused(None, 3, hooks.State(dist.new_group(backend="gloo")))
    for name in names:
        compares(name)
    if names:
        train(wrapped(), None, hooks.int8)
    dist.destroy_process_group()
