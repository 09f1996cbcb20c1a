"""The beanstalkd protocol: a port at which every client of beanstalkd works with our queues.

``doc/protocol.txt`` of beanstalkd 1.12 is what is kept to, and where that is silent, what its
``prot.c`` does. A tube is a queue. Bytes become commands in :mod:`.reading`, one client's line is
in :mod:`.connection`, what it has in :mod:`.client`, what commands do in :mod:`.commands` and
:mod:`.taking`, how jobs look from here in :mod:`.bodies` and :mod:`.numbers`, and the whole in
:mod:`.port`.
"""
