"""How many steps the servers have made, and their states of the optimizer, in an elastic job."""
