"""Changes of a running job: requests from `dmltrain job`, over a unix socket of the job's launcher."""
