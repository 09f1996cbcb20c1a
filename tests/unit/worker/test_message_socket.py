"""The socket between supervisor and process, after a task has changed its descriptor."""

from __future__ import annotations

import os
import socket
import threading

from tidemill.core.owner import Command
from tidemill.worker.child_protocol import Down, MessageSocket, Up


def test_a_socket_that_a_task_made_non_blocking_still_sends_and_waits() -> None:
    # given a process whose task has made all descriptors non-blocking
    ours, theirs = socket.socketpair()
    supervisor: MessageSocket[Down, Up] = MessageSocket(ours, Up)
    process: MessageSocket[Up, Down] = MessageSocket(theirs, Down)
    os.set_blocking(theirs.fileno(), False)
    # when it sends more than the kernel takes at a time
    sender = threading.Thread(target=process.send, args=(Up(returned=list(range(2_000_000))),))
    sender.start()
    frames: list[Up] = []
    while not frames:
        frames = supervisor.receive()
    sender.join()
    # then all of it arrives, and a read waits for the next word instead of spinning
    assert len(frames[0].returned) == 2_000_000
    os.set_blocking(theirs.fileno(), False)
    assert process.receive() == []
    assert os.get_blocking(theirs.fileno())
    supervisor.post(Down(commands=[Command("lost")]))
    assert process.receive()[0].commands[0].verb == "lost"
    supervisor.close()
    process.close()
