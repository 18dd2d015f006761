"""The roles of a job's processes."""

SCHEDULER, SERVER, WORKER = "scheduler", "server", "worker"
