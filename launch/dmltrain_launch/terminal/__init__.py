"""The terminal and the log files: tagged output, the live display, the table of epochs, the log folder."""
