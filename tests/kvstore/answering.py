"""Connected sockets, and the listener's part of a handshake on one of them."""

import socket

from dmltrain.kvstore.transport.handshake import MEMORY, Listener, ListenerHandshake
from dmltrain.kvstore.transport.link import Link


def tcp():
    """Both sockets of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return socket.create_connection(listening.getsockname()), listening.accept()[0]


def answer(sock, listener, certificate=""):
    """The link, once its caller has proved that it knows the key."""
    answers = ListenerHandshake(listener)
    while not answers.accepted:
        sock.sendall(answers.receive(sock.recv(4096)))
    connection = Link(sock)
    if listener.purpose != MEMORY:
        connection.protect(listener.keys(answers.accepted), listener.wire, listens=True, certificate=certificate)
    return connection


def data_listener():
    return Listener.new("job", b"key", "server 0")


def memory_listener():
    return Listener.new("job", b"key", "server 0", MEMORY)
