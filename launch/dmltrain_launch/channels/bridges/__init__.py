"""Channels through bridges: an engine (mpirun, srun) starts a bridge on each host, which calls back over TLS."""
