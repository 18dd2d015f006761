"""torch.distributed over the servers of a job: `import dmltrain.torch` registers the backend "dmltrain".

    import dmltrain.torch
    torch.distributed.init_process_group("dmltrain")

`dmltrain.torch.hooks` has communication hooks for DistributedDataParallel.

In a scheduler's or server's process of the job the import serves it, and the process ends there; so the launcher can
start the same program in every role.
"""

from dmltrain.api import create as _create
from dmltrain.backends.torch import process_group as _process_group
from dmltrain.backends.torch.process_group import hooks as hooks
from dmltrain.base import env as _env

_environment = _env.of_collectives(_env.read())
if _environment.role != "worker":
    _create.serve_and_exit(_environment)
_process_group.register(lambda environment: _create.create("dist_sync", environment=environment))
