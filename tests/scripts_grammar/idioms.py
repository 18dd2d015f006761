"""What training scripts do, and what happens then with `dmltrain.distribute`: the grammar of random programs
(drawing.py), and the contract that a page of the documentation shows (page.py).

An idiom is code at some places of a program. Places that are once in a program: `before` and `after` distribute, and
`groups`, the parameters of the optimizer. `early` and `late` are before two steps, the second after the first. In some
steps: `zero`, `loss`, `backward` and `step` in place of the usual code; `gradients` after backward; `stepped` after the
step. `always` is after each step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ONE_OF = ("zero", "loss", "backward", "step")
USUAL = {
    "zero": "optimizer.zero_grad()",
    "loss": "loss(model, $batch)",
    "backward": "$scale($loss).backward()",
    "step": "optimizer.step()",
    "groups": "model.parameters()",
    "optimizer": "optimizer = distribute(model, $optimizer)",
    "note": "note(model)",
}
AS_ALONE = "the same as in one process"
HALVED = "def halved(p):\n    p.grad.mul_(0.5)\ntrained(model)[0].register_post_accumulate_grad_hook(halved)"
OF_MEAN = "it sees and changes the mean of all workers' gradients, the same on all"


@dataclass(frozen=True, eq=False)
class Idiom:
    """One row. `ddp`: DistributedDataParallel trains it rightly. `local`: gradients are this worker's own until the
    step, so nothing else may look at them. `looks`: it does. `elastic`: an elastic job can have it. `needs`: an
    attribute of the model's class, or a style."""

    name: str
    does: str
    happens: str
    code: dict[str, str] = field(default_factory=dict)
    ddp: bool = True
    local: bool = False
    looks: bool = False
    elastic: bool = True
    needs: str = ""


def row(name: str, does: str, happens: str, *, ddp: bool = True, needs: str = "", **more: Any) -> Idiom:
    flags = {flag: more.pop(flag, flag == "elastic") for flag in ("local", "looks", "elastic")}
    return Idiom(name, does, happens, more, ddp, needs=needs, **flags)


NONE = row("", "", "")
# A program has one of these. What a style says of a place holds in all steps.
STYLES = [
    row("plain", "calls `zero_grad()`, `backward()` and `step()`", AS_ALONE),
    row(
        "amp", "uses `torch.autocast` and `GradScaler`, also where some steps overflow on one worker alone",
        "all workers skip a step of which one has an overflow",
        after='scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)',
        step="scaler.step(optimizer)\nscaler.update()",
    ),
    row(
        "closure", "gives `step()` a closure, as LBFGS needs it",
        "each backward in it averages gradients, and its loss is the mean over the workers",
        zero="", backward="",
        step="def closure():\n    optimizer.zero_grad()\n    value = $loss\n    value.backward()\n    return value\n"
        "note(optimizer.step(closure))",
    ),
    row(
        "two optimizers", "has two optimizers for one model, and steps both", AS_ALONE, elastic=False,
        optimizer="optimizer = distribute(model, $first)\nother = distribute(model, $last)",
        zero="optimizer.zero_grad()\nother.zero_grad()", step="optimizer.step()\nother.step()",
    ),
    row(
        "two optimizers in turn", "has two optimizers for one model, each with a loss of its own", AS_ALONE,
        elastic=False,
        optimizer="optimizer = distribute(model, $first)\nother = distribute(model, $last)",
        zero="optimizer.zero_grad()",
        step="optimizer.step()\nother.zero_grad()\nloss(model, $batch + 50).backward()\nother.step()",
    ),
    row(
        "two models", "trains two models against each other (GAN): the loss of one also reaches the other",
        "each gradient is averaged when its backward ends, whether a step uses it or not",
        before="critic = made(Mlp, $number)",
        optimizer="optimizer = distribute(model, $optimizer)\n"
        "other = distribute(critic, torch.optim.Adam(critic.parameters(), lr=0.01))",
        step="optimizer.step()\nother.zero_grad()\n"
        "(each_worker(lambda rank: critic(part_loss(model, $batch, rank).expand(1, 4)).sum())"
        " + loss(critic, $batch)).backward()\nother.step()",
        note="note(model, critic)",
    ),
    row(
        "steps within backward", "has an optimizer for each parameter, which steps as soon as its gradient is there",
        "refused: call `step()` after `backward()`", ddp=False,
        optimizer="optimizer = distribute(model, $optimizer)\n"
        "optimizers = {p: distribute(model, torch.optim.SGD([p], lr=0.1)) for p in trained(model)}\n"
        "def step_now(p):\n    optimizers[p].step()\n    p.grad = None\n"
        "for p in optimizers:\n    p.register_post_accumulate_grad_hook(step_now)",
        step="",
    ),
    row(
        "steps on moved weights",
        "computes gradients at weights that it moves by the gradients of another backward (SAM)",
        AS_ALONE,
        backward="($loss).backward()\nmoves = [(p, 0.1 * p.grad.to_dense()) for p in graded(model)]\n"
        "with torch.no_grad():\n    for p, move in moves:\n        p.add_(move)\n"
        "optimizer.zero_grad()\n($loss).backward()\n"
        "with torch.no_grad():\n    for p, move in moves:\n        p.sub_(move)",
    ),
    row(
        "one optimizer for two models", "has one optimizer for two models (`nn.ModuleList([a, b])` for `distribute`)",
        AS_ALONE, before="critic = made(Mlp, $number)\nboth = nn.ModuleList([model, critic])",
        optimizer="optimizer = distribute(both, torch.optim.SGD(both.parameters(), lr=0.1))",
        backward="($loss).backward()\nloss(critic, $batch).backward()", note="note(model, critic)",
    ),
    row(
        "one optimizer is torch's own", "has a second optimizer that was not given to `distribute`",
        "its gradients are the means too; its steps are not checked",
        elastic=False, after="other = torch.optim.SGD(model.last.parameters(), lr=0.05)",
        step="optimizer.step()\nother.step()",
    ),
]  # fmt: skip

