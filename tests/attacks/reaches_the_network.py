"""Connects to a service of the machine. Stopped: a network of its own without any peer."""

from tests.attacks.toy import UNSAFE, Desk, if_it_can

FIRES_AGAINST = UNSAFE


def attack(desk: Desk) -> None:
    desk.answer(
        if_it_can(f"""
    import socket
    socket.create_connection(("127.0.0.1", {desk.toy.port}), 2).close()
    """)
    )
