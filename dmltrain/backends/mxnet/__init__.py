"""MXNet 1.9.1: the trainer of our programs, its own kvstores and servers, and what makes it work today."""
