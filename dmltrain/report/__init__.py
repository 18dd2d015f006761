"""Logs of training runs -> runs -> tables and pictures: the program `dmltrain-parse`.

    block     the bytes of a log, whole lines at a time
    dialect/  what logs look like: MXNet's and ours, Caffe's, Keras'
    run       the values of one run, by epoch
    reading   a path -> runs: a file, or a folder whose workers are one run
    table     a run -> one cell per epoch and value: the mean, largest or last of all workers
    text      tables -> markdown, CSV, JSON, tabs
    plot      tables -> a picture
    cli       the program

The grammar of our own lines is `dmltrain.record`; nothing here trains or imports a framework.
"""
