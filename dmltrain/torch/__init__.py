"""torch.distributed over the servers of a job: `import dmltrain.torch` registers the backend "dmltrain".

    import dmltrain.torch
    torch.distributed.init_process_group("dmltrain")

`bytes_summed()` is how many bytes of this worker's tensors were summed by the servers, or by the workers of one host in
shared memory; `waited()` how long it waited for sums, by cause. `dmltrain.torch.hooks` has communication hooks for
DistributedDataParallel. `dmltrain.torch.lightning` and `dmltrain.torch.accelerate` are for programs that make their
process group themselves.

In a scheduler's or server's process of the job the import serves it, and the process ends there; so the launcher can
start the same program in every role. `python -m dmltrain.torch train.py ...` runs a script that is not changed: see
`--torch-backend` of dmltrain-launch.
"""

from dmltrain.api import create as _create
from dmltrain.base import env as _env

_environment = _env.of_collectives(_env.read())
if _environment.role != "worker":
    _create.serve_and_exit(_environment)  # without PyTorch, which takes seconds and memory

from dmltrain.backends.torch import process_group as _process_group  # noqa: E402
from dmltrain.backends.torch.process_group import bytes_summed as bytes_summed  # noqa: E402
from dmltrain.backends.torch.process_group import hooks as hooks  # noqa: E402
from dmltrain.backends.torch.process_group import waited as waited  # noqa: E402

_process_group.register(lambda environment: _create.create("dist_sync", environment=environment))
