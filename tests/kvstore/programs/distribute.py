"""What users of dmltrain.distribute do besides the plain loop; each case checks itself on every worker."""

import sys

import numpy as np

import dmltrain
from dmltrain import kvstore
from dmltrain.errors import UserError

store = kvstore.create(sys.argv[1])  # servers stay in this line, and need no torch

import torch  # noqa: E402

from dmltrain.backends.torch import distributed as torch_distributed  # noqa: E402

rank, workers = store.rank, store.num_workers


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.body = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten())
        self.head = torch.nn.Linear(4 * 4, 3)
        self.unused = torch.nn.Linear(5, 5)
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.body[1].running_mean.fill_(rank + 1.0)
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        self.other_frozen = torch.nn.Parameter(torch.full((2,), rank + 5.0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)) * self.frozen


model = Net().to(memory_format=torch.channels_last)
inner = torch.optim.SGD(
    [
        {"params": model.body.parameters()},
        {"params": [*model.head.parameters(), model.frozen, *model.unused.parameters()], "weight_decay": 0.1},
    ],
    lr=0.5,
    momentum=0.9,
)
optimizer = torch_distributed.distribute(model, inner, store, defer=sys.argv[2] == "deferred")


def everybody_has(tensors, what: str) -> None:
    flat = torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors]).numpy()
    assert np.allclose(store.all_reduce(f"check {what}", flat), workers * flat, rtol=1e-12), what


everybody_has([*model.parameters(), model.body[1].running_mean], "the first weights and statistics")
assert (model.body[1].running_mean == 1.0).all() and (model.other_frozen == 5.0).all()
assert model.mask.tolist() == [[0.0, -float("inf")], [0.0, 0.0]]

# learning-rate schedulers take it for an optimizer
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
torch.manual_seed(50 + rank)
images, labels = torch.randn(6, 1, 4, 4), torch.randint(0, 3, (6,))


def loss(part: slice = slice(None)) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(images[part]), labels[part])


for _ in range(3):
    optimizer.zero_grad(set_to_none=bool(rank))  # both ways
    loss().backward()
    optimizer.step()
    scheduler.step()
assert abs(optimizer.param_groups[0]["lr"] - 0.0005) < 1e-12
optimizer.synchronize()
store.barrier()
optimizer.synchronize()
everybody_has(model.parameters(), "weights after three steps")
assert (model.frozen == 1).all()

# several backward passes a step
model.eval()
optimizer.zero_grad()
with optimizer.accumulate():
    loss(slice(0, 2)).backward()
loss(slice(2, 6)).backward()
if store.type == "dist_sync":
    optimizer.push_gradients()  # what no backward produced, the unused layer's, counts as zero
    optimizer._wait(optimizer._buckets)
    summed = [parameter.grad.clone() for parameter in model.head.parameters()]
    own = torch.autograd.grad(loss(slice(0, 2)) + loss(slice(2, 6)), list(model.head.parameters()))
    for mean, part in zip(summed, own, strict=True):
        expected = store.all_reduce("expected", part.double().numpy()) / workers
        assert np.allclose(mean.double().numpy(), expected, atol=1e-6), "accumulated gradients"
try:
    loss().backward()
    raise SystemExit("a second backward must be refused")
except UserError as error:
    assert "optimizer.accumulate()" in str(error)
optimizer.step()
optimizer.synchronize()
store.barrier()

# gradients that are changed after they were sent
optimizer.zero_grad()
loss().backward()
if store.type == "dist_sync":
    torch.nn.utils.clip_grad_norm_(model.head.parameters(), 1e-3)
    model.body[0].weight.grad.mul_(2.0)
    try:
        optimizer.step()
        raise SystemExit("changed gradients must be refused")
    except UserError as error:
        assert "optimizer.reduce_gradients()" in str(error)
    optimizer._wait(optimizer._buckets)
    for bucket in optimizer._buckets:
        bucket.begin()
    optimizer.zero_grad()
    loss().backward()
    optimizer.reduce_gradients()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert norm > 1e-3
    everybody_has([each.grad for each in model.parameters() if each.grad is not None], "clipped gradients")
optimizer.step()
optimizer.synchronize()
store.barrier()

# its state is the optimizer's
state = optimizer.state_dict()
assert ("servers" in state) == (store.type != "dist_sync")
optimizer.load_state_dict(state)
other_optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)
for wrong, message in [
    (lambda: torch_distributed.distribute(model.head, other_optimizer, store), "not the model's"),
    (lambda: optimizer.add_param_group({"params": []}), "before dmltrain.distribute"),
]:
    try:
        wrong()
        raise SystemExit(f"must be refused: {message}")
    except UserError as error:
        assert message in str(error), error
half = torch.nn.Linear(2, 2).half()
try:
    torch_distributed.distribute(half, torch.optim.SGD(half.parameters(), lr=1.0), store)
    raise SystemExit("float16 weights must be refused")
except UserError as error:
    assert "expected float32 or float64" in str(error)
assert dmltrain.rank() == rank and dmltrain.num_workers() == workers
print("all as expected")
store.close()
