"""What a run writes down as it goes: the lines of its log, TensorBoard's event files, and the metrics in both."""
