"""Steps that do what the optimizer's own step() does, without importing torch.compile's machinery."""

import os
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dmltrain import optimizers
from dmltrain.backends.torch import plain_step
from dmltrain.backends.torch.optimizer import class_of
from tests.forked_job import run_forked

ROOT = Path(__file__).parents[2]
ROWS = {each.name: each for row in optimizers.TABLE for each in (row.torch, row.plain) if each}


def run(folder: Path, text: str) -> str:
    """What a process prints that has imported torch, and postpones the compiler."""
    program = folder / "program.py"
    program.write_text(textwrap.dedent(text))
    code, said = run_forked(folder, program, environment={**os.environ, "PYTHONPATH": str(ROOT)})
    assert code == 0, said
    return said


def model_with_gradients(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    model(torch.randn(5, 3)).square().sum().backward()
    return model


def test_a_training_that_compiles_nothing_does_not_import_the_compiler(tmp_path):
    program = """
        import sys
        import numpy as np
        import torch
        from dmltrain.backends.torch import plain_step
        from dmltrain.backends.torch.server_optimizer import SliceOptimizer
        from dmltrain.kvstore import create
        from tests.backends.late_store import LateStore
        from tests.connected import connected

        plain_step.postpone_compiler()
        for store in (create("local"), LateStore()):
            model = torch.nn.Linear(3, 1)
            inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            optimizer = connected(model, inner, store, defer=True)
            before = model.weight.detach().clone()
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
            assert torch.allclose(model.weight, before - 0.1 * 2 * (1 + 1.9))

        weights = np.ones(3, np.float32)  # as a server has them
        SliceOptimizer({"name": "sgd", "lr": 0.5}, 0, weights)(weights, np.ones(3, np.float32), -1.0)
        assert weights.tolist() == [0.5] * 3
        print("torch" in sys.modules, "torch._dynamo" in sys.modules)
    """
    assert run(tmp_path, program).split() == ["True", "False"]


@pytest.mark.thorough
def test_once_the_compiler_is_there_torch_marks_the_methods_itself(tmp_path):
    """Else torch.compile would follow them into the compiled code, and the second program could not tell why."""
    program = """
        import torch
        from dmltrain.backends.torch import plain_step
        plain_step.postpone_compiler()
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        marks = [getattr(torch.optim.Optimizer, name).__wrapped__ for name in plain_step.MARKED]
        print("marks", *(vars(each)[plain_step.MARK].__module__ for each in marks))

        @torch.compile(backend="eager")
        def step(x):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})

        before = model.weight.detach().clone()
        for _ in range(2):
            step(torch.ones(2, 3))
        assert torch.allclose(model.weight, before - 0.1 * 2 * (1 + 1.9))
        print("marks", *(vars(each)[plain_step.MARK].__module__ for each in marks))
    """
    said = [line.split()[1:] for line in run(tmp_path, program).splitlines() if line.startswith("marks ")]
    before, after = map(set, said)
    assert before == {"dmltrain.backends.torch.plain_step"} and after and not after & before


@pytest.mark.parametrize("kind", sorted(ROWS))
def test_a_plain_step_is_the_optimizers_own_bit_for_bit(kind):
    results = []
    for step in (plain_step.step, lambda optimizer: optimizer.step()):
        model = model_with_gradients()
        optimizer = class_of(kind.lower())(model.parameters(), lr=0.01)
        for number, parameter in enumerate(model.parameters()):
            if ROWS[kind].numbered:  # it draws random numbers
                optimizer.state[parameter]["number"] = number
        assert plain_step.is_possible(optimizer)
        for _ in range(3):
            step(optimizer)
        results.append([parameter.detach().numpy().tobytes() for parameter in model.parameters()])
    assert results[0] == results[1]
    assert results[0] != [parameter.detach().numpy().tobytes() for parameter in model_with_gradients().parameters()]


CHANGES = [  # of an optimizer, or of all; each returns how to undo it
    lambda optimizer: optimizer.register_step_post_hook(lambda *_: None).remove,
    lambda optimizer: register_optimizer_step_pre_hook(lambda *_: None).remove,
    lambda optimizer: setattr(optimizer, "step", lambda closure=None: None),
    lambda optimizer: setattr(optimizer, "grad_scale", torch.ones(())),
    lambda optimizer: optimizer.defaults.update(differentiable=True),
]


@pytest.mark.parametrize("change", CHANGES)
def test_an_optimizer_whose_step_does_more_makes_its_own(change):
    optimizer = torch.optim.SGD(model_with_gradients().parameters(), lr=0.1)
    assert plain_step.is_possible(optimizer)
    undo = change(optimizer)
    assert not plain_step.is_possible(optimizer)
    if undo:
        undo()
        assert plain_step.is_possible(optimizer)


def test_schedulers_know_of_a_plain_step_and_profiles_name_it():
    optimizer = torch.optim.SGD(model_with_gradients().parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert plain_step.is_possible(optimizer)
    with warnings.catch_warnings(), torch.profiler.profile() as profile:
        warnings.simplefilter("error")
        plain_step.step(optimizer)
        scheduler.step()
    assert "Optimizer.step#SGD.step" in {event.key for event in profile.key_averages()}
