"""The scheduler: a pure core (registration, barriers, lost processes), its process, and its client."""
