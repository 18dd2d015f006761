"""One HTML page from the logs of training runs: the program `dmltrain-report`.

    source     the paths from the user -> runs with their workers, jobs and samples; experiments
    samples    usage.csv -> what each host used
    experiment results.json -> the table of an experiment
    chart      charts as values: lines with bands, stacked bars
    thin       long series -> fewer points that keep the extremes
    pack       numbers -> text in the page
    sections/  one file for each section of the page, one table
    html       elements and tables, escaped
    document   sections -> the page
    cli        the program

assets/ has the page's own style and scripts, vendor/ the drawing library. The page needs no network, and the same logs
give the same bytes.
"""
