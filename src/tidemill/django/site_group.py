"""The first program of the site's process group. It starts a guard, and becomes the site.

``manage.py tidemill dev`` runs this file by its path. The guard is a second process, which reads a
pipe. Only the command has the writing end of this pipe. So the guard reads end-of-file when the
command dies, even by ``kill -9``. The guard then kills the process group: the reloader of
``runserver``, the server, and itself.

Arguments: the file descriptor of the pipe, and the command line of the site.
"""

from __future__ import annotations

import os
import signal
import sys


def main(pipe: int, program: list[str]) -> None:
    """Start the guard, and become the program."""
    if os.fork() == 0:
        while os.read(pipe, 1):
            pass
        os.kill(0, signal.SIGKILL)  # 0 stands for all processes of this group
    os.close(pipe)
    os.execv(program[0], program)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
