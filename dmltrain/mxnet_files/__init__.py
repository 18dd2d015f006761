"""MXNet's files, read and written without MXNet: arrays (PREFIX-0001.params) and graphs (PREFIX-symbol.json)."""
