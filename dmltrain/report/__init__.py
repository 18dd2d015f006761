"""Tables and plots from the logs of training runs: the program `dmltrain-parse`.

    block     the bytes of a log in blocks of whole lines
    dialect/  the formats of logs: MXNet's and dmltrain's, Caffe's, Keras'
    run       the values of one run, by epoch
    reading   a path -> runs: a file, or a folder with the logs of one run's workers
    table     a run -> one cell per epoch and value: the mean, maximum or last of all workers
    text      tables -> markdown, CSV, JSON, tabs
    plot      tables -> a plot
    cli       the program

`dmltrain.record` has the format of dmltrain's own lines. Nothing here trains or imports a framework.
"""