OPTIMIZERS = [
    "torch.optim.SGD($groups, lr=0.1)",
    "torch.optim.SGD($groups, lr=0.05, momentum=0.9, weight_decay=0.01)",
    "torch.optim.SGD($groups, lr=0.05, momentum=0.9, nesterov=True, foreach=True)",
    "torch.optim.SGD($groups, lr=0.05, momentum=0.9, fused=True)",
    "torch.optim.Adam($groups, lr=0.02)",
    "torch.optim.Adam($groups, lr=0.02, weight_decay=0.01, foreach=True)",
    "torch.optim.AdamW($groups, lr=0.02, weight_decay=0.1, fused=True)",
    "torch.optim.AdamW($groups, lr=0.02, weight_decay=0.1, amsgrad=True)",
    "torch.optim.RMSprop($groups, lr=0.01, momentum=0.5, eps=1e-3)",
    "torch.optim.Adagrad($groups, lr=0.05, eps=1e-3)",
    "torch.optim.Adamax($groups, lr=0.02, eps=1e-3)",
    "torch.optim.NAdam($groups, lr=0.02)",
    "torch.optim.ASGD($groups, lr=0.05)",
    "torch.optim.Adadelta($groups, lr=0.5)",
    "torch.optim.SGD($groups, lr=torch.tensor(0.1), momentum=0.5)",
    "torch.optim.Adam($groups, lr=torch.tensor(0.02), foreach=False)",
]
BY_STYLE = {
    "closure": [
        *OPTIMIZERS[:5],
        "torch.optim.LBFGS($groups, lr=0.1, max_iter=3)",
        'torch.optim.LBFGS($groups, lr=0.5, max_iter=3, line_search_fn="strong_wolfe")',
    ]
}
LOSSES = [
    row("a penalty on weights", "adds a penalty on the weights to the loss", AS_ALONE,
        loss="loss(model, $batch) + 0.01 * sum(p.square().sum() for p in model.parameters())"),
    row("a penalty on gradients", "has gradients in the loss (`torch.autograd.grad` with `create_graph`)",
        "only the gradients of `backward()` are averaged",
        loss="each_worker(lambda rank: (value := part_loss(model, $batch, rank)) + sum(g.square().sum() for g in "
        "torch.autograd.grad(value, trained(model)[-1:], create_graph=True)))", needs="plain"),
    row("a buffer in the loss", "has a buffer that it changes after each step",
        "each worker changes its own in the same way",
        before='model.register_buffer("factor", torch.ones((), dtype=torch.float64))', always="model.factor.mul_(0.9)",
        loss="loss(model, $batch) * model.factor"),
    row("functional_call", "calls the model through `torch.func.functional_call`", AS_ALONE,
        loss="loss(functools.partial(torch.func.functional_call, model, dict(model.named_parameters())), $batch)"),
    row("another branch", "uses other layers of the model in some steps",
        "a layer that no worker has used keeps `grad` None, so that no optimizer moves it",
        loss="loss(model, $batch, branch=1)", needs="has_branches"),
    row("a branch for each worker", "uses other layers on each worker",
        "the mean over all workers, where a worker that has not used a layer counts as zeros",
        loss="each_worker(lambda rank: part_loss(model, $batch, rank, branch=rank % 2))", needs="has_branches"),
    row("a loss without parameters", "has a loss that uses no parameter on one worker",
        "that worker counts as zeros; it takes part at its next `step()`",
        loss="each_worker(lambda rank: part_loss(model, $batch, rank) if rank else "
        "torch.zeros((), dtype=torch.float64, requires_grad=True) * 1)", ddp=False, local=True, needs="plain"),
    row("an overflow", "has a loss that is not finite on one worker", "the mean is not finite on all workers",
        loss="each_worker(lambda rank: part_loss(model, $batch, rank) * (1 if rank else torch.inf))", needs="amp"),
]  # fmt: skip

