"""What a service does with a ServerCore, in the same order and without sockets: a push comes in, its work is run."""

import numpy as np

from dmltrain.kvstore.server.work import Work


def pushed(core, worker, key, clock, values, rate=-1.0, now=0.0, age=0.0):
    """What is to be done now that `values` (encoded: uint8, with the dtype's number) have come."""
    values, number = values if isinstance(values, tuple) else (np.asarray(values, np.float32), 0)
    push = (worker, key, 0, values.nbytes, number)
    buffer = core.completing_buffer(*push, clock, lambda size: np.empty(size, np.uint8)) or core.buffer(*push)
    buffer.array[:] = values
    return core.push(worker, key, 0, clock, rate, buffer, now, age)


def push(core, worker, key, clock, values, rate=-1.0, now=0.0):
    """The replies to that."""
    return run(core, pushed(core, worker, key, clock, values, rate, now))


def run(core, actions):
    """Carry out all work at once; the replies."""
    replies = []
    while actions:
        action = actions.pop(0)
        if isinstance(action, Work):
            action.run()
            actions += core.done(action)
            for push in action.pushes:
                if push.data.kind == "completing":  # the next push is received there
                    push.data.array.view(np.uint8)[:] = 255
        else:
            replies.append(action)
    return replies
