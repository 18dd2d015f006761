"""Who takes part in an elastic job, and from which op on. Pure; core.py notices who was lost."""
