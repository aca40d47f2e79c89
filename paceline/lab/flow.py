"""One end of a stream of bytes, to see what a link gives: run by its path, with the standard library alone."""

from __future__ import annotations

import socket
import statistics
import sys
import time

__all__ = ["receive", "send"]

PORT = 5201
SETTLE = 0.3  # seconds at the beginning that do not count: full buckets, slow start
SLICES = 5
PATIENCE = 10.0


def receive(seconds: float) -> float:
    """Take bytes from whoever comes; the bits per second while it lasted.

    It is the median of a few slices of the time: a pause that TCP makes after a lost packet is not the link's.
    """
    with socket.create_server(("", PORT)) as server:
        server.settimeout(PATIENCE)
        print("ready", flush=True)
        stream, _ = server.accept()
    with stream:
        stream.settimeout(PATIENCE)
        buffer = bytearray(1 << 18)
        stream.recv_into(buffer)
        settled = time.monotonic() + SETTLE
        while time.monotonic() < settled:
            stream.recv_into(buffer)
        return statistics.median(_rate(stream, buffer, seconds / SLICES) for _ in range(SLICES))


def _rate(stream: socket.socket, buffer: bytearray, seconds: float) -> float:
    count, since = 0, time.monotonic()
    while (now := time.monotonic()) < since + seconds and (got := stream.recv_into(buffer)):
        count += got
    return 8 * count / (now - since)


def send(host: str, seconds: float) -> None:
    """Send bytes until the receiver has had enough."""
    end = time.monotonic() + seconds
    with socket.create_connection((host, PORT), PATIENCE) as stream:
        try:
            while time.monotonic() < end:
                stream.sendall(bytes(1 << 16))
        except OSError:  # it has
            return


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        print(receive(float(sys.argv[2])))
    else:
        send(sys.argv[2], float(sys.argv[3]))