BACKWARDS = [
    row("several backwards", "calls `backward()` several times before `step()`", "the sum of the means",
        backward="$scale($loss).backward()\n$scale(loss(model, $batch + 100)).backward()"),
    row("accumulate", "puts all backwards of a step but the last under `with optimizer.accumulate():`",
        "the gradients are sent once, with the last backward",
        backward="with optimizer.accumulate():\n    $scale($loss).backward()\n    $scale(loss(model, $batch + 100))"
        ".backward()\n$scale(loss(model, $batch + 200)).backward()"),
    row("accumulate to the end", "puts all backwards of a step under `with optimizer.accumulate():`",
        "`step()` averages the gradients; until then they are the worker's own",
        backward="with optimizer.accumulate():\n    ($loss).backward()", ddp=False, local=True, needs="plain"),
    row("a batch thrown away", "calls `zero_grad()` after a backward, without a step", AS_ALONE,
        backward="$scale($loss).backward()\noptimizer.zero_grad()\n$scale(loss(model, $batch + 100)).backward()"),
    row("retain_graph", "calls `backward(retain_graph=True)` and then `backward()`", "the sum of the means",
        backward="value = $loss\n$scale(value).backward(retain_graph=True)\n$scale(value * 0.5).backward()"),
    row("create_graph", "calls `backward(create_graph=True)`", "the gradients are the means, without a graph",
        backward="($loss).backward(create_graph=True)", ddp=False, needs="plain"),
    row("several losses", "calls `torch.autograd.backward` with several losses", "the mean of their sum",
        backward="torch.autograd.backward([$loss, loss(model, $batch + 100)])", needs="plain"),
    row("some inputs", "calls `backward(inputs=...)`", "only the gradients of these change",
        backward="($loss).backward(inputs=list(model.$layer.parameters()))", needs="plain"),
    row("gradients set by hand", "sets `p.grad` from `torch.autograd.grad`, and calls no `backward()`",
        "`step()` averages what `p.grad` is",
        backward="for p, gradient in zip(trained(model), torch.autograd.grad($loss, trained(model), "
        "allow_unused=True)):\n    p.grad = gradient", ddp=False, local=True, needs="plain"),
    row("no backward on one worker", "calls `backward()` on some workers only",
        "the others count as zeros; they take part at their `step()`",
        backward="value = each_worker(lambda rank: part_loss(model, $batch, rank) if rank else "
        "torch.zeros((), dtype=torch.float64))\nif value.requires_grad:\n    value.backward()",
        ddp=False, local=True, needs="plain"),
    row("backward with a gradient", "gives `backward()` a gradient", AS_ALONE,
        backward="$scale($loss).backward(torch.tensor(0.5, dtype=torch.float64))"),
    row("backward in a thread", "calls `backward()` in a thread of its own", AS_ALONE,
        backward="thread = threading.Thread(target=($loss).backward)\nthread.start()\nthread.join()", needs="plain"),
    row("an error that is caught", "goes on after a `backward()` that ended with an error on all workers",
        "refused, if gradients had been sent already; else as in one process",
        backward="hook = trained(model)[0].register_hook(fail)\ntry:\n    ($loss).backward()\nexcept ArithmeticError:\n"
        "    optimizer.zero_grad()\nhook.remove()\n(loss(model, $batch + 100)).backward()",
        ddp=False, local=True, needs="plain"),
    row("autocast", "computes under `torch.autocast`", AS_ALONE,
        backward='with torch.autocast("cpu", torch.bfloat16):\n    value = $loss\n$scale(value).backward()'),
    row("frozen for one backward", "freezes a layer for one of two backwards", AS_ALONE,
        backward="model.last.requires_grad_(False)\n$scale($loss).backward()\nmodel.last.requires_grad_(True)\n"
        "$scale(loss(model, $batch + 100)).backward()"),
]  # fmt: skip

