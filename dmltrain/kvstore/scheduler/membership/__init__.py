"""Which workers and servers take part in an elastic job, and from which op on. Pure; core.py notices losses."""
