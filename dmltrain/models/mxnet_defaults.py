"""Constants that MXNet's files of networks leave to MXNet."""

EPSILON = 0.0010000000474974513  # of BatchNorm: 1e-3 as float32, which float64 results show
