"""Tables and plots from the logs of training runs: the program `dmltrain-parse`.

    block     the bytes of a log in blocks of whole lines
    dialect/  the formats of logs: MXNet's and dmltrain's, Caffe's, Keras'
    run       the values of one run, by epoch
    reading   a path -> runs: a file, or a folder with the logs of one run's workers
    head      the lines at the start of a log that describe the run; arguments: the options among them
    facts     a run -> what these lines and job.json (job_record) say of it
    summary   a run -> one row for it: COLUMNS; measured has its values over workers and epochs
    series    a run -> points over epochs, iterations or time; stamp has the times of lines
    table     a run -> one cell per epoch and value: the mean, maximum or last of all workers
    text      tables -> markdown, CSV, JSON, tabs; a table that is too wide becomes several
    style     the style of all plots
    plot      tables -> a plot
    summary_text  rows of the summary -> markdown, CSV, JSON, tabs
    compare   two groups of runs -> what differs; verdict and statistic: whether it is more than noise
    show, label   values and runs -> texts for cells and headings
    command_line, actions  the options of the program, and what it does with them
    cli       the program
    page/     runs -> one HTML page: the program `dmltrain-report`

`dmltrain.logs.record` has the format of dmltrain's own lines. Nothing here trains or imports a framework.
"""
