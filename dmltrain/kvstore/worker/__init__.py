"""The worker's side of the distributed store: keys, slices, links to the servers, the sum inside a host."""
