"""What `--launcher ray` runs beside the launcher: the driver that talks to Ray, and how it is asked for bridges."""
