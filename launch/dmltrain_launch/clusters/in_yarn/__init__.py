"""What `--launcher yarn` asks Hadoop's YARN, and what runs in its containers. Not run against a real cluster."""