ZEROS = [
    row("zeros", "calls `zero_grad(set_to_none=False)`", AS_ALONE, zero="optimizer.zero_grad(set_to_none=False)"),
    row("the model's zero_grad", "calls `model.zero_grad()`", AS_ALONE, zero="model.zero_grad()"),
    row("None by hand", "sets `p.grad = None`", AS_ALONE, zero="for p in model.parameters():\n    p.grad = None"),
    row("detached zeros", "calls `p.grad.detach_()` and `p.grad.zero_()`", AS_ALONE,
        zero="for p in graded(model):\n    p.grad.detach_()\n    p.grad.zero_()", elastic=False),
    row("zeros by hand", "sets `p.grad` to zeros", "zeros are a gradient: the optimizer moves the weight",
        zero="for p in trained(model):\n    p.grad = torch.zeros_like(p)"),
    row("flat gradients", "has all gradients in one tensor", OF_MEAN + "; `p.grad` stays the tensor that it is",
        zero="flat = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)\n"
        "for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()])):\n"
        "    p.grad = part.view_as(p)",
        gradients="if all(p.grad is not None and p.grad._base is flat for p in model.parameters()):\n    note(flat)",
        elastic=False),
    row("no zero_grad", "leaves gradients as they are after a step", "the next backward adds its mean", zero=""),
    row("zero_grad after step", "calls `zero_grad()` after `step()`", AS_ALONE,
        zero="", always="optimizer.zero_grad()"),
]  # fmt: skip

GRADIENTS = [
    row("clip by norm", "calls `clip_grad_norm_` after `backward()`", OF_MEAN,
        gradients="note(nn.utils.clip_grad_norm_(model.parameters(), $small))"),
    row("clip by value", "calls `clip_grad_value_`", OF_MEAN,
        gradients="nn.utils.clip_grad_value_(model.parameters(), $small)"),
    row("clamp of data", "changes `p.grad.data`", OF_MEAN,
        gradients="for p in graded(model):\n    p.grad.data.clamp_(-$small, $small)"),
    row("foreach", "changes gradients with `torch._foreach_*`", OF_MEAN,
        gradients="torch._foreach_mul_([p.grad for p in graded(model)], 0.5)"),
    row("mask", "multiplies gradients by masks", OF_MEAN,
        gradients="for p in graded(model):\n    p.grad.mul_(draw($number, p) > 0)"),
    row("noise", "adds noise that is the same on all workers", OF_MEAN,
        gradients="for p in graded(model):\n    p.grad.add_(draw($number, p), alpha=0.01)"),
    row("replaced", "replaces `p.grad`", OF_MEAN,
        gradients="for p in graded(model):\n    p.grad = p.grad * 0.5 + 0.01 * p.detach()"),
    row("dropped", "sets `p.grad = None` after `backward()`", "the optimizer leaves the parameter alone on all workers",
        gradients="for p in model.$layer.parameters():\n    p.grad = None"),
    row("a norm that is measured", "measures the norm of the gradients", OF_MEAN, gradients="note(norm(model))"),
    row("through numpy", "changes gradients through numpy", OF_MEAN,
        gradients="for p in graded(model):\n    p.grad.numpy()[...] *= 0.5"),
    row("momentum by hand", "keeps gradients for later steps", OF_MEAN,
        gradients="for p in graded(model):\n    p.kept = getattr(p, 'kept', 0) * 0.5 + p.grad\n    p.grad = p.kept",
        elastic=False),
    row("unscale_", "calls `scaler.unscale_(optimizer)` and clips", OF_MEAN,
        gradients="scaler.unscale_(optimizer)\nnn.utils.clip_grad_norm_(model.parameters(), $small)", needs="amp"),
]  # fmt: skip

