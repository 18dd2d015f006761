"""How bytes travel: frames, the handshake, TCP and unix sockets, shared memory inside a host."""
