"""What a run writes while it trains: the lines of its log, TensorBoard's event files, and the metrics in both."""