STEPS = [
    row("a skipped step", "skips `step()` in some steps", AS_ALONE, step="pass  # no step"),
    row("a step that depends on the norm", "skips `step()` where the norm of the gradients is large", OF_MEAN,
        step="if norm(model) < $large:\n    optimizer.step()", needs="plain", looks=True),
    row("two steps", "calls `step()` twice after one backward", AS_ALONE, step="optimizer.step()\noptimizer.step()",
        needs="plain"),
    row("a closure sometimes", "gives `step()` a closure that calls `backward()`", AS_ALONE,
        step="optimizer.zero_grad()\nnote(optimizer.step(lambda: (value := loss(model, $batch), value.backward())[0]))",
        needs="plain", elastic=False),
    row("weights clamped", "changes weights after the step", AS_ALONE,
        stepped="for p in model.parameters():\n    p.data.clamp_(-0.5, 0.5)"),
    row("weights replaced", "replaces `p.data`", AS_ALONE,
        stepped="for p in model.parameters():\n    p.data = p.data * 0.9"),
    row("weights from a vector", "calls `vector_to_parameters`", AS_ALONE,
        stepped="flat = nn.utils.parameters_to_vector(model.parameters()).detach() * 0.9\n"
        "nn.utils.vector_to_parameters(flat, model.parameters())"),
    row("a layer begins anew", "gives a layer new weights during training",
        "the same weights are to be drawn on all workers",
        stepped="with torch.no_grad():\n    for p in model.$layer.parameters():\n        p.copy_(draw($number, p))"),
    row("evaluation on one worker", "evaluates or saves on the first worker alone", AS_ALONE,
        stepped="if first_worker():\n    model.eval()\n    with torch.no_grad():\n        part_loss(model, 99, 0)\n"
        "    model.train()\n    copy.deepcopy((model.state_dict(), optimizer.state_dict()))"),
    row("state forgotten", "empties the optimizer's state", AS_ALONE, stepped="optimizer.state.clear()"),
    row("evaluation", "evaluates between steps", AS_ALONE,
        stepped="model.eval()\nwith torch.no_grad():\n    loss(model, 99)\nmodel.train()"),
    row("inference_mode", "evaluates under `torch.inference_mode`", AS_ALONE,
        stepped="model.eval()\nwith torch.inference_mode():\n    loss(model, 99)\nmodel.train()"),
]  # fmt: skip

OPTIONS = [
    row("a rate by hand", "changes learning rates", AS_ALONE,
        stepped='for group in optimizer.param_groups:\n    group["lr"] = group["lr"] * 0.7'),
    row("weight decay by hand", "changes weight decay or momentum", AS_ALONE,
        stepped='for group in optimizer.param_groups:\n    group["weight_decay"] = 0.05'),
    row("StepLR", "has a scheduler", AS_ALONE, after="schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)",
        always="schedule.step()"),
    row("OneCycleLR", "has a scheduler that also changes momentum", AS_ALONE,
        after="schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)",
        always="schedule.step()"),
    row("LambdaLR", "has a scheduler with a warm-up (Noam)", AS_ALONE,
        after="schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))",
        always="schedule.step()"),
    row("ReduceLROnPlateau", "has a scheduler that looks at a number", "the number is to be the same on all workers",
        after="schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)",
        always="schedule.step(norm(model))", needs="plain"),
    row("schedulers in turn", "has several schedulers, one after the other", AS_ALONE,
        after="schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, ["
        "torch.optim.lr_scheduler.LinearLR(optimizer, 0.5), "
        "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)], [1])", always="schedule.step()"),
    row("groups", "has groups of parameters", AS_ALONE,
        groups='[{"params": list(model.last.parameters()), "lr": 0.05}, '
        '{"params": [p for p in model.parameters() if all(p is not q for q in model.last.parameters())]}]'),
    row("some parameters", "trains some of the parameters", "the others stay as they are",
        groups="model.last.parameters()", elastic=False),
]  # fmt: skip

