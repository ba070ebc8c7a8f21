"""The clients of `intake`: they place orders over HTTP, each one after the other, until their input closes.

`python -m bench.client HOST PORT CLIENTS PREFIX` prints [[milliseconds of each order], seconds of all] as JSON.
"""

import asyncio
import json
import sys
import threading
import time


async def place(host: str, port: int, clients: int, prefix: str) -> tuple[list[float], float]:
    """Until the input closes; the milliseconds of each answer, and the seconds of all."""
    stop = threading.Event()
    times: list[float] = []

    def end_with_the_input() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=end_with_the_input, daemon=True).start()

    async def one(number: int) -> None:
        # By hand, on a connection that stays: a client library would take more of the machine than the server.
        reader, writer = await asyncio.open_connection(host, port)
        placed = 0
        while not stop.is_set():
            body = f'{{"id":"{prefix}-{number}-{placed}","sku":"tea","qty":1,"amount":100,"currency":"JPY"}}'
            started = time.monotonic()
            writer.write(
                f"POST /orders HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
            answer = await reader.readexactly(length)
            if not head.startswith(b"HTTP/1.1 201 "):
                raise SystemExit(f"{head.splitlines()[0]!r} {answer!r}")
            times.append((time.monotonic() - started) * 1000)
            placed += 1
        writer.close()

    begun = time.monotonic()
    await asyncio.gather(*(one(number) for number in range(clients)))
    return times, time.monotonic() - begun


if __name__ == "__main__":
    print(json.dumps(asyncio.run(place(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))))
