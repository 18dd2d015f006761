"""The frameworks, each behind one small interface (backend.py). Importing this package imports nothing else."""