PHASES = [
    row("frozen from the start", "freezes a layer before `distribute`", "it stays worker 0's",
        before="model.$layer.requires_grad_(False)"),
    row("unfrozen", "freezes a layer before `distribute`, and unfreezes it later", "it trains from then on",
        before="model.$layer.requires_grad_(False)", late="model.$layer.requires_grad_(True)", ddp=False),
    row("frozen later", "freezes a layer during training", "it stays as it is from then on",
        early="model.$layer.requires_grad_(False)"),
    row("frozen for some time", "freezes a layer and unfreezes it", AS_ALONE,
        early="model.$layer.requires_grad_(False)", late="model.$layer.requires_grad_(True)"),
    row("a group that comes later", "unfreezes a layer and calls `add_param_group`", "it trains from then on",
        before="model.first.requires_grad_(False)", groups="trained(model)",
        late='model.first.requires_grad_(True)\noptimizer.add_param_group({"params": list(model.first.parameters())})',
        ddp=False),
    row("another optimizer", "makes another optimizer in the middle, and calls `distribute` again",
        "it replaces the first one", late="optimizer = distribute(model, $another)"),
    row("another optimizer for a part", "goes on with an optimizer for some layers", "the others stay as they are",
        late="optimizer = distribute(model, torch.optim.SGD(model.$layer.parameters(), lr=0.1, momentum=0.9))",
        elastic=False),
    row("another model", "goes on with another model", "as with the first",
        late="model = made(type(model), $number)\noptimizer = distribute(model, $another)"),
    row("a new head", "replaces a layer, and makes a new optimizer", "all workers get worker 0's new layer",
        late="model.last = made(type(model), $number).last\noptimizer = distribute(model, $another)"),
    row("a new head in a group", "replaces a layer, and calls `add_param_group`",
        "all workers get worker 0's new layer",
        late='model.last = made(type(model), $number).last\n'
        'optimizer.add_param_group({"params": list(model.last.parameters())})', ddp=False),
    row("a layer pruned", "prunes a layer (`torch.nn.utils.prune`), and makes a new optimizer", AS_ALONE,
        late='from torch.nn.utils import prune\nprune.l1_unstructured(model.first, "weight", 2)\n'
        "optimizer = distribute(model, $another)"),
    row("parametrized later", "parametrizes a layer, and makes a new optimizer", AS_ALONE,
        late="nn.utils.parametrizations.weight_norm(model.first)\noptimizer = distribute(model, $another)"),
    row("distribute twice", "calls `distribute` again with what it returned", AS_ALONE,
        late="optimizer = distribute(model, optimizer)"),
    row("a model within another", "puts the model into another one, which it gives to `distribute`", AS_ALONE,
        late="whole = nn.Sequential(model)\noptimizer = distribute(whole, $another)"),
    row("a part of a model", "calls `distribute` for a part of the model and its own optimizer, too", AS_ALONE,
        late="optimizer = distribute(model.first, torch.optim.SGD(model.first.parameters(), lr=0.1))", elastic=False),
    row("a parameter leaves", "takes parameters out of a group", "they stay as they are",
        late='del optimizer.param_groups[0]["params"][-1:]'),
    row("load", "keeps `state_dict()` of the model and the optimizer, and loads it later", AS_ALONE,
        early="kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))",
        late="model.load_state_dict(kept[0])\noptimizer.load_state_dict(kept[1])"),
    row("resume", "loads a checkpoint into a new model and a new optimizer", AS_ALONE,
        early="kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))",
        late="model = made(type(model), $number)\noptimizer = distribute(model, $optimizer)\n"
        "model.load_state_dict(kept[0])\noptimizer.load_state_dict(kept[1])", needs="plain"),
    row("an average of weights", "keeps an average of the weights (`AveragedModel`)", AS_ALONE,
        after="average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn="
        "torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))", always="average.update_parameters(model)\nnote(average)"),
    row("average swapped in", "puts an average of weights into the model", AS_ALONE,
        early="earlier = copy.deepcopy(model.state_dict())",
        late="for name, value in model.state_dict().items():\n"
        "    value.copy_(value if not value.is_floating_point() else (value + earlier[name]) / 2)"),
    row("memory format", "changes the memory format of the weights and back", AS_ALONE,
        early="model.to(memory_format=torch.channels_last)", late="model.to(memory_format=torch.contiguous_format)",
        needs="of_images"),
    row("memory format before distribute", "has weights in channels_last", AS_ALONE,
        before="model.to(memory_format=torch.channels_last)", needs="of_images"),
    row("deepcopy", "copies the model with `copy.deepcopy`, and trains on", "the copy is a plain model",
        early="twin = copy.deepcopy(model)\nloss(twin, 98).backward()", needs="plain"),
    row("the whole model saved", "saves and loads the whole model with `torch.save`", AS_ALONE,
        early="file = io.BytesIO()\ntorch.save(model, file)\nfile.seek(0)\n"
        "model.load_state_dict(torch.load(file, weights_only=False).state_dict())"),
    row("a hook on gradients", "has a hook that scales a gradient", AS_ALONE,
        after="trained(model)[0].register_hook(lambda gradient: gradient * 0.5)"),
    row("a hook after gradients", "has a hook that changes `p.grad` when it is complete",
        "its change counts, whether it was registered before or after `distribute`",
        after=HALVED, ddp=False, needs="arrives_once"),
    row("a hook before distribute", "has such a hook before `distribute`", AS_ALONE,
        before=HALVED, ddp=False, needs="arrives_once"),
    row("a step before the first backward", "calls `step()` before the first backward", "nothing moves",
        after="optimizer.step()", needs="plain"),
    row("a hook before steps", "has a hook of the optimizer that runs before each step", "it sees the means",
        after="def before_step(*_):\n    for p in graded(model):\n        p.grad.mul_(0.5)\n"
        "optimizer.register_step_pre_hook(before_step)"),
    row("a hook after steps", "has a hook of the optimizer that runs after each step", AS_ALONE,
        after="def after_step(*_):\n    for p in model.parameters():\n        p.data.clamp_(-0.5, 0.5)\n"
        "optimizer.register_step_post_hook(after_step)"),
    row("types there and back", "changes the type of the weights and back", AS_ALONE,
        before="model.to(torch.float32)\nmodel.to(torch.float64)"),
    row("parametrized", "has a parametrized layer (`weight_norm`)", AS_ALONE,
        before="nn.utils.parametrizations.weight_norm(model.first)"),
    row("lazy modules", "calls `distribute` before lazy modules have shapes", "refused: run the model once before",
        before="model.first = nn.LazyLinear(5, dtype=torch.float64)", ddp=False, needs="dense"),
    row("lazy modules that ran", "has lazy modules, and runs the model before `distribute`", AS_ALONE,
        before="model.first = nn.LazyLinear(5, dtype=torch.float64)\nwith torch.no_grad():\n    loss(model, 0)\n"
        "    for p in model.parameters():\n        p.copy_(draw($number, p))", needs="dense"),
    row("complex weights", "has complex weights", "refused: keep their parts in one float parameter",
        before="model.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex128))"),
    row("integer weights", "has integer parameters, which cannot be trained", "they become worker 0's",
        before="model.table = nn.Parameter(torch.arange(3) + 5 * (not first_worker()), requires_grad=False)",
        groups="trained(model)"),
    row("another type later", "changes the type of the weights during training", "the means come in the new type",
        early="model.to(torch.float32)", late="model.to(torch.float64)", needs="casts", ddp=False),
    row("memory format later", "changes the memory format of the weights during training", AS_ALONE,
        early="model.to(memory_format=torch.channels_last)", needs="of_images"),
    row("weights loaded at once", "loads weights after `distribute`",
        "the same weights are to be loaded on all workers",
        after="model.load_state_dict({name: draw($number, value).to(value) if value.is_floating_point() else value "
        "for name, value in model.state_dict().items()})"),
    row("weights assigned", "calls `load_state_dict(..., assign=True)`, and makes a new optimizer", AS_ALONE,
        late="model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)\n"
        "optimizer = distribute(model, $another)"),
    row("pickle", "pickles the model, and trains the copy", "the copy is a plain model",
        early="twin = pickle.loads(pickle.dumps(model))\nloss(twin, 98).backward()", needs="plain"),
    row("a hook of a module", "has backward hooks of modules", AS_ALONE,
        after="model.last.register_full_backward_hook(lambda module, inputs, outputs: "
        "tuple(None if each is None else each * 0.5 for each in inputs))", needs="dense"),
]  # fmt: skip

EXTRAS = [*LOSSES, *BACKWARDS, *ZEROS, *GRADIENTS, *STEPS, *OPTIONS, *PHASES]
