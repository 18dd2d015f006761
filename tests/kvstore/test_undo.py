"""What an aborted round has put into a residual is taken back, whatever else was encoded."""

import random

import numpy as np

from dmltrain.kvstore.worker.undo import Undo


def encode(undo, op):
    undo.keep(op)
    undo.residual += op


def test_random_rounds_leave_what_committed_rounds_have_left_and_a_new_member_begins_at_zero():
    for seed in range(2000):
        chance, undo, committed = random.Random(seed), Undo(np.zeros(3, np.float32)), 0.0
        op = 0
        for _ in range(20):
            op += chance.choice([1, 1, 3])  # between rounds there are other ops
            for _ in range(chance.choice([0, 0, 1, 2])):  # aborted rounds, each ends with a view
                if chance.random() < 0.7:  # else it was not encoded yet
                    encode(undo, op)
                undo.back_to(op - 1)
            encode(undo, op)
            committed += op
            if chance.random() < 0.2:
                undo.back_to(op)
            assert (undo.residual == committed).all(), f"seed {seed}"
    undo = Undo(np.zeros(2, np.float32))
    encode(undo, 7)
    undo.forget()
    assert not undo.residual.any()
    encode(undo, 3)
    undo.back_to(2)
    assert not undo.residual.any()
