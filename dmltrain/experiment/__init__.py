"""Experiments: a grid of runs from one file, with its tables: the program `dmltrain-experiment`.

The way of an experiment: `base.read_yaml` (text to plain values) -> `sections` and `file` (an Experiment: `definition`)
-> `grid` (its variables, with `expression`) -> `cell` (the command of each run) -> `check`s -> `run` -> `results`.
"""
