"""The frameworks, each behind the interface of backend.py. Importing this package imports nothing else."""
