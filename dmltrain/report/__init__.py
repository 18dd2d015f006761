"""Logs of training runs -> runs -> tables and plots: the program `dmltrain-parse`.

    reading   a path -> Run(s): one file, or a folder whose workers are one run        blocks   bytes of a log, whole lines at a time
    dialect/  what logs look like: MXNet's and ours, Caffe's, Keras's                  run      the values of a run, by epoch
    rows      one number per epoch and value: mean, max or last over the workers       table    rows -> markdown, CSV, JSON, tabs
    plot      rows -> a picture                                                         cli      the program

The grammar of our own lines is `dmltrain.record`; nothing here trains or imports a framework.
"""
