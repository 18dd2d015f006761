"""What dmltrain-launch does besides starting a job: each a module, imported when asked for."""
