"""Contests between systems that transfer the same gradients: contestants, hosts, workload and turns."""
