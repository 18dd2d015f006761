"""A worker's links to the servers: routes, relays, and the slices of keys that travel on them."""
